"""A small transformer, trained here, and the matrix products of its backward pass."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LETTERS = 128
LENGTH, BATCH = 64, 16
BYTES = 1 << 20
RATE = 1e-3


class TrainedProducts(NamedTuple):
    """Pairs of factors by name, and the loss before and after training."""

    factors: dict[str, tuple[Tensor, Tensor]]
    before: float
    after: float


def text() -> Tensor:
    """Source text that every Python brings along, as numbers of its characters."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    read = b""
    for file in files:
        read += file.read_bytes()
        if len(read) >= BYTES:
            break
    letters = torch.frombuffer(bytearray(read[:BYTES]), dtype=torch.uint8).long()
    return letters[letters < LETTERS]


class Reader(nn.Module):
    """A transformer that tells the next character."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(LETTERS, size)
        self.places = nn.Parameter(torch.randn(LENGTH, size) * 0.02)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                size, 4, 4 * size, 0.0, "gelu", batch_first=True, norm_first=True
            )
            for _ in range(2)
        )
        self.output = nn.Linear(size, LETTERS)
        self.mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)

    def forward(self, ids: Tensor) -> Tensor:  # (batch, time) -> (batch, time, letters)
        """Logits of the next character at every place."""
        x: Tensor = self.embed(ids) + self.places
        for layer in self.layers:
            x = layer(x, src_mask=self.mask, is_causal=True)
        found: Tensor = self.output(x)
        return found


def products(steps: int, size: int, seed: int = 0) -> TrainedProducts:
    """Train, and take what the linear layers multiply in the backward pass of one more batch."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model, letters = Reader(size), text()
        optimiser = torch.optim.Adam(model.parameters(), RATE)
        losses = []
        for _ in range(steps):
            optimiser.zero_grad()
            loss = _loss(model, letters)
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
            losses.append(loss.item())
        return TrainedProducts(_factors(model, letters), losses[0], losses[-1])


def _loss(model: Reader, letters: Tensor) -> Tensor:
    starts = torch.randint(0, len(letters) - LENGTH - 1, (BATCH, 1))
    ids = letters[starts + torch.arange(LENGTH + 1)]  # (batch, time + 1)
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def _factors(model: Reader, letters: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """Of every linear layer: output gradient × weight, and output gradient × input."""
    seen: dict[str, tuple[Tensor, Tensor]] = {}
    handles = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and not name.endswith("out_proj"):

            def keep(
                module: nn.Linear, taken: tuple[Tensor, ...], given: Tensor, name: str = name
            ) -> None:
                given.register_hook(  # type: ignore[no-untyped-call]
                    lambda g: _keep(seen, name, module, taken[0], g)
                )

            handles.append(module.register_forward_hook(keep))
    _loss(model, letters).backward()  # type: ignore[no-untyped-call]
    for handle in handles:
        handle.remove()
    return dict(sorted(seen.items()))


def _keep(
    seen: dict[str, tuple[Tensor, Tensor]], name: str, module: nn.Linear, x: Tensor, g: Tensor
) -> None:
    rows, given = x.detach().flatten(0, -2), g.flatten(0, -2)  # (places, in), (places, out)
    seen[f"{name}, activation gradient"] = given, module.weight.detach().clone()
    seen[f"{name}, weight gradient"] = given.T.contiguous(), rows.clone()
