"""What ``language-model`` says of its numbers: a headline, and a sentence for each question."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from math import isfinite, nan
from typing import Any

from gradtrace.experiments.harness.interleaved_timing import told
from gradtrace.experiments.language_model_facts import KINDS, is_sure

STRAIGHT = 0.99
"""The least R² of a straight line; of fewer than three depths nothing is said."""

NEGATIVE_ZERO = re.compile(r"-(0(?:\.0+)?)(?![\d.])")


def stated(found: Sequence[float], form: str = ".2f", scale: float = 1.0) -> str:
    """``0.81 [0.72, 0.90]``; without an interval if that is not finite."""
    value, low, high = (nan if x is None else x * scale for x in found)
    text = told(value, form)
    if isfinite(low) and isfinite(high):
        text += f" [{low:{form}}, {high:{form}}]"
    return NEGATIVE_ZERO.sub(r"\1", text)


def percent(found: Sequence[float], form: str = ".0f") -> str:
    """``81% [72, 90]``."""
    return stated(found, form, 100).replace(" [", "% [") + ("" if is_bounded(found) else "%")


def is_bounded(found: Sequence[float]) -> bool:
    """Whether a number has a finite interval."""
    return all(x is not None and isfinite(x) for x in found[1:])


def _main(facts: Mapping[str, Any]) -> str:
    """The model that sentences are about: the first, which is an LSTM of one layer."""
    return next(iter(facts["learned"]), "")


def headline(facts: Mapping[str, Any]) -> str:
    """The result in a sentence."""
    name = _main(facts)
    if not name:
        return ""
    learned, lengths = facts["learned"][name], facts["lengths"][name]
    words, _ = facts["sizes"]
    before, after = (stated(each, ".0f") for each in lengths["length"])
    said = (
        f"A language model with {words:,} words ends {stated(learned['above'])} nats a word above "
        f"the least possible loss; the way to its first weights has {after} operators, {before} "
        f"before training"
    )
    cost = next(iter(facts["cost"].values()), None)
    sampled = "?" if cost is None else percent(cost["sampled"])
    if cost is None or sampled.startswith("?"):
        return f"{said}."
    said += f". Every 100 steps a sampled influence takes {sampled} of training"
    if "monitor" in cost:
        said += f", a full gt.Monitor {percent(cost['monitor'])}"
    return f"{said} (one seed)." if cost["seeds"] == 1 else f"{said}."


def sentence(facts: Mapping[str, Any]) -> str:
    """All that was found, a sentence for each question."""
    if not facts["learned"]:
        return " ".join(
            ["No model was trained, so nothing is said of influence.", *_on_cost(facts)]
        )
    parts = [_on_learning(facts), *_on_influence(facts), *_on_layers(facts), *_on_graph(facts)]
    return " ".join([*parts, *_on_cost(facts)])


def _on_learning(facts: Mapping[str, Any]) -> str:
    """Loss and agreement of the models of one layer."""
    one = ", 1 layer"
    found = {
        name.removesuffix(one): each
        for name, each in facts["learned"].items()
        if name.endswith(one)
    }
    source = next(iter(facts["learned"].values()))["source"]
    above = ", ".join(f"{name} by {stated(each['above'])}" for name, each in found.items())
    right = ", ".join(f"{name} {percent(each['right'][1])}" for name, each in found.items())
    least = ", ".join(percent(each["least"]) for each in found.values())
    said = (
        f"All models were trained on {' and '.join(facts['devices'])}, with up to "
        f"{facts['seeds']} seeds."
    )
    if not found:
        return said
    return (
        f"{said} The least possible loss is {told(source, '.2f')} nats a word, and models "
        f"of one layer end above it: {above}. Their agreement, the share of verbs that agree with "
        f"their subject and not with a nearer noun, where a guess has 50%, ends at: {right}. On "
        f"the way, when models go by the nearest noun, it falls to {least}."
    )


def _on_influence(facts: Mapping[str, Any]) -> list[str]:
    if not facts["changes"]:
        return []
    every = [
        (name, part, found)
        for name, each in facts["changes"].items()
        for part, found in each.items()
    ]
    sure = [(name, part, found) for name, part, found in every if is_sure(found)]
    control = (
        f"In LSTMs the order of components before training has a rank correlation of "
        f"{stated(facts['control'])} with that after."
    )
    if not sure:
        return [
            f"Of {len(every)} components none has an influence that training surely changes "
            f"({facts['seeds']} seeds).",
            control,
        ]
    largest = sorted(sure, key=lambda one: -abs(one[2][0]))[:2]
    told_ones = " and ".join(
        f"{name}, {part}: {found[0] * 100:+.0f} points [{found[1] * 100:+.0f}, "
        f"{found[2] * 100:+.0f}]"
        for name, part, found in largest
    )
    return [
        f"Training surely changes the influence of {len(sure)} of {len(every)} components, most "
        f"that of {told_ones}.",
        control,
    ]


def _on_layers(facts: Mapping[str, Any]) -> list[str]:
    """What a layer adds to a path, of all kinds in a sentence."""
    said = []
    for kind, each in facts["by_layers"].items():
        if each:
            straight = each["end"]["r2"] >= STRAIGHT
            line = f", {'' if straight else 'not '}in a line" if each["depths"] > 2 else ""
            said.append(f"{stated(each['end']['slope'], '.1f')} in the {KINDS[kind]}{line}")
    if not said:
        return []
    return [f"A layer adds to a path, trained, so many operators: {'; '.join(said)}."]


def _on_graph(facts: Mapping[str, Any]) -> list[str]:
    name = _main(facts)
    lengths, growth = facts["lengths"][name], facts["by_graph"][name]
    reach, graph = lengths["reach"], lengths["largest"]
    return [
        f"Path length against the graph ({name}): at {graph['time']} time steps a path has "
        f"{stated(graph['length'], '.0f')} of {graph['operators']:,} operators, in a graph of "
        f"{graph['edges'] / 1e9:.3g} billion edges; with more time steps paths grow as the edges "
        f"to the power of {stated(growth['start'])} untrained and {stated(growth['end'])} trained. "
        f"They span {stated(reach[0], '.1f')} time steps untrained and {stated(reach[1], '.1f')} "
        f"trained."
    ]


def _on_cost(facts: Mapping[str, Any]) -> list[str]:
    """Of the fewest layers and the most; the table has the others."""
    every = facts["cost"]
    said = []
    for layers in dict.fromkeys([*list(every)[:1], *list(every)[-1:]]):
        each = every[layers]
        text = (
            f"A trace every 100 steps of an LSTM of {layers} layer{'s' * (layers != '1')} takes "
            f"{percent(each['exact'])} of training time with all elements and "
            f"{percent(each['sampled'])} with a sample ({_of_seeds(each['seeds'])})"
        )
        if "monitor" in each:
            text += (
                "; ``gt.Monitor`` without a budget, which measures flow and choices, too, adds "
                f"{percent(each['monitor'])}"
            )
        said.append(f"{text}." if each["alone"] else f"{text}, measured beside other work.")
    return said


def _of_seeds(seeds: int) -> str:
    return "one seed" if seeds == 1 else f"{seeds} seeds"
