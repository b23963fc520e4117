"""Training steps whose gradients arrive too small, too large or too one-sided."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from silent_cases import Net, Step, data, training
from torch import Tensor, nn
from torch.nn import functional as F


class Case(NamedTuple):
    make: Callable[[], tuple[nn.Module, Step]]
    kind: str
    module: str  # how its name begins
    line: bool


CASES: dict[str, Case] = {}


def case(kind: str, module: str = "", line: bool = False) -> Callable[[Any], Any]:
    def keep(make: Any) -> Any:
        CASES[make.__name__] = Case(make, kind, module, line)
        return make

    return keep


def deep(layers: int, gain: float, activation: Callable[[], nn.Module]) -> nn.Module:
    parts = [part for _ in range(layers) for part in (nn.Linear(16, 16), activation())]
    model = nn.Sequential(nn.Linear(4, 16), *parts, nn.Linear(16, 3))
    for part in parts:
        if isinstance(part, nn.Linear):
            nn.init.normal_(part.weight, std=gain / 4)
            nn.init.zeros_(part.bias)
    return model


@case("vanishing")
def sigmoids_in_a_deep_net() -> Any:
    return training(deep(16, 1.0, nn.Sigmoid))


@case("vanishing")
def weights_that_begin_too_small() -> Any:
    return training(deep(12, 0.3, nn.Tanh))


@case("exploding")
def weights_that_begin_too_large() -> Any:
    model = deep(12, 6.0, nn.Identity)
    x, _ = data()
    return model, lambda: model(x).mean()


@case("exploding")
def recurrence_that_grows() -> Any:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.step, self.head = nn.Linear(4, 4, bias=False), nn.Linear(4, 1)
            nn.init.eye_(self.step.weight)
            with torch.no_grad():
                self.step.weight.mul_(2.0)

        def forward(self, x: Tensor) -> Tensor:
            h = x
            for _ in range(20):
                h = self.step(h)
            return self.head(h)

    model = Recurrent()
    x, _ = data()
    return model, lambda: model(x).mean()


@case("loss term", line=True)
def term_that_is_drowned() -> Any:
    model = Net()
    x, y = data()

    def step() -> Tensor:
        out = model(x)
        main = F.cross_entropy(out, y)  # HERE
        return main + 1e7 * out.square().mean()

    return model, step


@case("loss term", line=True)
def weight_with_too_many_zeros() -> Any:
    class Two(Net):
        def __init__(self) -> None:
            super().__init__()
            self.aux = nn.Linear(6, 1)

    model = Two()
    x, y = data()

    def step() -> Tensor:
        h = model.enc(x)
        return (F.cross_entropy(model.head(h), y) + model.aux(h).square().mean() * 1e-9) / 2  # HERE

    return model, step


def _side_by_side(total: Callable[[Tensor], Tensor]) -> Callable[[], Any]:
    def make() -> tuple[nn.Module, Step]:
        model = Net()
        x, y = data()

        def step() -> Tensor:
            out = model(x)
            size = out.square().mean()  # HERE
            return total(torch.stack([F.cross_entropy(out, y), size]))

        return model, step

    return make


for _name, _total in {
    "mean": lambda terms: (torch.tensor([1, 1e-7]) * terms).mean(),
    "dot": lambda terms: torch.dot(torch.tensor([1, 1e-7]), terms) / 2,
}.items():
    CASES[f"terms_side_by_side_{_name}"] = Case(_side_by_side(_total), "loss term", "", line=True)


@case("loss term", line=True)
def term_without_gradient() -> Any:
    model = Net()
    x, y = data()

    def step() -> Tensor:
        out = model(x)
        penalty = torch.relu(out - 100).mean()  # HERE
        return F.cross_entropy(out, y) + penalty

    return model, step


@case("branch", "branch")
def branch_with_a_tiny_scale() -> Any:
    class Branched(Net):
        def __init__(self) -> None:
            super().__init__()
            self.branch = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))

        def forward(self, x: Tensor) -> Tensor:
            h = self.enc(x)
            return self.head(h + 1e-7 * self.branch(h))

    return training(Branched())


@case("silent", "experts")
def expert_never_chosen() -> Any:
    class Mixture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(4, 3)
            nn.init.constant_(self.router.bias, 0.0)
            self.router.bias.data[2] = -100.0
            self.experts = nn.ModuleList(nn.Linear(4, 6) for _ in range(3))
            self.head = nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            weights, chosen = self.router(x).softmax(-1).topk(1)
            out = x.new_zeros(len(x), 6)
            for number, expert in enumerate(self.experts):
                rows = (chosen[:, 0] == number).nonzero()[:, 0]
                if len(rows):
                    out = out.index_add(0, rows, expert(x[rows]) * weights[rows])
            return self.head(out)

    model, x, y = Mixture(), torch.randn(24, 4), torch.arange(24) % 3
    return model, lambda: F.cross_entropy(model(x), y)


@case("zero gradient", "experts")
def expert_called_with_nothing() -> Any:
    model, step = expert_never_chosen()

    def forward(x: Tensor) -> Tensor:
        weights, chosen = model.router(x).softmax(-1).topk(1)
        out = x.new_zeros(len(x), 6)
        for number, expert in enumerate(model.experts):
            rows = (chosen[:, 0] == number).nonzero()[:, 0]
            out = out.index_add(0, rows, expert(x[rows]) * weights[rows])
        return model.head(out)

    model.forward = forward
    return model, step


@case("expert", "experts")
def expert_of_a_stacked_weight() -> Any:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Parameter(torch.randn(4, 4, 6) * 0.3)

        def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
            return torch.einsum("ni,nio->no", x, self.up[chosen])

    class Mixture(Net):
        def __init__(self) -> None:
            super().__init__()
            self.experts = Experts()

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.enc(x) + self.experts(x, torch.arange(len(x)) % 3))

    return training(Mixture())


@case("underflow")
def half_precision_without_a_scale() -> Any:
    class Half(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.enc(x).half().float())

    model = Half()
    x, _ = data()
    return model, lambda: model(x).mean() * 1e-4


@case("underflow")
def loss_in_half_precision() -> Any:
    model = Net().half()
    x, _ = data()
    return model, lambda: (model(x.half()) * 1e-4).float().square().mean()


@case("mostly dead")
def relus_that_seldom_open() -> Any:
    model = nn.Sequential(
        nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 3)
    )
    nn.init.constant_(model[2].bias, -0.55)
    return training(model)


@case("mostly dead")
def data_that_is_not_normalised() -> Any:
    model = nn.Sequential(nn.Linear(4, 64), nn.Sigmoid(), nn.Linear(64, 3))
    x, y = data()
    return model, lambda: F.cross_entropy(model(1e4 * x), y)


@case("branch", "2")
def scores_with_a_tiny_scale() -> Any:
    """Queries and keys get 1e7 times less, which no softmax of a healthy model does."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.key, self.value = (nn.Linear(16, 16) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            scores = 1e-6 * (self.query(x) @ self.key(x).mT)
            return x + scores.softmax(-1) @ self.value(x)

    parts = (nn.Embedding(20, 16), nn.LayerNorm(16), Attention(), nn.Linear(16, 3))
    model, x = nn.Sequential(*parts), torch.randint(20, (4, 6))
    return model, lambda: F.cross_entropy(model(x)[:, 0], torch.arange(4) % 3)


@case("vanishing", "rnn")
def recurrence_that_forgets() -> Any:
    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(20, 8), nn.Linear(8, 3)
            self.rnn = nn.RNN(8, 8, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.rnn(self.embed(x))[0][:, -1])

    model, x = Reader(), torch.randint(20, (4, 60))
    return model, lambda: F.cross_entropy(model(x), torch.arange(4) % 3)


@case("branch", "other", line=True)
def branch_that_the_model_begins_with() -> Any:
    """It lies deepest, behind its factor: nothing vanishes on the way to what lies beside it."""

    class Two(Net):
        def __init__(self) -> None:
            super().__init__()
            self.other = nn.Linear(4, 6)

        def forward(self, x: Tensor) -> Tensor:
            beside = 1e-7 * self.other(x)  # HERE
            return self.head(self.enc(x) + beside)

    return training(Two())
