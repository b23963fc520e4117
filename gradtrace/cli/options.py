"""Options shared by several commands."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

KINDS = ("modules", "classes", "operators", "labels", "arguments")


def kinds(incomplete: str) -> list[str]:
    """Shell completion."""
    return [kind for kind in KINDS if kind.startswith(incomplete)]


Rule = Annotated[
    Literal["greedy", "viterbi"],
    typer.Option(help="Follow the largest contribution, or the largest product."),
]
Granularity = Annotated[
    Literal["scalar", "operator"], typer.Option(help="Follow elements, or whole tensors.")
]
Components = Annotated[
    list[str] | None,
    typer.Option(
        help="Influence of modules, classes, operators, labels, arguments (of sums); or of a "
        "module by name or pattern; or of a group: NAME=PATTERN,PATTERN. May be given again.",
        autocompletion=kinds,
    ),
]
Weight = Annotated[
    Literal["count", "gradient"],
    typer.Option(help="Count every element as one, or with its |gradient|."),
]
Top = Annotated[
    int | None, typer.Option(help="Show so many components, those of most influence.", min=1)
]
