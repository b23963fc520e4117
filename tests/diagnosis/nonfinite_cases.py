"""Training steps whose loss or gradient is NaN or infinite.

The line of the first bad value ends in ``# HERE``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from silent_cases import Net, Step, data, training
from torch import Tensor, nn
from torch.nn import functional as F


class Case(NamedTuple):
    make: Callable[[], tuple[nn.Module, Step]]
    of: str  # loss or gradient
    operator: str
    module: str
    inputs: str  # what is to be said of them


CASES: dict[str, Case] = {}


def case(of: str, operator: str, module: str = "", inputs: str = "") -> Callable[[Any], Any]:
    def keep(make: Any) -> Any:
        CASES[make.__name__] = Case(make, of, operator, module, inputs)
        return make

    return keep


class Wrapped(nn.Module):
    """A function as a module, so that it has a name."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Middle(Net):
    """``Net`` with a module between its layers."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.middle = Wrapped(function)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.middle(self.enc(x)))


@case("loss", "log", "middle", "0 (float32)")
def log_of_zero() -> Any:
    return training(Middle(lambda h: h.relu().log()))  # HERE


@case("loss", "log", "", "0 (float32)")
def entropy_of_a_one_hot() -> Any:
    model = Net()
    x, _ = data()

    def step() -> Tensor:
        p = torch.softmax(model(x) * 1e4, -1)
        return -(p * p.log()).sum()  # HERE

    return model, step


@case("loss", "div", "middle", "0 (float32)")
def zero_by_zero() -> Any:
    return training(Middle(lambda h: (h * 0) / (h * 0).sum(-1, keepdim=True)))  # HERE


@case("loss", "exp", "middle")
def exp_overflows() -> Any:
    return training(Middle(lambda h: (h * 0 + 100).exp() / (h * 0 + 100).exp()))  # HERE


@case("loss", "matmul", "middle", "float16")
def attention_scores_in_float16() -> Any:
    def attend(h: Tensor) -> Tensor:
        q = h.half() * 0 + 200
        scores = q @ q.T  # HERE
        return (scores - scores.max()).float() @ h

    return training(Middle(attend))


@case("loss", "sqrt", "middle")
def root_of_a_negative() -> Any:
    return training(Middle(lambda h: (h - 100).sqrt()))  # HERE


@case("loss", "softmax", "middle", "-inf")
def row_that_is_masked_whole() -> Any:
    def attend(h: Tensor) -> Tensor:
        scores = (h @ h.T).masked_fill(torch.ones(5, 5, dtype=torch.bool).tril(), float("-inf"))
        return scores.softmax(-1) @ h  # HERE

    return training(Middle(attend))


@case("loss", "cross_entropy")
def every_target_ignored() -> Any:
    model = Net()
    x, y = data()
    return model, lambda: F.cross_entropy(model(x), y * 0 - 100)  # HERE


@case("loss", "an input", "enc", "already holds")
def nan_in_the_data() -> Any:
    class Direct(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.enc(x))  # HERE

    model = Direct()
    x, y = data()
    x[2, 1] = float("nan")
    return model, lambda: F.cross_entropy(model(x), y)


@case("loss", "head.weight", "head", "already holds")
def nan_in_a_weight() -> Any:
    class Direct(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.enc(x))  # HERE

    model = Direct()
    nn.init.constant_(model.head.weight, float("nan"))
    return training(model)


@case("loss", "buffer norm.running_var", "norm", "already holds")
def nan_in_a_buffer() -> Any:
    class Normal(Net):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(6).eval()
            nn.init.constant_(self.norm.running_var, float("nan"))

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.norm(self.enc(x)))  # HERE

    return training(Normal())


@case("loss", "an input", "enc", "already holds")
def infinity_in_the_data() -> Any:
    """It is infinite until a batch norm makes NaN of it, and of its running statistics."""

    class Normal(Net):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(6)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.norm(self.enc(x)))  # HERE

    model = Normal()
    x, y = data()
    x[2, 1] = float("inf")
    return model, lambda: F.cross_entropy(model(x), y)


@case("gradient", "SqrtBackward0", "middle", "0 (float32)")
def root_at_zero() -> Any:
    return training(Middle(lambda h: h + (h * 0).sqrt()))  # HERE


@case("gradient", "SqrtBackward0", "middle")
def distance_of_equal_points() -> Any:
    return training(Middle(lambda h: h + (h - h).square().sum(-1, keepdim=True).sqrt()))  # HERE


@case("gradient", "log", "middle", "0 (float32)")
def log_in_the_other_branch() -> Any:
    def safe(h: Tensor) -> Tensor:
        positive = h * (h > 0)
        logs = positive.log()  # HERE
        return torch.where(positive > 0, logs, positive)

    return training(Middle(safe))


@case("gradient", "div", "middle")
def division_masked_afterwards() -> Any:
    def ratio(h: Tensor) -> Tensor:
        size = h.relu()
        return (h / size).masked_fill(size == 0, 0.0)  # HERE

    return training(Middle(ratio))


@case("gradient", "PowBackward0", "middle", "0 (float32)")
def power_at_zero() -> Any:
    return training(Middle(lambda h: h + (h * (h > 0)) ** 0.5))  # HERE


@case("gradient", "SqrtBackward0", "middle")
def deviation_of_equal_values() -> Any:
    return training(Middle(lambda h: h + (h * 0 + 1).var(-1, keepdim=True).sqrt()))  # HERE


@case("gradient", "MulBackward0", "", "float16")
def loss_scale_that_overflows() -> Any:
    model = Net()
    x, _ = data()

    def step() -> Tensor:
        out = (model(x) * 1e-6).half() * 3e4  # HERE
        return (out * 3e4).float().sum()

    return model, step
