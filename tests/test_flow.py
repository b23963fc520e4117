"""Gradient along depth: norms against autograd's own, verdicts on nets whose fate is known."""

from __future__ import annotations

import json
import math
import weakref
from collections.abc import Callable, Sequence
from unittest import mock

import pytest
import torch
from architectures import ARCHITECTURES
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

import gradtrace
from gradtrace.errors import NotScalar, UnknownName
from gradtrace.flow import Flow, flow_of, product_norms, sizing
from gradtrace.flow.operator_graph import OperatorGraph
from gradtrace.flow.sizing import measure, sizes
from gradtrace.ir.program import MapTable, Program, Step
from gradtrace.linops import Contract
from gradtrace.recording import gradients

WIDTH = 32
Loss = Callable[[nn.Module], Tensor]


def flow(model: nn.Module, loss_of: Loss) -> Flow:
    with gradtrace.watch(model) as watch:
        loss = loss_of(model)
    trace = watch.trace(loss, nonfinite="allow")
    return flow_of(trace.program, trace.names, trace.modules)


def plain(loss: Tensor, seed: Tensor | None = None) -> Flow:
    """Without a model."""
    program = gradtrace.program(loss)
    names = {leaf.value: f"leaf{n}" for n, leaf in enumerate(program.leaves)}
    return flow_of(program, names, {}, seed)


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(16, WIDTH), torch.randint(3, (16,))


def classified(model: nn.Module) -> Tensor:
    x, y = batch()
    return cross_entropy(model(x), y)


def deep(
    act: Callable[[], nn.Module], init: Callable[[Tensor], object], layers: int = 30
) -> nn.Module:
    torch.manual_seed(0)
    parts: list[nn.Module] = []
    for _ in range(layers):
        parts += [nn.Linear(WIDTH, WIDTH), act()]
        init(parts[-2].weight)  # type: ignore[arg-type]
    return nn.Sequential(*parts, nn.Linear(WIDTH, 3))


def normal(std: float) -> Callable[[Tensor], object]:
    return lambda weight: nn.init.normal_(weight, 0, std)


def words(found: Flow) -> dict[str, str]:
    return {row.module: row.verdict for row in found.rows if row.verdict}


class Residual(nn.Module):
    def __init__(self, layers: int = 30, gate: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.ReLU())
            for _ in range(layers)
        )
        self.out = nn.Linear(WIDTH, 3)
        self.gate = gate

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + self.gate * block(x)
        y: Tensor = self.out(x)
        return y


class Reader(nn.Module):
    """Reads a sequence and speaks at its end."""

    def __init__(self, kind: type[nn.Module], **options: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(20, 8)
        self.rnn = kind(8, WIDTH, **options)
        self.out = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.rnn(self.embed(x))
        y: Tensor = self.out(states[-1])
        return y


def read(steps: int) -> Loss:
    torch.manual_seed(2)
    x, y = torch.randint(20, (steps, 4)), torch.randint(3, (4,))
    return lambda model: cross_entropy(model(x), y)


# Verdicts ----------------------------------------------------------------------------------------


def test_small_weights_vanish() -> None:
    found = flow(deep(nn.Tanh, normal(0.05)), classified)
    assert found.verdict.startswith("Vanishing: the gradient falls from 0.")
    assert "He for ReLU, Xavier for tanh" in found.verdict
    assert found["0"].verdict == found["1"].verdict == "vanishing"
    assert found["60"].verdict == found["58"].verdict == ""
    assert found["0"].norm < found["60"].norm / 1e9


def test_the_numbers_of_the_verdict_are_those_of_the_profile() -> None:
    found = flow(deep(nn.Tanh, normal(0.05)), classified)
    body = found.profile[2:]  # the loss function is not the model's
    assert [level.module for level in body[:2]] == ["60", "59"]
    top, end = sorted(level.norm for level in body[:3])[1], sorted(x.norm for x in body[-7:])[3]
    assert f"from {top:.2g} at '59' to {end:.2g} at '3'" in found.verdict
    assert f"a factor of {top / end:.2g} over 56 operators" in found.verdict
    assert f"about {(top / end) ** (1 / 56):.3g} an operator" in found.verdict


def test_large_weights_explode() -> None:
    found = flow(deep(nn.Identity, normal(0.5)), classified)
    assert found.verdict.startswith("Exploding: the gradient rises from 0.")
    assert "clip_grad_norm_" in found.verdict
    assert found["0"].verdict == "exploding" and found["60"].verdict == ""


@pytest.mark.parametrize(
    "model",
    [
        deep(nn.ReLU, nn.init.kaiming_normal_),
        deep(nn.Tanh, nn.init.xavier_normal_),
        Residual(),
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 3)),
    ],
    ids=["he", "xavier", "residual", "shallow"],
)
def test_healthy_nets_are_called_healthy(model: nn.Module) -> None:
    found = flow(model, classified)
    assert found.verdict.startswith("The gradient neither vanishes nor explodes: it ")
    assert len(found.findings) == 1 and words(found) == {}


@pytest.mark.parametrize("name", ["gpt2", "mamba", "resnet"])
def test_real_architectures_are_healthy(name: str) -> None:
    found = flow(*ARCHITECTURES[name]())
    assert found.verdict.startswith("The gradient neither vanishes nor explodes")
    assert words(found) == {}


def test_a_rise_or_fall_below_the_factor_is_none() -> None:
    x = torch.ones(3, requires_grad=True)

    def chain(factor: float, n: int = 10) -> Tensor:
        y = x
        for _ in range(n):
            y = y * factor
        return y.sum()

    # from the second of the first three to the second of the last three: seven products
    inside, outside = 10 ** (2.99 / 7), 10 ** (3.01 / 7)
    assert "neither" in plain(chain(inside)).verdict
    assert "neither" in plain(chain(1 / inside)).verdict
    assert plain(chain(outside)).verdict.startswith("Exploding")
    assert plain(chain(1 / outside)).verdict.startswith("Vanishing")


def test_one_odd_operator_does_not_decide() -> None:
    y = x = torch.ones(3, requires_grad=True)
    for n in range(20):
        y = y * (1e-6 if n == 0 else 1e6 if n == 1 else 1.0)
    found = plain(y.sum())
    assert found.profile[-1].norm == pytest.approx(1e6 * math.sqrt(3))
    assert "neither" in found.verdict
    assert x.grad is None


# Short graphs, and the loss function -------------------------------------------------------------


def test_one_operator() -> None:
    x = torch.tensor([3.0, 4.0], requires_grad=True)
    found = plain(x.sum())
    assert [tuple(level)[:4] for level in found.profile] == [(0, 1.0, "SumBackward0", "")]
    assert found.verdict == "The graph is 1 operator deep, too few to vanish or explode."
    (row,) = found.rows
    assert (row.norm, row.handed, row.gain, row.calls, row.verdict) == (1.0, None, None, 1, "")
    assert row.own == pytest.approx(math.sqrt(2))


@pytest.mark.parametrize("make", [lambda x: x.relu(), lambda x: x.view(()), lambda x: 1 * x])
def test_the_loss_is_on_the_activation_side_even_if_it_is_a_view(
    make: Callable[[Tensor], Tensor],
) -> None:
    found = plain(make(torch.tensor(3.0, requires_grad=True)))
    assert len(found.profile) == 1 and "1 operator deep" in found.verdict


def test_two_operators_are_too_few() -> None:
    x = torch.tensor(3.0, requires_grad=True)
    found = plain((x * 1e-6).tanh())
    assert "The graph is 2 operators deep" in found.verdict


def test_numbers_alone_may_vanish_too() -> None:
    y = torch.tensor(0.3, requires_grad=True)
    for _ in range(30):
        y = (y * 0.5).tanh()
    assert plain(y).verdict.startswith("Vanishing: the gradient falls from 1 at depth 0 (")


def test_a_mean_over_many_is_no_fall() -> None:
    x = torch.ones(4_000_000, requires_grad=True)
    found = plain((x * 2).neg().neg().mean())
    assert found.profile[1].norm == pytest.approx(1 / 2000)
    assert "neither" in found.verdict


def test_the_loss_function_is_not_said_to_explode() -> None:
    """At the mean the norm is 1, at the model's output 1 / 2000."""
    model = nn.Sequential(nn.Linear(1, 1), nn.Tanh(), nn.Linear(1, 1))
    found = flow(model, lambda m: m(torch.randn(4_000_000, 1)).mean())
    assert found[""].norm == 1.0 and words(found) == {}


def test_a_loss_that_is_nearly_0_is_no_fall() -> None:
    model = deep(nn.Tanh, nn.init.xavier_normal_, 4)
    x, _ = batch()
    target = model(x).detach() + 1e-6
    found = flow(model, lambda m: mse_loss(m(x), target))
    assert found.profile[2].norm < found.profile[0].norm * 1e-5
    assert "neither" in found.verdict


def test_a_vector_of_losses_and_a_seed() -> None:
    x = torch.arange(1.0, 7.0).reshape(3, 2).requires_grad_()
    loss = x.pow(2).sum(1)
    program = gradtrace.program(loss, cotangent=torch.ones(3))
    names = {leaf.value: "x" for leaf in program.leaves}
    found = flow_of(program, names, {}, torch.tensor([0.0, 2.0, 0.0]))
    assert found.profile[0].norm == 2.0
    assert found.profile[0].zeros == pytest.approx(2 / 3)
    assert found.rows[0].own == pytest.approx(math.hypot(2 * 2 * 3, 2 * 2 * 4))
    assert flow_of(program, names, {}).profile[0].norm == pytest.approx(math.sqrt(3))
    assert flow_of(program, names, {}, torch.tensor([0, 2, 0])) == found  # integers will do
    with pytest.raises(NotScalar, match="a weight for each element"):
        flow_of(program, names, {}, torch.ones(2))


# Norms, against autograd's own -------------------------------------------------------------------


def retained(model: nn.Module, loss_of: Loss) -> dict[str, list[Tensor]]:
    """What autograd itself gives at the output of every call of a module."""
    outputs: dict[str, list[Tensor]] = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, __: object, output: Tensor) -> None:
            output.retain_grad()
            outputs.setdefault(name, []).append(output)

        return hook

    handles = [m.register_forward_hook(keep(name)) for name, m in model.named_modules() if name]
    loss_of(model).backward()  # type: ignore[no-untyped-call]
    for handle in handles:
        handle.remove()
    return {name: [_gradient(y) for y in many] for name, many in outputs.items()}


def _gradient(x: Tensor) -> Tensor:
    assert x.grad is not None
    return x.grad


@pytest.mark.parametrize("act", [nn.Tanh, nn.ReLU])
def test_rows_are_what_autograd_gives(act: Callable[[], nn.Module]) -> None:
    model = deep(act, nn.init.kaiming_normal_, 5)
    found, known = flow(model, classified), retained(model, classified)
    for name, (gradient,) in known.items():
        row = found[name]
        assert row.norm == row.first == row.last == pytest.approx(float(gradient.norm()), rel=1e-5)
        assert row.zeros == pytest.approx(float((gradient == 0).double().mean()))
        below = known.get(str(int(name) - 1))
        if below:
            assert row.handed == pytest.approx(float(below[0].norm()), rel=1e-5)
            assert row.gain == pytest.approx(float(below[0].norm() / gradient.norm()), rel=1e-5)
        else:
            assert row.handed is None and row.gain is None
        own = [p.grad for p in model.get_submodule(name).parameters() if p.grad is not None]
        if own:
            assert row.own == pytest.approx(math.hypot(*(float(g.norm()) for g in own)), rel=1e-5)
        else:
            assert row.own is None


def test_levels_are_what_autograd_gives() -> None:
    x, w = torch.randn(5, 3), torch.randn(3, 4, requires_grad=True)
    found = plain((x @ w).tanh().exp().mean())
    values = [x @ w]
    for part in (torch.tanh, torch.exp, torch.mean):
        values.append(part(values[-1]))
    known = reversed(torch.autograd.grad(values[-1], values))
    names = ["MeanBackward0", "ExpBackward0", "TanhBackward0", "MmBackward0"]
    assert [level.operator for level in found.profile] == names
    assert [level.depth for level in found.profile] == [0, 1, 2, 3]
    for level, gradient in zip(found.profile, known):
        assert level.norm == pytest.approx(float(gradient.norm()), rel=1e-5)
        assert level.rms == pytest.approx(float(gradient.pow(2).mean().sqrt()), rel=1e-5)
        assert level.largest == pytest.approx(float(gradient.abs().max()))
        assert level.entries == gradient.numel() and level.zeros == 0


def cotangents(program: Program, operator: str, entries: int) -> list[float]:
    """The norms at the outputs of operators of a kind and size, from the loss on."""
    size = measure(program, program.seed)
    depth = OperatorGraph(program, size).depth
    found = [
        (depth[n], size[value].norm)
        for n, block in enumerate(program.blocks)
        for value in block.takes.values()
        if block.operator == operator and size[value].entries == entries
    ]
    return [norm for _, norm in sorted(found)]


def test_a_recurrent_net_at_every_step() -> None:
    """The states of nn.RNN are inside it, so it is unrolled by hand to ask autograd for them."""
    steps, model, x = 200, nn.RNN(3, 6), torch.randn(200, 2, 3)
    with torch.no_grad():
        model.weight_hh_l0 *= 2
    states, h = [], torch.zeros(2, 6)
    for t in range(steps):
        rows = model.weight_ih_l0, model.bias_ih_l0, model.weight_hh_l0, model.bias_hh_l0
        h = torch.tanh(x[t] @ rows[0].T + rows[1] + h @ rows[2].T + rows[3])
        h.retain_grad()
        states.append(h)
    h.sum().backward()
    with gradtrace.watch(model) as watch:
        loss = model(x)[0][-1].sum()
    program = watch.program(loss)
    norms = cotangents(program, "TanhBackward0", 12)
    known = [float(_gradient(h).norm()) for h in reversed(states)]
    assert len(norms) == steps
    assert norms == pytest.approx(known, rel=1e-3)
    found = plain_of(program)
    levels = {level.depth: level for level in found.profile if level.operator == "TanhBackward0"}
    assert [levels[depth].norm for depth in sorted(levels)] == norms
    assert sorted(levels) == list(range(3, 3 + 3 * steps, 3))


def plain_of(program: Program) -> Flow:
    return flow_of(program, {leaf.value: f"leaf{n}" for n, leaf in enumerate(program.leaves)}, {})


def test_an_lstm_at_every_step() -> None:
    steps, model, x = 12, nn.LSTM(3, 5), torch.randn(12, 2, 3)
    h, c, cells, states = torch.zeros(2, 5), torch.zeros(2, 5), [], []
    for t in range(steps):
        gates = x[t] @ model.weight_ih_l0.T + model.bias_ih_l0
        gates = gates + h @ model.weight_hh_l0.T + model.bias_hh_l0
        i, f, g, o = gates.chunk(4, 1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        for kept, value in ((cells, c), (states, h)):
            value.retain_grad()
            kept.append(value)
    h.sum().backward()
    with gradtrace.watch(model) as watch:
        loss = model(x)[0][-1].sum()
    program = watch.program(loss)
    known = [float(_gradient(c).norm()) for c in reversed(cells)]
    assert cotangents(program, "AddBackward0", 10) == pytest.approx(known, rel=1e-4)
    products = cotangents(program, "MulBackward0", 10)  # the state is one of three for each step
    for h in states:
        norm = float(_gradient(h).norm())
        assert min(abs(norm - other) for other in products) < 1e-4 * norm


# Recurrent nets ----------------------------------------------------------------------------------


def test_a_recurrent_net_forgets() -> None:
    found = flow(Reader(nn.RNN), read(200))
    through = "Vanishing: through 200 uses of the same weights the gradient falls from 0."
    assert found.verdict.startswith(through)
    assert "to exactly 0 at depth " in found.verdict
    assert "'embed' gets " in found.verdict  # from the last steps
    assert words(found) == {"rnn": "vanishing"}


def test_exactly_0_is_reported_where_it_begins() -> None:
    found = flow(Reader(nn.RNN), read(200))
    first = next(level for level in found.profile if not level.norm)
    before = found.profile[first.depth - 1]
    assert 0 < before.norm < 1e-40
    assert f"exactly 0 at depth {first.depth} ('rnn')" in found.verdict


def test_gradients_of_weights_are_not_computed_again() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4))
    with gradtrace.watch(model) as watch:
        trace = watch.trace(model(torch.randn(8, 6)).square().mean())
    leaves = {leaf.value for leaf in trace.program.leaves if leaf.tensor.dim() > 1}
    moved = {s.terms[0].value for s in trace.program.steps() if s.out in leaves}  # transposed
    with mock.patch.object(sizing, "gradient_of", wraps=sizing.gradient_of) as computed:
        found = measure(trace.program, trace.program.seed)
    made = {call.args[0].out for call in computed.call_args_list}
    assert len(leaves) == 2 and len(moved) == 2 and not made & (leaves | moved)
    again = measure(trace.program, trace.program.seed.clone())  # of which nothing is known
    for value in (*leaves, *moved):
        assert found[value].norm == pytest.approx(again[value].norm, rel=1e-6)
        assert found[value].nonzero == again[value].nonzero
        assert found[value].entries == again[value].entries


def test_few_steps_above_a_deep_net_are_seen_by_their_uses() -> None:
    """What follows the recurrent net is healthy, so the end of the profile does not tell."""
    model = Reader(nn.RNN)
    front = [part for _ in range(20) for part in (nn.Linear(8, 8), nn.LayerNorm(8), nn.ReLU())]
    model.embed = nn.Sequential(nn.Embedding(20, 8), *front)  # type: ignore[assignment]
    found = flow(model, read(20))
    assert "through 20 uses of the same weights the gradient falls" in found.verdict
    assert found["rnn"].verdict == "vanishing" and found["embed.1"].verdict == ""


def test_a_gate_that_stays_open_remembers() -> None:
    model = Reader(nn.LSTM)
    assert flow(model, read(200)).verdict.startswith("Vanishing")
    with torch.no_grad():
        model.rnn.bias_ih_l0[WIDTH : 2 * WIDTH] = 6.0  # type: ignore[index]
    found = flow(model, read(200))
    assert found.verdict.startswith("The gradient neither vanishes nor explodes")
    assert words(found) == {}


def test_a_recurrent_net_with_large_weights_explodes() -> None:
    model = nn.RNN(3, 8, nonlinearity="relu")
    nn.init.orthogonal_(model.weight_hh_l0, 3.0)
    nn.init.constant_(model.bias_hh_l0, 5.0)
    found = flow(model, lambda m: m(torch.randn(60, 2, 3))[0][-1].sum())
    assert found.verdict.startswith("Exploding")


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cell = nn.RNNCell(3, 6)
        self.out = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros(x.shape[1], 6)
        for step in x:
            h = self.cell(step, h)
        y: Tensor = self.out(h)
        return y


def test_the_calls_of_a_cell() -> None:
    x = torch.randn(30, 2, 3)
    model = Cell()
    found = flow(model, lambda m: m(x).sum())
    known = retained(model, lambda m: m(x).sum())["cell"]
    row = found["cell"]
    assert (row.calls, row.kind, row.verdict) == (30, "RNNCell", "vanishing")
    assert row.first == pytest.approx(float(known[0].norm()), rel=1e-4)
    assert row.last == pytest.approx(float(known[-1].norm()), rel=1e-4)
    assert row.norm == row.last == pytest.approx(max(float(g.norm()) for g in known), rel=1e-4)
    assert "first call" in str(found)


def test_a_shared_module_is_one_row() -> None:
    x, shared = torch.randn(4, 5), nn.Linear(5, 5)
    model = nn.Sequential(shared, nn.Tanh(), shared, nn.Tanh(), shared)
    found, known = flow(model, lambda m: m(x).sum()), retained(model, lambda m: m(x).sum())
    assert [row.module for row in found] == ["", "0", "3", "1"]
    row = found["0"]
    norms = [float(g.norm()) for g in known["0"]]
    assert (row.calls, row.depth) == (3, 1)
    assert (row.first, row.last) == pytest.approx((norms[0], norms[2]), rel=1e-5)
    assert row.norm == pytest.approx(max(norms), rel=1e-5)
    assert row.own == pytest.approx(
        math.hypot(*(float(_gradient(p).norm()) for p in shared.parameters())), rel=1e-5
    )


def test_uses_that_a_mask_hides_are_not_vanishing() -> None:
    head = nn.Linear(4, 1)
    mask = [1.0] * 6 + [0.0] * 10

    def loss(model: nn.Module) -> Tensor:
        total = torch.zeros(())
        for weight in reversed(mask):
            total = total + weight * model(torch.ones(2, 4)).sum()
        return total

    found = flow(nn.Sequential(head), loss)
    assert found["0"].calls == 16
    assert "anishing" not in found.verdict and words(found) == {}


# What is dead ------------------------------------------------------------------------------------


def test_a_dead_relu() -> None:
    model = deep(nn.ReLU, nn.init.kaiming_normal_, 4)
    with torch.no_grad():
        model[4].bias.fill_(-100.0)  # type: ignore[index, union-attr, operator]
    found = flow(model, classified)
    assert found.findings[0].startswith("Dead: '4', '3', '2' and 2 more get no gradient at all.")
    assert "ReluBackward0 (in '5') has slope 0 at all 512 entries" in found.verdict
    assert "Elsewhere the gradient neither vanishes nor explodes: it falls from" in found.verdict
    assert words(found) == dict.fromkeys("543210", "dead")
    assert found["5"].norm > 0 and found["5"].handed == 0.0
    assert found["4"].norm == found["4"].own == 0.0 and found["4"].zeros == 1.0


def test_relus_that_seldom_open() -> None:
    model = deep(nn.ReLU, nn.init.kaiming_normal_, 4)
    with torch.no_grad():
        model[4].bias.fill_(-3.0)  # type: ignore[index, union-attr, operator]
    found = flow(model, classified)
    assert 0.95 <= found["4"].zeros < 1
    assert found["4"].verdict == "mostly dead"
    assert "Mostly dead: at the output of '4' up to 9" in found.verdict
    assert found["6"].verdict == found["2"].verdict == ""


def test_zeros_that_no_activation_function_made_are_not_dead() -> None:
    """Only the last of 40 steps is read, so of the gradient at the output 97.5% is 0."""
    found = flow(Reader(nn.LSTM), read(40))
    assert found["rnn"].zeros == pytest.approx(39 / 40)
    assert "dead" not in found["rnn"].verdict and "ead" not in found.verdict.split(":")[0]


def test_weights_that_start_at_0() -> None:
    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base, self.down, self.up = (
                nn.Linear(8, 8),
                nn.Linear(8, 2, bias=False),
                nn.Linear(2, 8, bias=False),
            )
            nn.init.zeros_(self.up.weight)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.base(x) + self.up(self.down(x))
            return y.tanh()

    found = flow(Adapted(), lambda m: m(torch.randn(4, 8)).pow(2).mean())
    assert words(found) == {"down": "dead"}
    assert "'down' gets no gradient at all. MmBackward0 (in 'up') multiplies" in found.verdict


def test_what_gets_no_samples_does_not_vanish() -> None:
    """The layers of an expert that is never chosen take and hand back empty tensors."""

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(*(nn.Linear(4, 4) for _ in range(6)))
            self.used, self.unused = (
                nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)) for _ in range(2)
            )

        def forward(self, x: Tensor) -> Tensor:
            h = self.body(x)
            none = torch.tensor([], dtype=torch.long)
            h = h.index_add(0, none, self.unused(h[none]))
            return (h + self.used(h)).sum()

    found = flow(Experts(), lambda m: m(torch.randn(3, 4)))
    assert found["unused.0"].verdict == found["unused.2"].verdict == "dead"  # their parameters
    assert found["unused.1"].verdict == ""


def test_dead_branches_do_not_cut_the_profile() -> None:
    """Skip connections carry the gradient past branches whose factor is 0."""
    found = flow(Residual(10, gate=0.0), classified)
    assert "Elsewhere the gradient neither vanishes nor explodes: it goes from" in found.verdict
    assert found["out"].verdict == "" and found["blocks.0.1"].verdict == "dead"


def test_what_the_loss_does_not_use() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(3, 2), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([self.used(x), self.unused(x)], 1)[:, :2].tanh()

    found = flow(Two(), lambda m: m(torch.randn(4, 3)).sum())
    assert words(found) == {"unused": "dead"}
    assert "CatBackward0 cuts it off: the loss does not use that part." in found.verdict


@pytest.mark.parametrize(
    ("loss", "text"),
    [
        (lambda y: (0 * y).sum(), "MulBackward0 multiplies it with zeros"),
        (lambda y: (y - 1e6).relu().sum(), "ReluBackward0 has slope 0 at all 48 entries"),
    ],
)
def test_no_gradient_at_all(loss: Callable[[Tensor], Tensor], text: str) -> None:
    x, _ = batch()
    found = flow(deep(nn.ReLU, nn.init.kaiming_normal_, 2), lambda m: loss(m(x)))
    assert found.verdict.startswith("No gradient flows: that of every leaf is exactly 0. " + text)


def test_a_seed_of_0() -> None:
    x = torch.ones(3, requires_grad=True)
    assert plain(x.tanh().sum(), torch.zeros(())).verdict == (
        "No gradient flows: the loss itself is weighed with 0."
    )


def test_underflow_is_vanishing_not_death() -> None:
    found = flow(deep(nn.Tanh, normal(0.005)), classified)
    assert "to exactly 0 at depth" in found.verdict and found.verdict.startswith("Vanishing")
    assert "dead" not in words(found).values()
    assert found["0"].norm == 0.0 and found["0"].verdict == "vanishing"


def test_underflow_of_a_cast() -> None:
    """What a cast to half precision makes 0 was not dead."""
    w = torch.ones(3, requires_grad=True)
    loss = (w.tanh().half().float() * 1e-9).sum()
    found = plain(loss)
    assert found.verdict.startswith("No gradient flows: that of every leaf is exactly 0. It falls")
    assert "below the smallest float at ToCopyBackward0" in found.verdict


def test_all_of_it_below_the_smallest_float() -> None:
    y = torch.ones(3, requires_grad=True)
    for _ in range(50):
        y = y * 1e-3
    assert "It falls below the smallest float at MulBackward0" in plain(y.sum()).verdict


class Times(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


def test_the_module_that_underflows_is_vanishing() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), *(Times(1e-5) for _ in range(12)), nn.Linear(3, 3))
    found = flow(model, lambda m: m(torch.ones(2, 3)).sum())
    lost = next(row for row in found if row.handed == 0)
    assert lost.norm > 0 and lost.kind == "Times"
    assert lost.verdict == "vanishing" and "dead" not in words(found).values()


def test_a_weight_of_0_is_death_even_if_the_gradient_is_small() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Tanh())
    nn.init.zeros_(model[1].weight)
    found = flow(model, lambda m: 1e-20 * m(torch.ones(2, 3)).sum())
    assert found["0"].verdict == "dead"


# What is no number -------------------------------------------------------------------------------


def test_where_infinity_first_appears() -> None:
    x, _ = batch()
    model = deep(nn.ReLU, nn.init.kaiming_normal_, 2)
    found = flow(model, lambda m: m(x).mul(0).sum().sqrt())
    assert found.verdict.startswith(
        "The gradient is not finite: infinity first appears in what SqrtBackward0 hands on."
    )
    assert found["4"].verdict == "not finite"
    assert len(found.findings) == 1


def test_where_nan_first_appears() -> None:
    class Bad(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * torch.tensor(float("nan"))

    model = nn.Sequential(nn.Linear(3, 3), Bad(), nn.Tanh())
    found = flow(model, lambda m: m(torch.ones(2, 3)).sum())
    assert "NaN first appears in what TanhBackward0 (in '2') hands on" in found.verdict
    assert words(found) == {"1": "not finite", "0": "not finite"}
    assert math.isnan(found["0"].norm) and math.isnan(found.profile[-1].norm)


def test_a_seed_that_is_no_number() -> None:
    x = torch.ones(3, requires_grad=True)
    seed = torch.tensor(float("nan"))
    assert "the loss itself is weighed with NaN" in plain(x.tanh().sum(), seed).verdict


def test_a_sum_that_overflows() -> None:
    x = torch.ones(2, requires_grad=True)
    y = x.tanh()
    found = plain((y * 3e38).sum() + (y * 3e38).sum())
    assert "infinity first appears in a sum of gradients" in found.verdict


@pytest.mark.parametrize("first", [1.0, float("nan")])
def test_what_is_no_number_counts_most(first: float) -> None:
    """Wherever it stands among others."""
    x = torch.ones(2, requires_grad=True)
    y = x.tanh()
    factors = (first, 1.0) if math.isnan(first) else (first, float("nan"))
    left, right = (y.sin() * factor for factor in factors)
    found = plain(left.sum() + right.sum())
    assert [math.isnan(level.norm) for level in found.profile] == [False] * 3 + [True] * 2


class Fan(nn.Module):
    """One module, whose two outputs go different ways."""

    def __init__(self, factors: tuple[float, float]) -> None:
        super().__init__()
        self.part, self.factors = nn.Linear(3, 3), factors

    def forward(self, x: Tensor) -> Tensor:
        left, right = (factor * self.part(x) for factor in self.factors)
        return left + right


@pytest.mark.parametrize("factors", [(2.0, math.nan), (math.nan, 2.0)])
def test_a_row_with_a_call_that_is_no_number(factors: tuple[float, float]) -> None:
    found = flow(Fan(factors), lambda m: m(torch.ones(2, 3)).sum())
    assert math.isnan(found["part"].norm) and found["part"].verdict == "not finite"
    assert [math.isnan(n) for n in (found["part"].first, found["part"].last)] == [
        math.isnan(factor) for factor in factors
    ]


# The activation side -----------------------------------------------------------------------------


def test_weights_lie_beside() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    found = flow(model, lambda m: m(torch.randn(5, 3)).pow(2).mean())
    assert [(level.operator, level.module) for level in found.profile] == [
        ("MeanBackward0", ""),
        ("PowBackward0", ""),
        ("AddmmBackward0", "2"),
        ("ReluBackward0", "1"),
        ("AddmmBackward0", "0"),
    ]


@pytest.mark.parametrize(
    "prepared",
    [
        lambda w: w.T,
        lambda w: w.clone().T.contiguous(),
        lambda w: w[:3],
        lambda w: w[:, 1:],
        lambda w: torch.cat([w[:, :1], torch.ones(3, 2, requires_grad=True)], 1),
        lambda w: w.unbind(0)[0].unsqueeze(1),
        lambda w: w.double().float(),
        lambda w: w.reshape(-1).reshape(3, 3),
    ],
    ids=["transposed", "copied", "all of it", "a slice", "joined", "a row", "cast", "reshaped"],
)
def test_views_of_a_leaf_lie_beside(prepared: Callable[[Tensor], Tensor]) -> None:
    w = torch.randn(3, 3, requires_grad=True)
    found = plain((torch.randn(2, 3) @ prepared(w)).sum())
    assert [level.operator for level in found.profile] == ["SumBackward0", "MmBackward0"]


@pytest.mark.parametrize(
    "made", [lambda w: -(-w).relu(), torch.tanh, lambda w: w + w, lambda w: w.sum(0).diag()]
)
def test_what_is_more_than_a_view_does_not(made: Callable[[Tensor], Tensor]) -> None:
    w = torch.randn(3, 3, requires_grad=True)
    found = plain((torch.randn(2, 3) @ made(w)).sum())
    assert len(found.profile) >= 3


def test_parametrised_weights_lie_beside() -> None:
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(3, 3, bias=False))
    model = nn.Sequential(layer, nn.Tanh())
    found = flow(model, lambda m: m(torch.randn(4, 3)).sum())
    assert [row.module for row in found] == ["", "1", "0"]
    assert found["0"].own is not None and found["0"].handed is None


def test_hooks_on_leaves_lie_beside() -> None:
    w = torch.randn(3, requires_grad=True)
    w.register_hook(lambda g: g * 2)
    found = plain(w.tanh().sum())
    assert [level.operator for level in found.profile] == ["SumBackward0", "TanhBackward0"]
    gradient = torch.autograd.grad(w.tanh().sum(), w)[0]
    assert found.rows[0].own == pytest.approx(float(gradient.norm()))


def test_depth_is_the_longest_way() -> None:
    x = torch.ones(2, requires_grad=True)
    y = x.tanh()
    found = plain((y + y.sin().cos()).sum())
    assert [level.operator[:3] for level in found.profile] == ["Sum", "Add", "Cos", "Sin", "Tan"]


@pytest.mark.parametrize("factors", [(2.0, 5.0), (5.0, 2.0)])
def test_the_largest_of_a_depth(factors: tuple[float, float]) -> None:
    y = torch.ones(2, requires_grad=True).tanh()
    left, right = (factor * y.sin() for factor in factors)
    found = plain((left + right).sum())
    assert found.profile[3].norm == pytest.approx(5 * math.sqrt(2))
    rows = flow(Fan(factors), lambda m: m(torch.ones(2, 3)).sum())
    assert rows["part"].norm == pytest.approx(5 * math.sqrt(6))


def test_parameters_of_the_model_itself() -> None:
    model, x = nn.Linear(3, 2), torch.randn(4, 3)
    found = flow(model, lambda m: m(x).tanh().sum())
    grads = torch.autograd.grad(model(x).tanh().sum(), list(model.parameters()))
    assert found[""].own == pytest.approx(math.hypot(*(float(g.norm()) for g in grads)), rel=1e-5)
    assert found[""].handed is None


def test_an_input_is_what_lies_below() -> None:
    x = torch.randn(5, 3, requires_grad=True)
    model = nn.Sequential(nn.Linear(3, 2), nn.Tanh())
    found = flow(model, lambda m: m(x.view(5, 3)).sum())
    (gradient,) = torch.autograd.grad(model(x).sum(), x)
    assert found["0"].handed == pytest.approx(float(gradient.norm()), rel=1e-5)
    assert found[""].own is None


def test_frozen_layers() -> None:
    model = deep(nn.ReLU, nn.init.kaiming_normal_, 3)
    whole = flow(model, classified)
    model[4].requires_grad_(False)  # type: ignore[index]
    passed = flow(model, classified)
    assert passed["4"].own is None and whole["4"].own is not None
    assert [row.norm for row in passed] == pytest.approx([row.norm for row in whole])
    for layer in (0, 2):
        model[layer].requires_grad_(False)  # type: ignore[index]
    ended = flow(model, classified)
    assert [row.module for row in ended] == ["", "6"]
    assert ended["6"].handed is None and "2 operators" not in ended.verdict


# The pass ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("power", [0, -3, -20, -30, -160, -300, 3, 20, 30, 300])
def test_sizes_at_the_ends_of_the_range(dtype: torch.dtype, power: int) -> None:
    x = (torch.tensor([3.0, 0.0, -4.0], dtype=torch.float64) * 10.0**power).to(dtype)
    norm, largest, nonzero, mass = sizes(x).tolist()
    numbers = [float(each) for each in x]
    assert norm == pytest.approx(math.hypot(*numbers), rel=1e-12)
    assert largest == max(map(abs, numbers))
    assert nonzero == sum(number != 0 for number in numbers)
    assert mass == pytest.approx(sum(map(abs, numbers)), rel=1e-12)


def test_sizes_of_large_tensors_are_those_of_float64() -> None:
    """Read once, in float32; whatever the layout."""
    x = torch.randn(300, 700).mul_(1e-3)
    x[:200] = 0
    for each in (x, x.t(), x[:, ::2], x * 1e-20, x * 1e22, x.expand(2, 300, 700)):
        torch.testing.assert_close(sizes(each), sizes(each.double()), rtol=1e-6, atol=0)
    x[5, 5] = math.nan
    assert sizes(x)[:2].isnan().all()


def test_sizes_of_nothing_and_of_no_numbers() -> None:
    assert sizes(torch.zeros(0, 3)).tolist() == [0, 0, 0, 0]
    for dtype in (torch.float32, torch.float64):
        norm, largest, _, mass = sizes(torch.tensor([1.0, math.nan], dtype=dtype)).tolist()
        assert math.isnan(norm) and math.isnan(largest) and math.isnan(mass)
        assert sizes(torch.tensor([1.0, math.inf], dtype=dtype)).tolist()[:2] == [math.inf] * 2


def most_held(program: Program, monkeypatch: pytest.MonkeyPatch) -> int:
    """The most cotangents that are there at a time."""
    most, before = 0, sizing.gradient_of

    def counted(step: Step, maps: MapTable, values: dict[int, Tensor]) -> Tensor:
        nonlocal most
        most = max(most, len(values))
        return before(step, maps, values)

    monkeypatch.setattr(sizing, "gradient_of", counted)
    measure(program, program.seed)
    return most


def test_cotangents_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    y = x = torch.ones(3, requires_grad=True)
    w = torch.ones(3, requires_grad=True)
    for _ in range(200):
        y = torch.tanh(y * w)
    program = gradtrace.program(y.sum())
    assert most_held(program, monkeypatch) <= 5
    size = measure(program, program.seed)
    assert set(size) >= {value for block in program.blocks for value in block.takes.values()}
    grads = torch.autograd.grad(y.sum(), [x, w])
    known = {leaf.tensor: size[leaf.value].norm for leaf in program.leaves}
    for leaf, grad in zip((x, w), grads):
        assert known[leaf] == pytest.approx(float(grad.norm()), rel=1e-5)


def test_gradients_of_leaves_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    y = torch.ones(3)
    for _ in range(100):
        y = torch.tanh(y * torch.ones(3, requires_grad=True))
    program = gradtrace.program(y.sum())
    assert most_held(program, monkeypatch) <= 3


def test_a_long_chain() -> None:
    y = torch.ones(2, requires_grad=True)
    for _ in range(5_000):
        y = y * 0.9999
    found = plain(y.sum())
    assert len(found.profile) == 5_001 and "neither" in found.verdict


def test_nothing_is_left_behind() -> None:
    model = deep(nn.Tanh, nn.init.xavier_normal_, 3)
    flow(model, classified)
    assert all(p.grad is None for p in model.parameters())


# To look at and to keep --------------------------------------------------------------------------


def test_table() -> None:
    found = flow(deep(nn.Tanh, normal(0.05)), classified)
    text = str(found)
    assert text.startswith("Gradient flow (63 operators deep)\nmodule  class ")
    assert text.endswith(found.verdict)
    assert "first call" not in text
    assert "vanishing" in found._repr_html_() and "keep it up." in found._repr_html_()
    assert repr(found) == f"Flow(62 modules, 63 deep: {found.verdict})"
    assert len(found) == len(found.table().rows) == 62


def test_html_keeps_all_sentences_whole() -> None:
    model = deep(nn.ReLU, nn.init.kaiming_normal_, 4)
    with torch.no_grad():
        model[4].bias.fill_(-100.0)  # type: ignore[index, union-attr, operator]
    found = flow(model, classified)
    assert "…" not in found._repr_html_()


def test_pandas() -> None:
    pytest.importorskip("pandas")
    frame = flow(deep(nn.Tanh, normal(0.05), 3), classified).to_pandas()
    assert list(frame["module"])[:2] == ["(top)", "6"]
    assert frame["norm"].dtype.kind == "f"


@pytest.mark.parametrize("scale", [1.0, float("inf")])
def test_dicts(scale: float) -> None:
    x, _ = batch()
    found = flow(deep(nn.Tanh, normal(0.05), 3), lambda m: scale * m(x).sum())
    text = json.dumps(found.to_dict(), allow_nan=False)
    again = Flow.from_dict(json.loads(text))
    assert again.to_dict() == found.to_dict() and str(again) == str(found)
    if scale == 1.0:
        assert again == found


def test_rows_by_name() -> None:
    found = flow(deep(nn.Tanh, normal(0.05), 3), classified)
    assert found["0"].kind == "Linear"
    with pytest.raises(UnknownName, match="no module 'nowhere' made operators"):
        found["nowhere"]


def test_what_is_measured_is_no_tensor_for_each_value(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tensors between cotangents would keep their memory from being used again."""
    held: list[weakref.ref[Tensor]] = []

    def measured(
        xs: Sequence[Tensor], sizes: Callable[[Sequence[Tensor]], Tensor] = sizing.sizes_of
    ) -> Tensor:
        assert all(each() is None for each in held)
        found = sizes(xs)
        held.append(weakref.ref(found))
        return found

    monkeypatch.setattr(sizing, "sizes_of", measured)
    x = torch.randn(3, requires_grad=True)
    found = gradtrace.trace(x.sin().cos().exp().sum()).flow()
    assert len(held) > 3 and all(level.norm > 0 for level in found.profile)


class Tied(nn.Module):
    """An embedding that is also the output layer, with a wide layer in between."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.wide = nn.Embedding(90, 12), nn.Linear(12, 12)
        self.out = nn.Linear(12, 90, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.out(self.wide(self.embed(ids)).tanh())
        return found


@pytest.mark.parametrize("scale", [1.0, 0.0, 1e-36])
def test_norms_of_weights_are_found_without_their_gradients(
    scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of float64 and of sums; what is 0, or may underflow, is computed."""
    monkeypatch.setattr(product_norms, "MIN_ELEMENTS", 64)
    monkeypatch.setattr(gradients, "DEFER_MIN_ELEMENTS", 64)
    torch.manual_seed(0)
    model, ids = Tied(), torch.tensor([5, 8, 5])
    with gradtrace.watch(model) as watch:
        loss = scale * model(ids).square().mean()
    program = watch.trace(loss, nonfinite="allow").program
    whole = measure(program, program.seed)
    with mock.patch.object(Contract, "apply", autospec=True, side_effect=Contract.apply) as made:
        norms = measure(program, program.seed, norms=True)
    weights = [call for call in made.call_args_list if call.args[0].outputs >= 144]
    assert bool(weights) == (scale != 1.0)
    for value, size in whole.items():
        assert norms[value].norm == pytest.approx(size.norm, rel=1e-6)
        assert (norms[value].nonzero == 0) == (size.nonzero == 0)
        assert norms[value][4:] == size[4:]
    assert any(math.isnan(size.mass) for size in norms.values()) == (scale == 1.0)
