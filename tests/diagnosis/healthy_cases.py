"""Training steps in which nothing is wrong, though much of it looks unusual."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from architectures import ARCHITECTURES
from silent_cases import Net, Step, data, training
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

CASES: dict[str, Callable[[], tuple[nn.Module, Step]]] = {}


def healthy(make: Any) -> Any:
    CASES[make.__name__] = make
    return make


def _transformer(name: str) -> Callable[[], tuple[nn.Module, Step]]:
    def make() -> tuple[nn.Module, Step]:
        model, loss = ARCHITECTURES[name]()
        return model, lambda: loss(model)

    return make


for _name in ("gpt2", "bert", "t5", "vit", "mixtral"):
    CASES[_name] = _transformer(_name)


@healthy
def lstm() -> Any:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.lstm = nn.Embedding(20, 6), nn.LSTM(6, 8, 2, batch_first=True)
            self.head = nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.lstm(self.embed(x))[0][:, -1])

    model, x = Recurrent(), torch.randint(20, (4, 7))
    return model, lambda: F.cross_entropy(model(x), torch.arange(4) % 3)


@healthy
def tied_weights() -> Any:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.out = nn.Embedding(9, 6), nn.Linear(6, 9, bias=False)
            self.out.weight = self.embed.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.embed(x).tanh())

    model, x = Tied(), torch.randint(9, (6,))
    return model, lambda: F.cross_entropy(model(x), x.roll(1))


@healthy
def frozen_backbone() -> Any:
    model = Net(torch.relu)
    model.enc.requires_grad_(False)
    return training(model)


@healthy
def frozen_backbone_under_no_grad() -> Any:
    class Frozen(Net):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                h = self.enc(x)
            return self.head(h)

    model = Frozen()
    model.enc.requires_grad_(False)
    return training(model)


@healthy
def dropout() -> Any:
    return training(Net(nn.Dropout(0.5)))


@healthy
def checkpoint_without_reentry() -> Any:
    class Checkpointed(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.head(checkpoint(self.enc, x, use_reentrant=False))

    return training(Checkpointed())


@healthy
def reentrant_checkpoint_with_an_input_that_requires_grad() -> Any:
    class Checkpointed(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.head(checkpoint(self.enc, x.requires_grad_(), use_reentrant=True))

    return training(Checkpointed())


@healthy
def autocast_to_bfloat16() -> Any:
    model = Net(torch.tanh)
    x, y = data()

    def step() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.cross_entropy(model(x).float(), y)

    return model, step


@healthy
def two_losses() -> Any:
    class Two(Net):
        def __init__(self) -> None:
            super().__init__()
            self.aux = nn.Linear(6, 2)

    model = Two()
    x, y = data()

    def step() -> Tensor:
        h = model.enc(x).tanh()
        return F.cross_entropy(model.head(h), y) + 0.1 * model.aux(h).square().mean()

    return model, step


@healthy
def mixture_of_experts() -> Any:
    class Mixture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(4, 3)
            self.experts = nn.ModuleList(nn.Linear(4, 6) for _ in range(3))
            self.head = nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            weights, chosen = self.router(x).softmax(-1).topk(2)
            out = x.new_zeros(len(x), 6)
            for number, expert in enumerate(self.experts):
                rows, slot = (chosen == number).nonzero(as_tuple=True)
                out = out.index_add(0, rows, expert(x[rows]) * weights[rows, slot, None])
            return self.head(out)

    model, x, y = Mixture(), torch.randn(24, 4), torch.arange(24) % 3
    return model, lambda: F.cross_entropy(model(x), y)


@healthy
def low_rank_adapter() -> Any:
    class Adapted(Net):
        def __init__(self) -> None:
            super().__init__()
            self.down, self.up = nn.Linear(4, 2, bias=False), nn.Linear(2, 6, bias=False)
            nn.init.zeros_(self.up.weight)
            self.enc.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.enc(x) + self.up(self.down(x)))

    return training(Adapted())


@healthy
def residual_branch_that_begins_at_zero() -> Any:
    class Rezero(Net):
        def __init__(self) -> None:
            super().__init__()
            self.branch, self.alpha = nn.Linear(6, 6), nn.Parameter(torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            h = self.enc(x)
            return self.head(h + self.alpha * self.branch(h).relu())

    return training(Rezero())


@healthy
def straight_through_and_logging() -> Any:
    class Straight(Net):
        seen: list[float]

        def forward(self, x: Tensor) -> Tensor:
            h = self.enc(x)
            self.seen = [h.mean().item(), float(h.detach().std())]
            with torch.no_grad():
                self.enc.weight.mul_(1.0)
            return self.head(h + (h.round() - h).detach())

    return training(Straight())


@healthy
def causal_attention_with_masks() -> Any:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attend = nn.MultiheadAttention(8, 2, batch_first=True)
            self.head = nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            mask = torch.full((5, 5), float("-inf")).triu(1)
            return self.head(self.attend(x, x, x, attn_mask=mask)[0])

    model, x = Attention(), torch.randn(2, 5, 8)
    return model, lambda: F.cross_entropy(model(x).flatten(0, 1), torch.arange(10) % 3)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


@healthy
def custom_function() -> Any:
    return training(Net(lambda h: Doubled.apply(h)))


@healthy
def batch_norm_and_relu() -> Any:
    class Normal(Net):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(6)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.norm(self.enc(x)).relu())

    return training(Normal())


@healthy
def momentum_teacher() -> Any:
    class Student(Net):
        def __init__(self) -> None:
            super().__init__()
            self.teacher = nn.Linear(4, 6).requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                for mine, other in zip(self.teacher.parameters(), self.enc.parameters()):
                    mine.lerp_(other, 0.1)
                target = self.teacher(x)
            return self.head(self.enc(x)).sum() + F.mse_loss(self.enc(x), target)

    model = Student()
    x, _ = data()
    return model, lambda: model(x)


@healthy
def attention_that_begins_nearly_even() -> Any:
    """Queries and keys get 1,000 to 100,000 times less than the rest, as in a new BERT."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.key, self.value = (nn.Linear(16, 16) for _ in range(3))
            self.out, self.norm = nn.Linear(16, 16), nn.LayerNorm(16)

        def forward(self, x: Tensor) -> Tensor:
            scores = self.query(x) @ self.key(x).mT / 4
            return self.norm(x + self.out(scores.softmax(-1) @ self.value(x)))

    model = nn.Sequential(nn.Embedding(20, 16), *(Block() for _ in range(3)), nn.Linear(16, 3))
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.08)
    x = torch.randint(20, (4, 6))
    return model, lambda: F.cross_entropy(model(x)[:, 0], torch.arange(4) % 3)


@healthy
def student_that_is_nearly_its_teacher() -> Any:
    """What reaches its scores is small, as it should be."""
    model, teacher = Net(torch.tanh), Net(torch.tanh)
    teacher.load_state_dict({key: value + 1e-4 for key, value in model.state_dict().items()})
    x, _ = data()

    def step() -> Tensor:
        wanted = (teacher(x) / 2).softmax(-1).detach()
        return 4 * F.kl_div((model(x) / 2).log_softmax(-1), wanted, reduction="batchmean")

    return model, step


def _scaled(name: str, norm: Callable[[], nn.Module], dims: int) -> Callable[[], Any]:
    """A residual branch whose normalisation begins with weights of 0."""

    def make() -> tuple[nn.Module, Step]:
        class Residual(Net):
            def __init__(self) -> None:
                super().__init__()
                self.norm = norm()
                nn.init.zeros_(self.norm.weight)  # type: ignore[arg-type]

            def forward(self, x: Tensor) -> Tensor:
                h = x.repeat(1, 2)[:, :6]
                inner = self.enc(x)[(..., *(None,) * dims)] * torch.arange(1.0, 4.0)
                return self.head(h + self.norm(inner).flatten(2).sum(-1))

        return training(Residual())

    make.__name__ = f"{name}_that_begins_at_zero"
    return make


healthy(_scaled("batch_norm", lambda: nn.BatchNorm1d(6), 1))
healthy(_scaled("group_norm", lambda: nn.GroupNorm(2, 6), 1))
healthy(_scaled("layer_norm", lambda: nn.LayerNorm(3), 1))
healthy(_scaled("rms_norm", lambda: nn.RMSNorm(3), 1))


@healthy
def layer_scale() -> Any:
    """Branches begin 100,000 times smaller than the rest, by factors that are trained."""

    class Scaled(Net):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.branch = nn.LayerNorm(6), nn.Linear(6, 6)
            self.scale = nn.Parameter(torch.full((6,), 1e-5))

        def forward(self, x: Tensor) -> Tensor:
            h = self.enc(x)
            return self.head(h + self.scale * self.branch(self.norm(h)))

    return training(Scaled())


@healthy
def average_whose_weight_begins_at_zero() -> Any:
    class Mixed(Net):
        def __init__(self) -> None:
            super().__init__()
            self.other, self.weight = nn.Linear(4, 6), nn.Parameter(torch.zeros(6))

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.lerp(self.enc(x), self.other(x), self.weight))

    return training(Mixed())


@healthy
def distances_from_as_many_centres_as_samples() -> Any:
    class Radial(Net):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(5, 3)
            self.register_buffer("centres", torch.linspace(-1, 1, 5))

        def forward(self, x: Tensor) -> Tensor:
            return self.head((self.enc(x)[:, :1] - self.centres).square())

    return training(Radial())


@healthy
def weight_without_elements() -> Any:
    class Narrow(Net):
        def __init__(self) -> None:
            super().__init__()
            self.none, self.back = nn.Linear(4, 0, bias=False), nn.Linear(0, 6)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.enc(x) + self.back(self.none(x)))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is nothing to initialise
        return training(Narrow())


@healthy
def loss_minus_a_number_that_is_a_tensor() -> Any:
    model = Net()
    x, y = data()
    return model, lambda: (F.cross_entropy(model(x), y) - torch.tensor(0.1)).abs()


@healthy
def sparse_embedding() -> Any:
    model, x = nn.Sequential(nn.EmbeddingBag(50, 6, sparse=True), nn.Linear(6, 3)), data()[1]
    return model, lambda: F.cross_entropy(model(x[:, None]), x) + model[1].weight.square().sum()


@healthy
def margins_of_samples_one_by_one() -> Any:
    """Some are met, and have no gradient."""
    model, (x, _) = Net(), data()

    def step() -> Tensor:
        out = model(x)[:, 0]
        return sum(F.relu(each - out[2].detach() + 1e-3) for each in out)

    return model, step
