"""Networks of experiments: random ones with branches, ones of which it is known what matters, and
components that read the same word, with the tasks that they compete in.

Random branches, as of the chapter's 1.7: one layer is active at first. With probability 0.95 it
becomes a *diamond*: its input goes to two layers, whose outputs are concatenated. These are
expanded in the same way, with half the probability. Every layer has a tanh and a number of units
that is uniform in 10..500, both included; inputs and outputs have 10 elements. What the chapter
leaves open: a diamond is as wide as its layers together, so that one more layer, with a tanh, gives
the 10 outputs. An expanded layer is small (3.4 layers on average): several make larger graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Generator, Tensor, nn
from torch.nn.functional import cross_entropy

PROBABILITY, WIDTH, ENDS = 0.95, (10, 500), 10
Plan: TypeAlias = "int | tuple[Plan, Plan]"
"""A layer with so many units, or a diamond of two plans."""


def plan(draw: Random, probability: float = PROBABILITY, width: tuple[int, int] = WIDTH) -> Plan:
    """Expand one active layer.

    >>> plan(Random(3))
    (199, 252)
    """
    if draw.random() < probability:
        left = plan(draw, probability / 2, width)
        return left, plan(draw, probability / 2, width)
    return draw.randint(*width)


def units(planned: Plan) -> int:
    """The width of what a plan stands for.

    >>> units((3, (4, 5)))
    12
    """
    return planned if isinstance(planned, int) else units(planned[0]) + units(planned[1])


def parts(planned: Plan, way: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Plan]]:
    """A plan and all inside it, outer ones first, each with the way to it.

    >>> [way for way, _ in parts((3, (4, 5)))]
    [(), ('left',), ('right',), ('right', 'left'), ('right', 'right')]
    """
    yield way, planned
    if not isinstance(planned, int):
        for side, part in zip(("left", "right"), planned):
            yield from parts(part, (*way, side))


class Diamond(nn.Module):
    """Two parts side by side on one input; their outputs are concatenated."""

    def __init__(self, left: nn.Module, right: nn.Module) -> None:
        super().__init__()
        self.left, self.right = left, right

    def forward(self, x: Tensor) -> Tensor:
        """``[left(x), right(x)]``."""
        return torch.cat([self.left(x), self.right(x)], dim=-1)


def built(planned: Plan, inputs: int) -> nn.Module:
    """The module of a plan."""
    if isinstance(planned, int):
        return nn.Sequential(nn.Linear(inputs, planned), nn.Tanh())
    return Diamond(built(planned[0], inputs), built(planned[1], inputs))


class Branching(nn.Module):
    """Expanded layers after each other, and an output layer; of a seed always the same.

    >>> Branching(3).sides()
    {'1.left': 'layers.0.left', '1.right': 'layers.0.right'}
    """

    def __init__(self, seed: int, layers: int = 1, width: tuple[int, int] = WIDTH) -> None:
        super().__init__()
        draw = Random(seed)
        self.plans = tuple(plan(draw, PROBABILITY, width) for _ in range(layers))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            inputs = (ENDS, *map(units, self.plans))
            self.layers = nn.Sequential(*map(built, self.plans, inputs))
            self.output = built(ENDS, inputs[-1])

    def forward(self, x: Tensor) -> Tensor:
        """(..., 10) to (..., 10)."""
        found: Tensor = self.output(self.layers(x))
        return found

    def sides(self) -> dict[str, str]:
        """The sides of all diamonds, after the number of the expanded layer: the modules' names."""
        return {
            ".".join([str(number + 1), *way]): ".".join(["layers", str(number), *way])
            for number, planned in enumerate(self.plans)
            for way, _ in parts(planned)
            if way
        }


# Networks of which it is known what matters -------------------------------------------------------

GATES = 1.0, 0.5, 0.25, 0.125
VARIED = {"frequency": (1, 2, 4, 8), "gain": (0.25, 0.5, 2, 4), "offset": (0, 1, 4, 16)}
VIEW, SUM, HIDDEN = 6, 8, 16  # inputs of a branch, its outputs, its hidden units
WORDS, LENGTH, STREAM, HEAD = 8, 12, 24, 8
BEFORE = (1, 6), (2, 3), (4, 5), (0, 7)  # how far back the heads of the first layer see


class Planted(nn.Module):
    """A network with a known answer: ``groups`` are the components that are compared with
    each other, and how much each matters. The ``stem`` comes before them.
    """

    groups: list[dict[str, float]]

    def draw(self, samples: int, source: Generator) -> tuple[Tensor, Tensor]:
        """Inputs and targets."""
        raise NotImplementedError

    def losses(self, x: Tensor, target: Tensor) -> Tensor:
        """The loss of every sample."""
        return cross_entropy(self(x), target, reduction="none")

    def right(self, x: Tensor, target: Tensor) -> float:
        """The share of samples that are classified rightly."""
        return float((self(x).argmax(-1) == target).float().mean())


def source(*names: object) -> Generator:
    """Random numbers of a name."""
    return Generator().manual_seed(Random("/".join(map(str, names))).getrandbits(63))


def planted(network: str, kind: str, seed: int) -> Planted:
    """The network of a seed: views, gates or heads."""
    number = Random(f"planted/{network}/{kind}/{seed}").getrandbits(63)
    made: Any = _Heads if network == "heads" else _Branches
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(number)
        found: Planted = made(kind, Generator().manual_seed(number), Random(number))
    return found


def _teacher(source: Generator) -> Callable[[Tensor], Tensor]:
    """A random function of a few numbers: which of two classes a point belongs to."""
    first = torch.randn(VIEW, 8, generator=source) / VIEW**0.5 * 1.5
    second = torch.randn(8, generator=source)
    limit = (torch.tanh(torch.randn(512, VIEW, generator=source) @ first) @ second).median()
    return lambda x: (torch.tanh(x @ first) @ second > limit).long()


class _Scaled(nn.Module):
    """``gain · inner(x) + offset``, or the sine of it; of a recurrent layer the last output."""

    def __init__(self, inner: nn.Module, gain: float = 1.0, sine: bool = False) -> None:
        super().__init__()
        self.inner, self.gain, self.offset, self.sine = inner, gain, 0.0, sine

    def forward(self, x: Tensor) -> Any:
        found = self.inner(x)
        found = self.gain * (found[0][:, -1] if isinstance(found, tuple) else found) + self.offset
        return torch.sin(found) if self.sine else found


def _branch(frequency: float) -> _Scaled:
    shape = _Scaled(nn.Identity(), frequency, sine=True) if frequency else nn.Tanh()
    return _Scaled(nn.Sequential(nn.Linear(VIEW, HIDDEN), shape, nn.Linear(HIDDEN, SUM)))


class _Branches(Planted):
    """Four branches, added up. Views: each has an input of its own, of which one tells the class;
    outputs of the others have a gain. Gates: they are frozen, vary as much, and stand behind gates
    of known size; they may differ in a frequency, or a gain or offset that is taken back outside.
    """

    def __init__(self, kind: str, source: Generator, choice: Random) -> None:
        super().__init__()
        self.gated, self.sees = kind in ("equal", *VARIED), 0
        if self.gated:
            truth, order = choice.sample(GATES, 4), choice.sample(range(4), 4)
            own = [VARIED[kind][n] if kind in VARIED else 1.0 for n in order]
        else:
            self.sees = choice.randrange(4)
            truth = [float(k == self.sees) for k in range(4)]
            own = [1.0 if each else float(kind) for each in truth]
        self.stem, self.out = nn.Linear(VIEW, VIEW), nn.Linear(SUM, 2)
        branches = [_branch(value if kind == "frequency" else 0.0) for value in own]
        self.branch, self.teacher = nn.ModuleList(branches), _teacher(source)
        self.branch.requires_grad_(not self.gated)
        h = torch.tanh(self.stem(self.draw(512, source)[0])).detach()
        for branch, value in zip(branches, own):
            last: Any = branch.get_submodule("inner.2")
            if self.gated:
                last.weight /= branch(h).std(0).mean()
                last.bias.zero_()
            branch.offset = value if kind == "offset" else 0.0
            branch.gain = 1.0 if kind in ("frequency", "offset") else value
        self.outer = [x / branch.gain if self.gated else 1.0 for x, branch in zip(truth, branches)]
        self.offset = sum(gate * branch.offset for gate, branch in zip(self.outer, branches))
        self.groups = [{f"branch.{k}": x for k, x in enumerate(truth)}]

    def draw(self, samples: int, source: Generator) -> tuple[Tensor, Tensor]:
        if self.gated:
            x = torch.randn(samples, VIEW, generator=source)
            return x, self.teacher(x)
        x = torch.randn(samples, 4, VIEW, generator=source)
        return x, self.teacher(x[:, self.sees])

    def forward(self, x: Tensor) -> Any:
        h = torch.tanh(self.stem(x))
        every = [h] * 4 if self.gated else h.unbind(1)
        added = [gate * part(own) for gate, part, own in zip(self.outer, self.branch, every)]
        return self.out(torch.tanh(torch.stack(added).sum(0) - self.offset))


class _Head(nn.Module):
    """Attention to the positions of a mask. ``entry`` gives it a tensor of its own to read."""

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.entry, self.mask = _Scaled(nn.Identity()), mask
        self.query, self.key, self.value = (nn.Linear(STREAM, HEAD, bias=False) for _ in range(3))
        self.result = nn.Linear(HEAD, STREAM, bias=False)

    def forward(self, x: Tensor) -> Any:
        x = self.entry(x)
        scores = self.query(x) @ self.key(x).transpose(-1, -2) / HEAD**0.5
        weights = scores.masked_fill(~self.mask, float("-inf")).softmax(-1)
        return self.result(weights @ self.value(x))


class _Heads(Planted):
    """Two layers of four heads: which word came after the last one's earlier occurrence? One head
    of the first layer sees the word before, one of the second the first half.
    """

    def __init__(self, kind: str, source: Generator, choice: Random) -> None:
        super().__init__()
        self.stem = nn.Embedding(WORDS + LENGTH, STREAM)  # words and positions
        one, two = choice.sample(range(4), 4), choice.sample(range(4), 4)
        rows = torch.arange(LENGTH)
        half = (rows < LENGTH // 2).expand(LENGTH, -1)
        back = [(rows[:, None] - torch.tensor(steps)).clamp(min=0) for steps in BEFORE]
        self.one = nn.ModuleList(_Head((back[n][..., None] == rows).any(1)) for n in one)
        self.two = nn.ModuleList(_Head(half if n == 0 else ~half) for n in two)
        self.out = nn.Linear(STREAM, WORDS)
        for head in (*self.one, *self.two):
            nn.init.normal_(head.get_parameter("result.weight"), std=0.2)
        a = {f"one.{k}": float(n == 0) for k, n in enumerate(one)}
        b = {f"two.{k}": float(n == 0) for k, n in enumerate(two)}
        self.groups = [a, b]

    def draw(self, samples: int, source: Generator) -> tuple[Tensor, Tensor]:
        words = torch.randint(WORDS - 1, (samples, LENGTH), generator=source)
        at = torch.randint(LENGTH // 2 - 1, (samples,), generator=source)
        rows, last = torch.arange(samples), torch.randint(WORDS, (samples,), generator=source)
        words = (words + last[:, None] + 1) % WORDS  # no other is the last word
        words[rows, at], words[:, -1] = last, last
        return words, words[rows, at + 1]

    def forward(self, x: Tensor) -> Any:
        h = self.stem(x) + self.stem(torch.arange(WORDS, WORDS + LENGTH))
        for layer in (self.one, self.two):
            h = h + torch.stack([head(h) for head in layer]).sum(0)
        return self.out(h[:, -1])


# Tasks: a short word is read, one answer is asked -------------------------------------------------


class Task(NamedTuple):
    """Words of so many random letters, and the answer to one, of so many classes."""

    name: str
    letters: int
    length: int
    classes: int
    answer: Callable[[list[int]], int]


def recall(letters: int, length: int, place: int) -> Task:
    """Which letter is at a place?"""
    name = f"recall: letter {place} of {length}, {letters} letters"
    return Task(name, letters, length, letters, lambda word: word[place - 1])


def brackets(kinds: int, length: int) -> Task:
    """A letter opens a bracket of its kind, or closes the innermost: which is open at the end?"""

    def innermost(word: list[int]) -> int:
        stack = [kinds]
        for letter in word:
            stack = [*stack, letter] if letter < kinds else stack[:-1] or stack
        return stack[-1]

    name = f"brackets: {kinds} kinds, in {length}"
    return Task(name, kinds + 1, length, kinds + 1, innermost)


TASKS = {"recall": (recall(4, 5, 1), recall(5, 6, 3)), "brackets": (brackets(2, 5), brackets(4, 4))}
"""The first two of each family that were drawn."""


# Rivals: components that read the same word -------------------------------------------------------

CONTESTS = {
    "frozen": ("gru", "gru", "gru"),
    "recurrent": ("rnn", "lstm", "gru"),
    "mechanisms": ("attention", "stack", "memory"),
}


class _Attention(nn.Module):
    """One head: the last letter asks, all letters with their places answer."""

    def __init__(self, width: int, longest: int = 8) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.randn(longest, width))
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.result = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        placed = x + self.places[: x.shape[1]]
        asked = self.query(placed[:, -1:]) @ self.key(placed).transpose(1, 2)
        read = (asked / x.shape[2] ** 0.5).softmax(2) @ self.value(placed)
        return torch.tanh(self.result(read[:, 0]))


class _Stack(nn.Module):
    """A controller with a stack that is pushed, popped and left alone in parts that add to 1."""

    def __init__(self, width: int, depth: int = 4) -> None:
        super().__init__()
        self.read, self.depth = nn.Linear(3 * width, width), depth
        self.act, self.push = nn.Linear(width, 3), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        state, stack = torch.zeros_like(x[:, 0]), x.new_zeros(len(x), self.depth, x.shape[2])
        for letter in x.unbind(1):
            state = torch.tanh(self.read(torch.cat([letter, state, stack[:, 0]], 1)))
            push, pop, keep = self.act(state).softmax(1)[:, :, None, None].unbind(1)
            above = torch.cat([torch.tanh(self.push(state))[:, None], stack[:, :-1]], 1)
            below = torch.cat([stack[:, 1:], torch.zeros_like(stack[:, :1])], 1)
            stack = push * above + pop * below + keep * stack
        return torch.tanh(self.read(torch.cat([torch.zeros_like(state), state, stack[:, 0]], 1)))


class _Memory(nn.Module):
    """A controller with slots: it reads by content, and writes where it says."""

    def __init__(self, width: int, slots: int = 4) -> None:
        super().__init__()
        self.keys = nn.Parameter(torch.randn(slots, width))
        self.read, self.ask = nn.Linear(3 * width, width), nn.Linear(width, width)
        self.where, self.write = nn.Linear(width, slots), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        state, slots = torch.zeros_like(x[:, 0]), x.new_zeros(len(x), *self.keys.shape)
        for letter in x.unbind(1):
            asked = (slots + self.keys) @ self.ask(letter + state)[:, :, None]
            seen = (asked.softmax(1) * slots).sum(1)
            state = torch.tanh(self.read(torch.cat([letter, state, seen], 1)))
            part = self.where(state).softmax(1)[:, :, None]
            slots = slots + part * (torch.tanh(self.write(state))[:, None] - slots)
        return state


OWN: dict[str, Any] = {"attention": _Attention, "stack": _Stack, "memory": _Memory}


def _core(kind: str, width: int, *room: int) -> nn.Module:
    recurrent: Any = {"rnn": nn.RNN, "lstm": nn.LSTM, "gru": nn.GRU}.get(kind)
    return recurrent(width, width, batch_first=True) if recurrent else OWN[kind](width, *room)  # type: ignore[no-any-return]


class Rivals(Planted):
    """``out(mean of parts(stem(words)))``: those of a contest, or one of that name; outputs are of
    one size at the start. In ``frozen`` one part is trained. ``room``: places of its own parts.
    """

    def __init__(self, contest: str, task: Task, width: int, seed: str, *room: int) -> None:
        super().__init__()
        self.kinds, self.task = CONTESTS.get(contest, (contest,)), task
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(Random(f"{seed}/weights").getrandbits(63))
            self.stem = nn.Embedding(task.letters, width)
            parts = [_Scaled(_core(kind, width, *room)) for kind in self.kinds]
            self.parts, self.out = nn.ModuleList(parts), nn.Linear(width, task.classes)
        self.groups = [{f"parts.{k}": 0.0 for k in range(len(parts))}]  # it is not known
        h = self.stem(self.draw(512, source(seed, "gain"))[0])
        for k, part in enumerate(parts):
            part.requires_grad_(contest != "frozen" or k == Random(f"{seed}/choice").randrange(3))
            part.gain = 1 / float(part(h[:, k]).detach().std(0).mean().clamp(min=1e-6))

    def draw(self, samples: int, source: Generator) -> tuple[Tensor, Tensor]:
        """Words, a copy for each part, and the answers."""
        x = torch.randint(self.task.letters, (samples, self.task.length), generator=source)
        answers = [*map(self.task.answer, x.tolist())]
        return torch.stack([x] * len(self.parts), 1), torch.tensor(answers)

    def forward(self, x: Tensor) -> Any:
        """Scores of answers."""
        h = self.stem(x)
        return self.out(torch.stack([part(h[:, k]) for k, part in enumerate(self.parts)]).mean(0))
