"""NaN and infinity: the first bad value in the order of the forward pass, its line and element."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from nonfinite_cases import CASES, Middle
from silent_cases import data, training
from torch import Tensor
from torch.nn import functional as F

import gradtrace as gt
from gradtrace.diagnosis.forward_record import Extent, ForwardRecord, first_bad
from gradtrace.diagnosis.forward_recorder import ForwardRecorder


@pytest.mark.parametrize("name", CASES)
def test_the_first_bad_value_is_named(name: str) -> None:
    torch.manual_seed(0)
    wanted = CASES[name]
    model, step = wanted.make()
    with gt.watch(model) as watch:
        loss = step()
    found = watch.diagnose(loss)
    bad = found.nonfinite
    assert bad is not None and not found.healthy
    assert math.isfinite(float(loss.detach())) == (wanted.of == "gradient")
    assert (bad.of, bad.operator, bad.module) == (wanted.of, wanted.operator, wanted.module), str(
        found
    )
    assert "# HERE" in bad.line, str(found)
    assert wanted.inputs in "; ".join(bad.inputs), str(found)
    assert found.findings[0].kind == "non-finite" and found.findings[0].line == bad.line
    assert len(found.findings[0].advice) > 20
    with pytest.raises(gt.errors.NonFinite) as error:
        watch.trace(loss)
    assert f"In the forward pass: {bad.line}" in str(error.value)


def test_the_path_by_which_it_spread() -> None:
    torch.manual_seed(0)
    model, step = training(Middle(lambda h: h.relu().log()))
    with gt.watch(model, diagnose=True) as watch:
        loss = step()
    bad = watch.diagnose(loss).nonfinite
    assert bad is not None
    assert bad.path == ("linear in 'head'", "cross_entropy")
    row, column = bad.element
    hidden = model.enc(data()[0])
    assert hidden.shape[0] > row and hidden.shape[1] > column and bad.value == -math.inf


def test_without_a_record_it_is_said_how_to_find_it() -> None:
    model, step = CASES["log_of_zero"].make()
    with gt.watch(model, diagnose=False) as watch:
        loss = step()
    found = watch.diagnose(loss)
    assert found.nonfinite is not None and found.nonfinite.of == "loss"
    assert "diagnose=True" in found.findings[0].evidence
    with pytest.raises(gt.errors.NonFinite, match=r"loss is not finite.*diagnose"):
        watch.trace(loss)


def test_a_loss_that_is_not_finite_is_refused_though_its_gradient_is() -> None:
    x = torch.tensor([-1.0, 2.0], requires_grad=True)
    with pytest.raises(gt.errors.NonFinite, match=r"the loss is not finite \(nan\), though"):
        gt.trace(x.log().sum())
    assert gt.trace(x.log().sum(), nonfinite="allow").gradients["leaf0"].tolist() == [-1.0, 0.5]


def test_infinities_that_do_not_reach_the_loss_are_no_finding() -> None:
    def hidden(h: torch.Tensor) -> torch.Tensor:
        masked = h.masked_fill(h > 0, float("-inf"))
        return torch.where(masked.isfinite(), masked, h.detach() * 0) + h

    model, step = training(Middle(hidden))
    with gt.watch(model, diagnose=True) as watch:
        loss = step()
    assert watch.diagnose(loss).healthy


def test_bad_elements_of_any_shape() -> None:
    """Scalars, complex numbers, in-place writes and half precision are read without an error."""

    class Odd(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(torch.tensor(0.0))

        def forward(self) -> torch.Tensor:
            z = torch.complex(self.w, self.w).abs()
            y = torch.zeros(0, 3) * self.w
            h = (self.w.to(torch.bfloat16) + 1).clone().log_().float()
            return z + y.sum() + h + 1 / self.w

    model = Odd()
    with gt.watch(model, diagnose=True) as watch:
        loss = model()
    bad = watch.diagnose(loss).nonfinite
    assert bad is not None and bad.operator == "div" and bad.element == ()
    assert bad.inputs == ("0 (float32)",)


def collective(x: Tensor) -> Tensor:
    """Returns before its memory is written, as functional collectives do."""
    return torch.full_like(x, math.nan)


@pytest.mark.parametrize("name", ["torch._ops._c10d_functional", "torch.distributed.anything"])
def test_memory_that_is_still_written_is_not_read(name: str) -> None:
    collective.__module__ = name
    record, ones = ForwardRecord(), torch.ones(3)
    with ForwardRecorder(record, lambda: "head") as recorder:
        late = recorder.__torch_function__(collective, (), (ones,))
        late.copy_(ones)
        sure = late + 1
    made = next(each for each in record.operations if each.name == "collective")
    assert made.outputs and record.extents.keys().isdisjoint(made.outputs)
    assert record.extents[record.known(sure) or 0] == Extent(2.0, 2.0, torch.float32, (3,))


def test_numbers_that_changed_meanwhile_are_no_finding() -> None:
    assert first_bad(torch.ones(3), []) is None


def test_the_range_of_a_moved_value_is_carried_or_measured() -> None:
    def extent(x: torch.Tensor) -> tuple[float, float, tuple[int, ...]]:
        low, high = x.detach().aminmax()
        return low.item(), high.item(), tuple(x.shape)

    model = torch.nn.Linear(4, 6)
    with gt.watch(model, diagnose=True) as watch:
        y = model(torch.randn(2, 4))
        turned = y.transpose(0, 1)
        y.detach().mul_(3)
        after = turned.reshape(12)
        y = y + 1
        found = [y.view(3, 4), y.transpose(0, 1), y.reshape(-1).unsqueeze(0), y.clone()]
        found.append(y.detach().view(torch.int32).view(torch.float32))
        empty = torch.empty(2, 3)
        empty.numpy()[:] = 5.0  # by code that PyTorch does not see
        found += [after, empty.view(6)]
    record = watch._record
    assert record is not None
    extents = [record.extents[record.values(x)[-1]] for x in found]
    assert [(e.low, e.high, e.shape) for e in extents] == [extent(x) for x in found]


@pytest.mark.filterwarnings("ignore:std")
@pytest.mark.parametrize(
    ("function", "operator", "advice"),
    [
        (lambda h: (h - 9).sqrt(), "sqrt", "keep the argument above 0"),
        (lambda h: (h - 9) ** 0.5, "pow", "keep the base above 0"),
        (lambda h: (h + 1e20) ** 4, "pow", "too large for its dtype"),
        (lambda h: torch.std(h[:1], 0), "std", "more than one sample"),
        (lambda h: 1 / (h * 0), "div", "keep the divisor away from 0"),
        (lambda h: (h * 1e30).square(), "square", "too large for its dtype"),
        (lambda h: (h * math.inf) * 0, "mul", "keep infinite values out"),
        (lambda h: torch.stack((h * math.inf, -h * math.inf)).mean(0), "mean", "infinite values"),
        (lambda h: h[:0].mean(), "mean", "mean over nothing"),
        (lambda h: F.normalize(h * 0, eps=0), "normalize", "no direction"),
        (lambda h: h - torch.tensor(math.nan), "tensor", "look at the data"),
        (
            lambda h: F.ctc_loss(h.log_softmax(-1), torch.ones(1, 9), (5,), (9,)),
            "ctc_loss",
            "longer than its input",
        ),
    ],
)
def test_the_advice_fits_the_value(
    function: Callable[[Tensor], Tensor], operator: str, advice: str
) -> None:
    torch.manual_seed(0)
    model, x = torch.nn.Linear(4, 3), torch.randn(5, 4)
    with gt.watch(model) as watch:
        loss = function(model(x)).sum()
    found = watch.diagnose(loss)
    assert found.nonfinite is not None and found.nonfinite.operator == operator, found
    assert advice in found.findings[0].advice, found


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_data_and_weights_that_hold_it_before_the_step(number: float) -> None:
    torch.manual_seed(0)
    model, x = torch.nn.Linear(4, 3), torch.randn(5, 4)
    x[3, 1] = number
    with gt.watch(model) as watch:
        loss = model(x).square().sum()
    bad = watch.diagnose(loss)
    assert bad.nonfinite is not None and bad.nonfinite.element == (3, 1), bad
    assert "an input already holds it" in str(bad) and "look at the data" in bad.findings[0].advice
    with torch.no_grad():
        model.weight[2, 0] = number
    with gt.watch(model) as watch:
        loss = model(x.nan_to_num(posinf=0)).square().sum()
    bad = watch.diagnose(loss)
    assert bad.nonfinite is not None and bad.nonfinite.operator == "weight", bad
    assert bad.nonfinite.element == (2, 0) and "the step before" in bad.findings[0].advice


def test_a_buffer_that_holds_it_is_to_be_set_anew() -> None:
    model, step = CASES["nan_in_a_buffer"].make()
    with gt.watch(model) as watch:
        loss = step()
    assert "reset_running_stats()" in watch.diagnose(loss).findings[0].advice
