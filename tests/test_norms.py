"""Gradient along depth: norms against autograd's own, verdicts on nets whose fate is known."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import programs
import pytest
import torch
from architectures import ARCHITECTURES
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

import gradtrace
from gradtrace.flow import Level, measure, profile_of
from gradtrace.flow.sizing import sizes
from gradtrace.table import Row, Table
from gradtrace.traced import Trace

WIDTH = 32
Loss = Callable[[nn.Module], Tensor]


class Found(NamedTuple):
    """Norms by module, and the levels along depth."""

    table: Table
    profile: tuple[Level, ...]

    @property
    def verdict(self) -> str:
        return " ".join(self.table.notes)

    @property
    def modules(self) -> list[str]:
        return list(self.table.names)

    def row(self, name: str) -> Row:
        return self.table[name]


def found_of(trace: Trace) -> Found:
    return Found(trace.norms(), profile_of(trace.program))


def norms(model: nn.Module, loss_of: Loss) -> Found:
    with gradtrace.watch(model) as watch:
        loss = loss_of(model)
    return found_of(watch.trace(loss, nonfinite="allow"))


def plain(loss: Tensor) -> Found:
    """Without a model."""
    return found_of(gradtrace.trace(loss, nonfinite="allow"))


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


def words(found: Found) -> dict[str, str]:
    return {row.name: row.verdict for row in found.table if row.verdict}


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
    found = norms(deep(nn.Tanh, normal(0.05)), classified)
    assert found.verdict.startswith("Vanishing: the gradient falls from 0.")
    assert "He for ReLU, Xavier for tanh" in found.verdict
    assert found.row("0").verdict == found.row("1").verdict == "vanishing"
    assert found.row("60").verdict == found.row("58").verdict == ""
    assert found.row("0").norm < found.row("60").norm / 1e9


def test_the_numbers_of_the_verdict_are_those_of_the_profile() -> None:
    found = norms(deep(nn.Tanh, normal(0.05)), classified)
    body = found.profile[2:]  # the loss function is not the model's
    assert [level.module for level in body[:2]] == ["60", "59"]
    top, end = sorted(level.norm for level in body[:3])[1], sorted(x.norm for x in body[-7:])[3]
    assert f"from {top:.2g} at '59' to {end:.2g} at '3'" in found.verdict
    assert f"a factor of {top / end:.2g} over 56 operators" in found.verdict
    assert f"about {(top / end) ** (1 / 56):.3g} an operator" in found.verdict


def test_large_weights_explode() -> None:
    found = norms(deep(nn.Identity, normal(0.5)), classified)
    assert found.verdict.startswith("Exploding: the gradient rises from 0.")
    assert "clip_grad_norm_" in found.verdict
    assert found.row("0").verdict == "exploding" and found.row("60").verdict == ""


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
    found = norms(model, classified)
    assert found.verdict.startswith("The gradient neither vanishes nor explodes: it ")
    assert len(found.table.notes) == 1 and words(found) == {}


@pytest.mark.parametrize("name", ["gpt2", "mamba", "resnet"])
def test_real_architectures_are_healthy(name: str) -> None:
    found = norms(*ARCHITECTURES[name]())
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
    (row,) = found.table
    assert (row.norm, row.gain, row.verdict) == (1.0, None, "")
    assert row.own == pytest.approx(math.sqrt(2))


@pytest.mark.parametrize("make", [lambda x: x.relu(), lambda x: x.view(()), lambda x: 1 * x])
def test_the_loss_is_on_the_activation_side_even_if_it_is_a_view(
    make: Callable[[Tensor], Tensor],
) -> None:
    found = plain(make(torch.tensor(3.0, requires_grad=True)))
    assert len(found.profile) == 1 and "1 operator deep" in found.verdict


def test_the_loss_function_is_not_said_to_explode() -> None:
    """At the mean the norm is 1, at the model's output 1 / 2000."""
    model = nn.Sequential(nn.Linear(1, 1), nn.Tanh(), nn.Linear(1, 1))
    found = norms(model, lambda m: m(torch.randn(4_000_000, 1)).mean())
    assert found.row("(top)").norm == 1.0 and words(found) == {}


def test_a_loss_that_is_nearly_0_is_no_fall() -> None:
    model = deep(nn.Tanh, nn.init.xavier_normal_, 4)
    x, _ = batch()
    target = model(x).detach() + 1e-6
    found = norms(model, lambda m: mse_loss(m(x), target))
    assert found.profile[2].norm < found.profile[0].norm * 1e-5
    assert "neither" in found.verdict


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
    found, known = norms(model, classified), retained(model, classified)
    for name, (gradient,) in known.items():
        row = found.row(name)
        assert row.norm == pytest.approx(float(gradient.norm()), rel=1e-5)
        assert row.zeros == pytest.approx(float((gradient == 0).double().mean()))
        below = known.get(str(int(name) - 1))
        if below:
            assert row.gain == pytest.approx(float(below[0].norm() / gradient.norm()), rel=1e-5)
        else:
            assert row.gain is None
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
        assert level.entries == gradient.numel() and level.zeros == 0


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
    found = found_of(watch.trace(loss))
    levels = [level for level in found.profile if level.operator == "TanhBackward0"]
    known = [float(_gradient(h).norm()) for h in reversed(states)]
    assert [level.norm for level in levels] == pytest.approx(known, rel=1e-3)
    assert [level.depth for level in levels] == list(range(3, 3 + 3 * steps, 3))


# Recurrent nets ----------------------------------------------------------------------------------


def test_a_recurrent_net_forgets() -> None:
    found = norms(Reader(nn.RNN), read(200))
    through = "Vanishing: through 200 uses of the same weights the gradient falls from 0."
    assert found.verdict.startswith(through)
    assert "to exactly 0 at depth " in found.verdict
    assert "'embed' gets " in found.verdict  # from the last steps
    assert words(found) == {"rnn": "vanishing"}


def test_a_gate_that_stays_open_remembers() -> None:
    model = Reader(nn.LSTM)
    assert norms(model, read(200)).verdict.startswith("Vanishing")
    with torch.no_grad():
        model.rnn.bias_ih_l0[WIDTH : 2 * WIDTH] = 6.0  # type: ignore[index]
    found = norms(model, read(200))
    assert found.verdict.startswith("The gradient neither vanishes nor explodes")
    assert words(found) == {}


def test_a_recurrent_net_with_large_weights_explodes() -> None:
    model = nn.RNN(3, 8, nonlinearity="relu")
    nn.init.orthogonal_(model.weight_hh_l0, 3.0)
    nn.init.constant_(model.bias_hh_l0, 5.0)
    found = norms(model, lambda m: m(torch.randn(60, 2, 3))[0][-1].sum())
    assert found.verdict.startswith("Exploding")


def test_a_shared_module_is_one_row() -> None:
    x, shared = torch.randn(4, 5), nn.Linear(5, 5)
    model = nn.Sequential(shared, nn.Tanh(), shared, nn.Tanh(), shared)
    found, known = norms(model, lambda m: m(x).sum()), retained(model, lambda m: m(x).sum())
    assert found.modules == ["(top)", "0", "3", "1"]
    row = found.row("0")
    sizes = [float(g.norm()) for g in known["0"]]
    assert row.depth == 1
    assert row.norm == pytest.approx(max(sizes), rel=1e-5)
    assert row.own == pytest.approx(
        math.hypot(*(float(_gradient(p).norm()) for p in shared.parameters())), rel=1e-5
    )


# What is dead ------------------------------------------------------------------------------------


def test_a_dead_relu() -> None:
    model = deep(nn.ReLU, nn.init.kaiming_normal_, 4)
    with torch.no_grad():
        model[4].bias.fill_(-100.0)  # type: ignore[index, union-attr, operator]
    found = norms(model, classified)
    assert found.table.notes[0].startswith("Dead: '4', '3', '2' and 2 more get no gradient at all.")
    assert "ReluBackward0 (in '5') has slope 0 at all 512 entries" in found.verdict
    assert "Elsewhere the gradient neither vanishes nor explodes: it falls from" in found.verdict
    assert words(found) == dict.fromkeys("543210", "dead")
    assert found.row("5").norm > 0 and found.row("5").gain == 0.0
    assert found.row("4").norm == found.row("4").own == 0.0 and found.row("4").zeros == 1.0


def test_relus_that_seldom_open() -> None:
    model = deep(nn.ReLU, nn.init.kaiming_normal_, 4)
    with torch.no_grad():
        model[4].bias.fill_(-3.0)  # type: ignore[index, union-attr, operator]
    found = norms(model, classified)
    assert 0.95 <= found.row("4").zeros < 1
    assert found.row("4").verdict == "mostly dead"
    assert "Mostly dead: at the output of '4' up to 9" in found.verdict
    assert found.row("6").verdict == found.row("2").verdict == ""


def test_zeros_that_no_activation_function_made_are_not_dead() -> None:
    """Only the last of 40 steps is read, so of the gradient at the output 97.5% is 0."""
    found = norms(Reader(nn.LSTM), read(40))
    assert found.row("rnn").zeros == pytest.approx(39 / 40)
    assert "dead" not in found.row("rnn").verdict and "ead" not in found.verdict.split(":")[0]


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

    found = norms(Adapted(), lambda m: m(torch.randn(4, 8)).pow(2).mean())
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

    found = norms(Experts(), lambda m: m(torch.randn(3, 4)))
    assert found.row("unused.0").verdict == found.row("unused.2").verdict == "dead"
    assert found.row("unused.1").verdict == ""


def test_dead_branches_do_not_cut_the_profile() -> None:
    """Skip connections carry the gradient past branches whose factor is 0."""
    found = norms(Residual(10, gate=0.0), classified)
    assert "Elsewhere the gradient neither vanishes nor explodes: it goes from" in found.verdict
    assert found.row("out").verdict == "" and found.row("blocks.0.1").verdict == "dead"


@pytest.mark.parametrize(
    ("loss", "text"),
    [
        (lambda y: (0 * y).sum(), "MulBackward0 multiplies it with zeros"),
        (lambda y: (y - 1e6).relu().sum(), "ReluBackward0 has slope 0 at all 48 entries"),
    ],
)
def test_no_gradient_at_all(loss: Callable[[Tensor], Tensor], text: str) -> None:
    x, _ = batch()
    found = norms(deep(nn.ReLU, nn.init.kaiming_normal_, 2), lambda m: loss(m(x)))
    assert found.verdict.startswith("No gradient flows: that of every leaf is exactly 0. " + text)


def test_underflow_is_vanishing_not_death() -> None:
    found = norms(deep(nn.Tanh, normal(0.005)), classified)
    assert "to exactly 0 at depth" in found.verdict and found.verdict.startswith("Vanishing")
    assert "dead" not in words(found).values()
    assert found.row("0").norm == 0.0 and found.row("0").verdict == "vanishing"


class Times(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


def test_the_module_that_underflows_is_vanishing() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), *(Times(1e-5) for _ in range(12)), nn.Linear(3, 3))
    found = norms(model, lambda m: m(torch.ones(2, 3)).sum())
    lost = next(row for row in found.table if row.gain == 0)
    assert lost.norm > 0 and lost.name in map(str, range(1, 13))
    assert lost.verdict == "vanishing" and "dead" not in words(found).values()


def test_a_weight_of_0_is_death_even_if_the_gradient_is_small() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Tanh())
    nn.init.zeros_(model[1].weight)
    found = norms(model, lambda m: 1e-20 * m(torch.ones(2, 3)).sum())
    assert found.row("0").verdict == "dead"


# What is no number -------------------------------------------------------------------------------


def test_where_infinity_first_appears() -> None:
    x, _ = batch()
    model = deep(nn.ReLU, nn.init.kaiming_normal_, 2)
    found = norms(model, lambda m: m(x).mul(0).sum().sqrt())
    assert found.verdict.startswith(
        "The gradient is not finite: infinity first appears in what SqrtBackward0 hands on."
    )
    assert found.row("4").verdict == "not finite"
    assert len(found.table.notes) == 1


def test_where_nan_first_appears() -> None:
    class Bad(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * torch.tensor(float("nan"))

    model = nn.Sequential(nn.Linear(3, 3), Bad(), nn.Tanh())
    found = norms(model, lambda m: m(torch.ones(2, 3)).sum())
    assert "NaN first appears in what TanhBackward0 (in '2') hands on" in found.verdict
    assert words(found) == {"1": "not finite", "0": "not finite"}
    assert math.isnan(found.row("0").norm) and math.isnan(found.profile[-1].norm)


# The activation side -----------------------------------------------------------------------------


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


def test_parametrised_weights_lie_beside() -> None:
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(3, 3, bias=False))
    model = nn.Sequential(layer, nn.Tanh())
    found = norms(model, lambda m: m(torch.randn(4, 3)).sum())
    assert found.modules == ["(top)", "1", "0"]
    assert found.row("0").own is not None and found.row("0").gain is None


def test_depth_is_the_longest_way() -> None:
    x = torch.ones(2, requires_grad=True)
    y = x.tanh()
    found = plain((y + y.sin().cos()).sum())
    assert [level.operator[:3] for level in found.profile] == ["Sum", "Add", "Cos", "Sin", "Tan"]


def test_an_input_is_what_lies_below() -> None:
    x = torch.randn(5, 3, requires_grad=True)
    model = nn.Sequential(nn.Linear(3, 2), nn.Tanh())
    found = norms(model, lambda m: m(x.view(5, 3)).sum())
    (gradient,) = torch.autograd.grad(model(x).sum(), x)
    row = found.row("0")
    assert row.gain * row.norm == pytest.approx(float(gradient.norm()), rel=1e-5)
    assert found.row("(top)").own is None


def test_frozen_layers() -> None:
    model = deep(nn.ReLU, nn.init.kaiming_normal_, 3)
    whole = norms(model, classified)
    model[4].requires_grad_(False)  # type: ignore[index]
    passed = norms(model, classified)
    assert passed.row("4").own is None and whole.row("4").own is not None
    assert passed.table.column("norm") == pytest.approx(whole.table.column("norm"))
    for layer in (0, 2):
        model[layer].requires_grad_(False)  # type: ignore[index]
    ended = norms(model, classified)
    assert ended.modules == ["(top)", "6"]
    assert ended.row("6").gain is None and "2 operators" not in ended.verdict


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


def test_sizes_of_nothing_and_of_no_numbers() -> None:
    assert sizes(torch.zeros(0, 3)).tolist() == [0, 0, 0, 0]
    for dtype in (torch.float32, torch.float64):
        norm, largest, _, mass = sizes(torch.tensor([1.0, math.nan], dtype=dtype)).tolist()
        assert math.isnan(norm) and math.isnan(largest) and math.isnan(mass)
        assert sizes(torch.tensor([1.0, math.inf], dtype=dtype)).tolist()[:2] == [math.inf] * 2


def test_leaves_are_what_autograd_gives() -> None:
    y = x = torch.ones(3, requires_grad=True)
    w = torch.ones(3, requires_grad=True)
    for _ in range(200):
        y = torch.tanh(y * w)
    program = programs.program(y.sum())
    size = measure(program)
    grads = torch.autograd.grad(y.sum(), [x, w])
    known = {leaf.tensor: size[leaf.value].norm for leaf in program.leaves}
    for leaf, grad in zip((x, w), grads):
        assert known[leaf] == pytest.approx(float(grad.norm()), rel=1e-5)


# To look at and to keep --------------------------------------------------------------------------


def test_table() -> None:
    table = norms(deep(nn.Tanh, normal(0.05)), classified).table
    text = str(table)
    assert text.startswith("Gradient norms by module (63 operators deep)\nmodule  depth ")
    assert text.endswith(table.notes[-1])
    assert "vanishing" in table._repr_html_() and "keep it up." in table._repr_html_()
    assert len(table) == 62 and table.about["losses"] == 1
    assert Table.from_dict(table.to_dict()) == table
