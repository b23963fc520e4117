"""Formulas as they are written down: in-place writes, aliases, constants, fused operators.

Each case is the backward formula of a function; the program must follow it operation by operation
(no matrices) and give what it gives.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import programs
import pytest
import torch
import torch.nn.functional as F
from agreement import WAYS, assert_agree
from scalar_pairs import scalar_edges
from torch import Tensor

import gradtrace
from gradtrace.errors import NotLinear
from gradtrace.ir import interpreter
from gradtrace.linops import Dense, Sparse

FUSED_GROUPS = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 11)
"""Whether this torch has a fused kernel for grouped heads on the CPU."""

Formula = Callable[[Tensor], Tensor]
FORMULAS: dict[str, Formula] = {}


def formula(f: Formula) -> Formula:
    FORMULAS[f.__name__] = f
    return f


def follow(f: Formula, x: Tensor) -> Tensor:
    """A loss whose gradient by x is ``f`` of fixed weights."""

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            return f(grads[0])

    weights = torch.linspace(0.5, 3.0, x.numel(), dtype=x.dtype).reshape(x.shape)
    return (Function.apply(x) * weights).sum()


@formula
def add_with_alpha(g: Tensor) -> Tensor:
    return torch.add(g, g * 2, alpha=3)


@formula
def subtract_with_alpha(g: Tensor) -> Tensor:
    return torch.sub(g, g * 3, alpha=0.5)


@formula
def fill_by_slices(g: Tensor) -> Tensor:
    out = torch.zeros_like(g)
    out[:2] = g[:2]
    out[2:].copy_(g[2:] * 3)
    return out


@formula
def scale_a_view(g: Tensor) -> Tensor:
    out = g.clone()
    out[:, 1:3].mul_(5)
    return out


@formula
def read_a_view_made_before_the_write(g: Tensor) -> Tensor:
    out = g.clone()
    view = out.t()
    out.mul_(2)
    return view.t() + g


@formula
def write_through_the_base_of_a_view(g: Tensor) -> Tensor:
    base = torch.zeros(12, dtype=g.dtype)
    view = base.view(3, 4)
    base[::2] = g.reshape(-1)[::2]
    base[1:4] += g.reshape(-1)[5:8]
    return view * 2


@formula
def erase_a_part(g: Tensor) -> Tensor:
    out = g.clone()
    out[0].zero_()
    out[1].fill_(0)
    return out


@formula
def overwrite_what_was_written(g: Tensor) -> Tensor:
    out = g * 2
    out[1:] = g[:2]
    out[2] = g[0] + g[1]
    return out


@formula
def put_and_accumulate(g: Tensor) -> Tensor:
    out = torch.zeros_like(g)
    rows = torch.tensor([0, 2, 2])
    out.index_put_((rows,), g, accumulate=True)
    out.index_add_(0, rows, g, alpha=2)
    out.scatter_add_(1, torch.tensor([[0, 1, 1, 3]] * 3), g)
    return out.masked_fill_(torch.eye(3, 4, dtype=torch.bool), 0)


@formula
def a_weight_that_is_changed_afterwards(g: Tensor) -> Tensor:
    weight = torch.linspace(1, 2, 12, dtype=g.dtype).reshape(3, 4)
    out = g * weight
    weight.mul_(100)
    return out


@formula
def strided_memory(g: Tensor) -> Tensor:
    turned = g.t()
    out = torch.zeros_like(g)
    out[:2, :2] = turned.as_strided((2, 2), (1, 4))
    return out


@formula
def windows_that_overlap(g: Tensor) -> Tensor:
    out = torch.zeros_like(g)
    out.copy_(g.contiguous().as_strided((3, 4), (2, 1), 1))
    out[1:].view(-1).as_strided((2, 2), (3, 2)).mul_(2)
    return out


@formula
def windows_in_windows(g: Tensor) -> Tensor:
    base = torch.zeros(20, dtype=g.dtype)
    whole, rows = base[4:16].view(3, 4), base[:8].view(2, 4)
    turned = whole.t()
    base[2:14] = g.reshape(-1)  # reaches beyond both
    turned[1:3, 0] = g[0, :2]
    rows[1, ::2] *= 3
    whole[:, 3] += g[:, 0]
    return whole * 2 + turned.t() + F.pad(rows, (0, 0, 0, 1))


@formula
def another_dtype(g: Tensor) -> Tensor:
    out = torch.zeros(3, 4, dtype=torch.float32)
    out.copy_(g)
    return out.to(g.dtype)


@formula
def complex_numbers(g: Tensor) -> Tensor:
    z = torch.complex(g, 2 * g) * (1 + 2j)
    w = z.conj() * torch.tensor([1 - 1j, 2j, 3, 1], dtype=torch.complex128)
    return torch.view_as_real(w)[..., 0] + w.imag + (z / 2j).real


@formula
def complex_in_place(g: Tensor) -> Tensor:
    z = torch.zeros(3, 4, dtype=torch.complex128)
    z[:2] = torch.complex(g, -g)[1:]
    z[1:].mul_(1j)
    return z.imag + z.real


@formula
def unbound_and_stacked(g: Tensor) -> Tensor:
    a, b, c = g.unbind(0)
    left, right = torch.stack([c, a + b, b]).split([1, 3], 1)
    return torch.cat([right, left], 1).flip(0).roll(1, 1)


@formula
def parts_and_paddings(g: Tensor) -> Tensor:
    return F.pad(g.tril()[:, 1:], (0, 1)) + g.cumsum(0).triu(1) + g.repeat(2, 1)[1:4]


BATCHED = "bj,bji->bi"
"""A matrix for each index along the first dimensions."""

MERGED = {"complex_numbers", "complex_in_place", "put_and_accumulate", "parts_and_paddings"}
"""Formulas in which an element reaches another along several routes: these become a matrix."""


@pytest.mark.parametrize("name", FORMULAS)
def test_formula(name: str) -> None:
    x = torch.zeros(3, 4, dtype=torch.float64, requires_grad=True)
    loss = follow(FORMULAS[name], x)
    wanted = torch.autograd.grad(loss, [x], retain_graph=True)
    assert wanted[0].any()
    for way in WAYS.values():
        assert_agree(way(loss), [x], wanted)
    program = programs.program(loss)
    block = next(b for b in program.blocks if b.operator == "FunctionBackward")
    maps = [map_ for step in block.steps for map_ in program.maps.of(step)]
    merged = (isinstance(m, (Dense, Sparse)) or getattr(m, "spec", "") == BATCHED for m in maps)
    assert any(merged) == (name in MERGED)
    assert not block.note


@pytest.mark.parametrize(
    "f",
    [
        lambda g: g + 1,
        lambda g: g * g,
        lambda g: g.clamp(max=1.0),
        lambda g: g / g.norm(),
        lambda g: torch.where(g > 1, g, 1.0),
        lambda g: g.masked_fill(g > 1, 2.0),
        lambda g: g.sort(0).values,
        torch.ones_like,
    ],
    ids=["plus", "square", "clamp", "norm", "where", "fill", "sort", "constant"],
)
def test_formulas_that_are_not_linear_are_refused(f: Formula) -> None:
    x = torch.zeros(3, 4, dtype=torch.float64, requires_grad=True)
    loss = follow(f, x)
    with pytest.raises(NotLinear, match="FunctionBackward"):
        programs.program(loss)
    assert_agree(WAYS["fast"](loss), [x], torch.autograd.grad(loss, [x], retain_graph=True))


def test_infinities_that_a_mask_hides_stay_hidden() -> None:
    x = torch.tensor([0.0, 4.0, -1.0], dtype=torch.float64, requires_grad=True)
    for hide in (F.relu, lambda y: y.masked_fill(y <= 0, 0), lambda y: torch.where(y > 0, y, 0)):
        loss = torch.where(x > 0, hide(x).sqrt(), 0).sum()
        wanted = torch.autograd.grad(loss, [x], retain_graph=True)
        assert_agree(WAYS["recorded"](loss), [x], wanted)


def test_operations_in_place_that_have_to_be_opened() -> None:
    x = torch.zeros(3, 4, dtype=torch.float64, requires_grad=True)

    def f(g: Tensor) -> Tensor:
        out = g.clone()
        half = out[1:]
        half.addcmul_(g[1:], torch.full((2, 4), 3.0, dtype=g.dtype), value=2)
        out.lerp_(g, 0.25)
        return out

    loss = follow(f, x)
    wanted = torch.autograd.grad(loss, [x], retain_graph=True)
    assert_agree(WAYS["recorded"](loss), [x], wanted)


@pytest.mark.parametrize("padding", [0, 1, (2, 1)])
@pytest.mark.parametrize("stride", [1, 2])
def test_windows_with_padding(padding: Any, stride: int) -> None:
    x = torch.rand(2, 3, 5, 6, dtype=torch.float64, requires_grad=True)
    columns = F.unfold(x, 3, padding=padding, stride=stride)
    weights = torch.rand(columns.shape, dtype=torch.float64)
    loss = (columns * weights).sum()
    loss = loss + (F.fold(columns, (5, 6), 3, padding=padding, stride=stride) ** 2).sum()
    wanted = torch.autograd.grad(loss, [x], retain_graph=True)
    assert_agree(WAYS["recorded"](loss), [x], wanted)


PLANES: dict[str, Callable[[Tensor], Tensor]] = {
    "average": lambda x: F.avg_pool2d(x, 3, 2, 1),
    "average, uneven": lambda x: F.avg_pool2d(x, (2, 3), (2, 1), (1, 1), ceil_mode=True),
    "average, padding not counted": lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False),
    "average by 5": lambda x: F.avg_pool2d(x, 2, divisor_override=5),
    "adaptive": lambda x: F.adaptive_avg_pool2d(x, (4, 5)),
    "adaptive, larger": lambda x: F.adaptive_avg_pool2d(x, (9, 13)),
    "bilinear": lambda x: F.interpolate(x, scale_factor=1.7, mode="bilinear"),
    "bilinear, smaller": lambda x: F.interpolate(x, (3, 4), mode="bilinear", align_corners=True),
    "bicubic": lambda x: F.interpolate(x, (9, 9), mode="bicubic"),
    "volume": lambda x: F.avg_pool3d(x.unsqueeze(2).expand(-1, -1, 4, -1, -1), 2),
    "adaptive volume": lambda x: F.adaptive_avg_pool3d(x.unsqueeze(2) * x.new_ones(4, 1, 1), 3),
}


@pytest.mark.parametrize("name", PLANES)
def test_planes(name: str) -> None:
    """Every plane is followed by its taps."""
    x = torch.rand(2, 3, 7, 8, dtype=torch.float64, requires_grad=True)
    out = PLANES[name](x)
    loss = (out * torch.rand(out.shape, dtype=torch.float64)).sum()
    wanted = torch.autograd.grad(loss, [x], retain_graph=True)
    assert_agree(WAYS["recorded"](loss), [x], wanted)


@pytest.mark.parametrize("kind", ["plain", "causal", "masked", "swallowed", "grouped"])
def test_fused_attention(kind: str) -> None:
    torch.manual_seed(0)
    heads = 2 if kind == "grouped" else 4
    q = torch.randn(2, 4, 5, 8, requires_grad=True)
    k, v = (torch.randn(2, heads, 5, 8, requires_grad=True) for _ in range(2))
    mask = None
    if kind == "masked":
        mask = torch.randn(5, 5)
    if kind == "swallowed":  # a whole row at the lowest number: its scores are rounded away
        mask = torch.zeros(5, 5)
        mask[2] = torch.finfo(torch.float32).min
    options = {"enable_gqa": True} if kind == "grouped" else {}
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=kind == "causal", **options
    )
    loss = (out * torch.randn(out.shape)).sum()
    leaves = [q, k, v]
    kinds = {operator.name for operator in gradtrace.graph(loss)}
    if kind != "grouped" or FUSED_GROUPS:
        assert any("Flash" in name for name in kinds), "the fused kernel was not used"
    wanted = torch.autograd.grad(loss, leaves, retain_graph=True)
    assert_agree(WAYS["recorded"](loss), leaves, wanted)


def test_edges_of_a_formula_written_in_parts() -> None:
    x = torch.zeros(3, 4, dtype=torch.float64, requires_grad=True)
    found = scalar_edges(follow(FORMULAS["fill_by_slices"], x))
    assert found == 3 * 12  # the sum, the product, the function
    assert scalar_edges(follow(FORMULAS["erase_a_part"], x)) == 12 + 12 + 4


def test_division_by_whole_numbers_keeps_all_digits() -> None:
    """``amax`` shares its gradient among equal maxima: g / 3, in float64."""
    x = torch.ones(3, dtype=torch.float64, requires_grad=True)
    found = interpreter.run(programs.program(x.amax()), gradtrace.semirings.SUM)[x]
    assert torch.equal(found, torch.full((3,), 1 / 3, dtype=torch.float64))


def test_one_tensor_handed_to_two_outputs_of_a_function_is_two_values() -> None:
    class Pair(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
            return 2 * x, 3 * x

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            return 2 * grads[0] + 3 * grads[1]

    x = torch.tensor([1.0], requires_grad=True)
    one, two = Pair.apply(x)
    program = programs.program((one + two).sum())  # the sum hands one tensor to both
    assert float(interpreter.run(program, gradtrace.semirings.COUNT)[x]) == 2
    assert float(interpreter.run(program, gradtrace.semirings.MAX)[x]) == 3


def test_what_is_handed_on_is_a_value_of_its_own() -> None:
    """``y[0] *= w`` hands the slice's gradient to the product, and puts the result back into y."""
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    w = torch.tensor(3.0, requires_grad=True)
    y = x.clone()
    y.select(0, 0).add_(w)
    loss = y.sum()
    for block in programs.program(loss).blocks:
        inside = {term.value for step in block.steps for term in step.terms}
        assert not inside & set(block.gives.values()), block.operator
    path = gradtrace.trace(loss, names={"x": x, "w": w}).path("x", 0)
    assert path.operators == ["CloneBackward0", "CopySlices", "SumBackward0"]


def _adds(state: Tensor, g: Tensor) -> Tensor:
    state.add_(1)
    return g * state


def _adds_after(state: Tensor, g: Tensor) -> Tensor:
    out = g * state
    state.add_(g)
    return out


def _adds_by_out(state: Tensor, g: Tensor) -> Tensor:
    torch.add(state, 1, out=state)
    return g * state


def _adds_to_a_list(state: Tensor, g: Tensor) -> Tensor:
    torch._foreach_add_([state], 1.0)
    return g * state


def _writes_a_view(state: Tensor, g: Tensor) -> Tensor:
    state[1:].mul_(3)
    return g * state.view(3)


def _changes_an_index(state: Tensor, g: Tensor) -> Tensor:
    out = g[state] * torch.tensor([1.0, 2.0, 4.0])
    state.copy_(state.roll(1))
    return out


def _changes_a_mask(state: Tensor, g: Tensor) -> Tensor:
    out = torch.where(state, g * 3, g)
    state.logical_not_()
    return out


WRITES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Tensor]] = {
    "before": (_adds, torch.full((3,), 2.0)),
    "after, the gradient": (_adds_after, torch.full((3,), 2.0)),
    "by out=": (_adds_by_out, torch.full((3,), 2.0)),
    "lists": (_adds_to_a_list, torch.full((3,), 2.0)),
    "a view": (_writes_a_view, torch.full((3,), 2.0)),
    "an index": (_changes_an_index, torch.tensor([0, 1, 2])),
    "a mask": (_changes_a_mask, torch.tensor([True, False, True])),
}


@pytest.mark.parametrize("where", ["functions", "hooks", "one uses, the other writes"])
@pytest.mark.parametrize("what", WRITES)
def test_tensors_that_code_of_the_users_uses_and_writes(what: str, where: str) -> None:
    """Maps held the tensor itself, with what was written there later or put back at the end."""
    f, begin = WRITES[what]
    w = torch.linspace(0.2, 0.9, 3).requires_grad_()

    def loss_of() -> Tensor:
        state = begin.clone()
        run = functools.partial(f, state)
        hidden = w.sin()
        if where == "hooks":
            last = hidden.exp()
            hidden.register_hook(run)
            last.register_hook(run)
        elif where == "functions":
            last = Function.apply(Function.apply(hidden, run), run)
        else:
            factor = state if state.is_floating_point() else 1.0
            last = Function.apply(Function.apply(hidden, run), lambda g: g * factor)
        return last.sum()

    (want,) = torch.autograd.grad(loss_of(), w)
    paths = gradtrace.backward(loss_of(), gradtrace.semirings.MAX, names={"w": w})["w"]
    torch.testing.assert_close(paths, want.abs())  # each element has one path
    trace = gradtrace.trace(loss_of(), names={"w": w})
    torch.testing.assert_close(trace.gradients["w"], want)
    assert trace.path("w", 0).weight == pytest.approx(float(want[0]), rel=1e-5)


class Function(torch.autograd.Function):
    """An identity whose ``backward`` is given."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, f: Formula) -> Tensor:
        ctx.f = f
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.f(grads[0]), None
