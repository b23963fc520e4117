"""Makes the golden files: what the library answers about the networks of ``nets``.

    python tests/make_golden.py [--check-stability] [NET ...]

A seed of a network is taken if its counts and ways do not change, and its floats hardly, with
four threads, with PyTorch's plainest kernels, and with each weight times 1 + 1e-13 or 1 - 1e-13;
else the next one is tried. Without ``--check-stability`` the seeds of the files there are kept.

A file has ``{question: {part: {name: {column: value}}}}``, and ``changes``: what SCOPE §3 lets
change.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import isnan
from pathlib import Path
from typing import Any

import answers
import nets
import torch
from answers import Answer, Net

GOLDEN = Path(__file__).parent / "golden"
BROKEN = "broken"
PINNED = "2.13.0"
"""The PyTorch that the files are made with."""

EXACT, CLOSE = 1e-12, 1e-9
"""How far floats may be off, of the largest in their column: here, and elsewhere."""

LONGEST = 60
"""Paths of more steps are held by their digests only."""

NUDGE = 1e-13
VARIANTS = {
    "as it is": ["--threads", "1"],
    "4 threads": ["--threads", "4"],
    "plain kernels": ["--threads", "1"],
    "weights up": ["--threads", "1", f"--nudge={NUDGE}"],
    "weights down": ["--threads", "1", f"--nudge={-NUDGE}"],
}
"""How a network is asked again, to see whether its answers are stable."""


# What is asked -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Asked:
    """What is asked about a network: by which components, about which parameters (all)."""

    by: Any = "modules"
    kinds: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()
    inputs: str = ""  # the module whose outputs are attributed to; else what is put in
    rules: tuple[str, ...] = ("gradient", "frozen", "attnlrp")

    def of(self, net: Net) -> list[str]:
        return list(self.parameters or net.gradients)


ASKED = {
    "chain": Asked(
        by=["0", "1", "149", "150", "297", "298", "299"],
        parameters=("0.weight", "150.bias", "298.weight"),
        rules=("gradient",),
    ),
    "lstm": Asked(kinds=("steps",)),
    "tricks": Asked(rules=("gradient", "frozen")),
    "experts": Asked(kinds=("experts",)),
    "tied": Asked(inputs="embed"),
    "half": Asked(rules=("gradient",)),
    "gpt2": Asked(kinds=("layers", "heads"), inputs="transformer.wte"),
    "llama": Asked(kinds=("layers", "heads"), inputs="model.embed_tokens"),
    "bert": Asked(kinds=("layers", "heads"), inputs="bert.embeddings.word_embeddings"),
    "t5": Asked(kinds=("layers", "heads"), inputs="encoder.embed_tokens"),
}


def backward(net: Net, asked: Asked) -> dict[str, Answer]:
    names = asked.of(net)
    found = {each: answers.backward_in(net, each) for each in answers.SEMIRINGS}
    return {each: {name: answer[name] for name in names} for each, answer in found.items()}


def influence(net: Net, asked: Asked) -> dict[str, Answer]:
    kinds = (asked.by, *asked.kinds)
    return {
        f"{rule}, {_said(by)}": answers.influence_of_all(net, rule, by)
        for rule in answers.RULES
        for by in kinds
    }


def influence_by_parameter(net: Net, asked: Asked) -> dict[str, Answer]:
    """Counts as text, ``through/eligible``, and ``+unreached``: short, and equal or not."""
    return {
        rule: {
            name: {
                component: f"{row['through']}/{row['eligible']}"
                + (f"+{row['unreached']}" if row["unreached"] else "")
                for component, row in answers.influence(net, rule, name, asked.by).items()
            }
            for name in asked.of(net)
        }
        for rule in answers.RULES
    }


def paths(net: Net, asked: Asked) -> dict[str, Answer]:
    names = [name for name in asked.of(net) if chosen(net, name)]
    found: dict[str, Answer] = {
        rule: {name: answers.paths(net, rule, name, chosen(net, name)[n:][:1]) for name in names}
        for n, rule in enumerate(answers.RULES)
    }
    some = names[:: len(names) // 6 + 1]
    found["heaviest"] = {name: {"weights": answers.heaviest(net, name, 3)} for name in some}
    return found


def paths_in_full(net: Net, asked: Asked) -> dict[str, Answer]:
    names = [name for name in asked.of(net) if chosen(net, name)]
    few = {names[n * (len(names) - 1) // 4]: answers.RULES[n % 3] for n in range(5)}
    found = {
        f"{rule}, {name}": answers.path(net, rule, name, chosen(net, name)[0])
        for name, rule in few.items()
    }
    return {name: steps for name, steps in found.items() if len(steps) <= LONGEST}


def chosen(net: Net, parameter: str) -> list[int]:
    """The first, the middle and the last of the elements with a gradient worth a path."""
    gradient = net.gradients[parameter].abs().flatten()
    large = (gradient > gradient.max() / 64).nonzero().flatten().tolist()
    return [large[0], large[len(large) // 2], large[-1]] if large else []


def decompose(net: Net, asked: Asked) -> dict[str, Answer]:
    kinds = (asked.by, *asked.kinds)
    found = {_said(by): answers.decompose(net, by) for by in kinds}
    some = list(found[_said(asked.by)])
    some = some[:: max(len(some) // 5, 1)]
    found["gradients"] = answers.gradients_through(net, some, asked.by)
    found["cosines"] = answers.cosines(net, some, asked.by)
    return found


def mass(net: Net, asked: Asked) -> dict[str, Answer]:
    return {f"p = {p}": answers.mass(net, p, asked.by) for p in (1, 2)}


def coverage(net: Net, asked: Asked) -> dict[str, Answer]:
    names = asked.of(net)
    found = {rule: answers.coverage(net, rule, {"(all)": names}) for rule in answers.RULES}
    found["greedy"] |= answers.coverage(net, "greedy", {name: [name] for name in names})
    return found


def norms(net: Net, asked: Asked) -> dict[str, Answer]:
    found = answers.norms(net)
    rows = found if asked.by == "modules" else [name for name in found if name in asked.by]
    return {"": {name: found[name] for name in rows}}


def conflicts(net: Net, asked: Asked) -> dict[str, Answer]:
    found = answers.conflicts(net)
    rows = found if asked.by == "modules" else [name for name in found if name in asked.by]
    return {"": {name: found[name] for name in rows}}


def attribution(net: Net, asked: Asked) -> dict[str, Answer]:
    return {rule: answers.attribution(net, rule, asked.inputs, asked.by) for rule in asked.rules}


QUESTIONS: dict[str, Callable[[Net, Asked], dict[str, Answer]]] = {
    each.__name__.replace("_", " "): each
    for each in (
        backward,
        influence,
        influence_by_parameter,
        paths,
        paths_in_full,
        decompose,
        mass,
        coverage,
        norms,
        conflicts,
        attribution,
    )
}


def _said(by: Any) -> str:
    return by if isinstance(by, str) else "some"


def answered(net: Net, name: str, question: str) -> dict[str, Any]:
    """The answer as JSON has it."""
    found = QUESTIONS[question](net, ASKED.get(name, Asked()))
    return json.loads(json.dumps(_plain(found)))  # type: ignore[no-any-return]


def _plain(found: Any) -> Any:
    """Floats to 15 digits; no number is None."""
    if isinstance(found, dict):
        return {name: _plain(each) for name, each in found.items()}
    if isinstance(found, (list, tuple)):
        return [_plain(each) for each in found]
    if isinstance(found, float):
        return None if isnan(found) else float(f"{found:.15g}")
    return found


# Comparing ---------------------------------------------------------------------------------------


def differences(expected: dict[str, Any], found: dict[str, Any], tolerance: float) -> list[str]:
    """What differs, in words: counts and texts at all, floats by more than so much of the largest
    in their column.
    """
    said = [f"{part}: not there" for part in expected if part not in found]
    said += [f"{part}: not in the file" for part in found if part not in expected]
    for part in expected:
        if part in found:
            said += [f"{part}: {text}" for text in _apart(expected[part], found[part], tolerance)]
    return said


def _apart(expected: Answer, found: Answer, tolerance: float) -> Iterator[str]:
    largest: dict[str, float] = {}
    for row in expected.values():
        for column, value in row.items():
            sizes = [abs(x) for x in _flat(value) if isinstance(x, float)]
            largest[column] = max([largest.get(column, 0.0), *sizes])
    for name in dict.fromkeys((*expected, *found)):
        mine, theirs = expected.get(name, {}), found.get(name, {})
        if (name in expected) != (name in found):
            yield f"{name}: {'not there' if name in expected else 'not in the file'}"
            continue
        for column in dict.fromkeys((*mine, *theirs)):
            one, other = mine.get(column, "nothing"), theirs.get(column, "nothing")
            if not _equal(one, other, tolerance * largest.get(column, 0.0)):
                yield f"{name}, {column}: {one!r} in the file, {other!r} now"


def _flat(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else (value,)


def _equal(one: Any, other: Any, off: float) -> bool:
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(_equal(a, b, off) for a, b in zip(one, other))
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) <= off
    return bool(one == other) and type(one) is type(other)


# Making ------------------------------------------------------------------------------------------


def nudged(made: nets.Made, nudge: float) -> nets.Made:
    """The network with each weight a little larger or smaller."""
    with torch.no_grad():
        for name, weight in made[0].named_parameters():
            signs = nets.Numbers(0, name).odd(tuple(weight.shape)).sign()
            weight.mul_((1 + nudge * signs).to(weight.dtype))
    return made


def all_of(name: str, seed: int, nudge: float = 0.0) -> dict[str, Any]:
    """The file of a network."""
    net = Net(nudged(nets.NETS[name](seed), nudge))
    found: dict[str, Any] = {"seed": seed, "changes": answers.cancelled(net)}
    return found | {question: answered(net, name, question) for question in QUESTIONS}


def told(seeds: dict[str, int], variant: str) -> dict[str, Any]:
    """The files of networks as another process makes them."""
    each = [f"{name}:{seed}" for name, seed in seeds.items()]
    command = [sys.executable, __file__, "--tell", *VARIANTS[variant], *each]
    plain = {"ATEN_CPU_CAPABILITY": "default"} if variant == "plain kernels" else {}
    run = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **plain})
    if run.returncode:
        raise RuntimeError(f"{variant}: {run.stderr}")
    return json.loads(run.stdout)  # type: ignore[no-any-return]


def stable(seeds: dict[str, int]) -> dict[str, Any]:
    """The files of networks, by the first seed of each from these on that is stable."""
    found: dict[str, Any] = {}
    while seeds:
        files, *others = (told(seeds, variant) for variant in VARIANTS)
        for name, file in files.items():
            why = [
                f"{variant}: {question}: {text}"
                for variant, other in zip(list(VARIANTS)[1:], others)
                for question in QUESTIONS
                for text in differences(file[question], other[name][question], _off(variant))
            ]
            if not why and not file["changes"]:
                found[name] = file
                continue
            print(f"{name}: not seed {seeds[name]}:", *why[:8], file["changes"], sep="\n  ")
        seeds = {name: seed + 1 for name, seed in seeds.items() if name not in found}
    return found


def _off(variant: str) -> float:
    return CLOSE if "weights" in variant else EXACT


def read(name: str) -> dict[str, Any]:
    return json.loads((GOLDEN / f"{name}.json").read_text())  # type: ignore[no-any-return]


def write(name: str, file: dict[str, Any]) -> None:
    """JSON with a line for each row, so that a change is seen."""
    lines = []
    for question, parts in file.items():
        if not isinstance(parts, dict) or question == "changes":
            lines.append(f"{json.dumps(question)}: {json.dumps(parts)}")
            continue
        inner = [
            f" {json.dumps(part)}: {{\n" + ",\n".join(_rows(answer)) + "}"
            for part, answer in parts.items()
        ]
        lines.append(f"{json.dumps(question)}: {{\n" + ",\n".join(inner) + "}")
    (GOLDEN / f"{name}.json").write_text("{" + ",\n".join(lines) + "}\n")


def _rows(answer: Answer) -> list[str]:
    return [
        f"  {json.dumps(name)}: {json.dumps(row, separators=(',', ':'))}"
        for name, row in answer.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("nets", nargs="*", default=[*nets.NETS, BROKEN])
    parser.add_argument("--check-stability", action="store_true")
    parser.add_argument("--tell", action="store_true", help="print the files of NET:SEED")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--nudge", type=float, default=0.0)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    if given.tell:
        pairs = [each.split(":") for each in given.nets]
        print(json.dumps({name: all_of(name, int(seed), given.nudge) for name, seed in pairs}))
        return
    seeds = {name: _seed(name) for name in given.nets if name != BROKEN}
    make = stable if given.check_stability else _made
    for name, file in make(seeds).items():
        write(name, file)
    if BROKEN in given.nets:
        found = {each: answers.diagnosis(made()) for each, made in nets.BROKEN.items()}
        write(BROKEN, {"diagnosis": found})


def _made(seeds: dict[str, int]) -> dict[str, Any]:
    return {name: all_of(name, seed) for name, seed in seeds.items()}


def _seed(name: str) -> int:
    return int(read(name)["seed"]) if (GOLDEN / f"{name}.json").exists() else 0


if __name__ == "__main__":
    main()
