"""LSTM: how many steps back does gradient reach, along which state, and by which gate?

An LSTM reads a key and seven words of noise, and is asked for the key, eight steps after it came.
Most paths of the keys stay on the cell state all the way, where no weight stands, and most came
into it by the candidate gate.
"""

from collections import Counter

import torch
from stage import Loss, show, trained
from torch import Tensor, nn

from gradtrace.paths.paths import Path
from gradtrace.table import Column, Table
from gradtrace.traced import Trace

KEYS, NOISE, STEPS, WIDTH = 4, 4, 8, 16
GATES = ("input", "forget", "candidate", "output")


class Recall(nn.Module):
    """What was the first word?"""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(KEYS + NOISE, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.out = nn.Linear(WIDTH, KEYS)
        with torch.no_grad():
            self.lstm.bias_hh_l0[WIDTH : 2 * WIDTH] = 2.0  # at first, forget little

    def forward(self, words: Tensor) -> Tensor:
        """Scores of the keys, after the last word."""
        scores: Tensor = self.out(self.lstm(self.embed(words))[0][:, -1])
        return scores


def batch(size: int = 64) -> tuple[Tensor, Tensor]:
    """A key, then noise; and the key."""
    words = torch.randint(KEYS, KEYS + NOISE, (size, STEPS))
    words[:, 0] = torch.randint(KEYS, (size,))
    return words, words[:, 0]


def run(steps: str = "200") -> tuple[nn.Module, Loss]:
    """A trained model."""
    torch.manual_seed(0)
    model = Recall()
    trained(model, lambda: nn.functional.cross_entropy(model(x := batch()[0]), x[:, 0]), int(steps))
    words, keys = batch(32)
    return model, lambda model: nn.functional.cross_entropy(model(words), keys)


def entry(path: Path) -> str:
    """The gate by which a path first comes into the cell: all four are rows of one product."""
    gates = next(step for step in path.steps if step.operator == "UnbindBackward0")
    return GATES[gates.index[-1] // WIDTH]


def returns(path: Path) -> int:
    """How often it leaves the cell for the hidden state, to come back by a gate."""
    return sum(op in ("AddmmBackward0", "MmBackward0") for op in path.operators) - 2


def tell(model: nn.Module, loss_fn: Loss, trace: Trace) -> tuple[list[Table], str]:
    """The ways of the keys' embeddings."""
    size = KEYS * WIDTH
    paths = [p for p in trace.paths("embed.weight", sample=2 * size) if p.index[0] < KEYS]
    gates = Counter(map(entry, paths))
    straight = sum(returns(path) == 0 for path in paths) / len(paths)
    rows = tuple((gate, gates[gate], gates[gate] / len(paths)) for gate in GATES)
    columns = Column("gate"), Column("paths", "count"), Column("share", "share")
    most = max(GATES, key=gates.__getitem__)
    return [Table("How the key's paths come into the cell", columns, rows)], (
        f"{len(paths)} of the keys' {size} elements have a path, {STEPS} steps back; "
        f"{straight:.0%} of them stay on the cell state all the way, and most "
        f"({gates[most] / len(paths):.0%}) came into it by the {most} gate."
    )


if __name__ == "__main__":
    show(run, tell, "lstm")
