"""``gradtrace conflicts``: whether the terms of a loss pull against each other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from gradtrace.cli.app import app, examples
from gradtrace.cli.influence import Top
from gradtrace.cli.measures import data, write_measure
from gradtrace.cli.printing import Json, as_text, working, write_json
from gradtrace.cli.target import Arguments, Target, script_function
from gradtrace.cli.trace import watched_call

if TYPE_CHECKING:
    from torch import Tensor

RETURNS = (
    'return terms by name, {"ce": ce, "kl": kl}, or a vector with a loss for each sample, alone, '
    "with the model, or as (model, terms_fn)"
)

TermsFunction = Annotated[
    str,
    script_function(
        "A function that returns the terms of a loss by name, as they are added up, or a vector "
        "with a loss for each sample; alone, with the model, or as (model, terms_fn)."
    ),
]
ByParameter = Annotated[
    bool, Option("--by-parameter", help="A row for each parameter instead of each module.")
]


@app.command(
    epilog=examples(
        "gradtrace conflicts train.py:terms",
        "gradtrace conflicts train.py:terms --by-parameter --top 5 --json -- tiny 3",
        "where train.py has: def terms(...): ... return model, {'ce': ce, 'kl': 0.1 * kl}",
    )
)
def conflicts(
    target: TermsFunction,
    args: Arguments = None,
    by_parameter: ByParameter = False,
    top: Top = None,
    as_json: Json = False,
) -> None:
    """Compare the gradients of loss terms, tasks or samples: the norm of each, the cosine of each
    pair and who wins, module by module.
    """
    from gradtrace.pytorch.global_switches import uncompiled

    wanted = Target.of(target, args)
    with working(f"running {wanted.name}") as work, uncompiled(), wanted.running() as script:
        terms, watched = watched_call(
            lambda: wanted.call(script), wanted.name, vars(script), _terms, RETURNS, whole=_whole
        )
        work.begin("comparing gradients")
        found = watched.conflicts(terms)
    table = as_text(found.by_parameter() if by_parameter else found)
    if as_json:
        write_json({"terms": list(found.terms), "conflicts": data(table, top)})
    else:
        write_measure(table, top)


def _terms(value: Any) -> Any:
    """Terms by name, or a vector of losses; None if it is neither."""
    from collections.abc import Mapping

    from torch import Tensor

    return value if isinstance(value, (Mapping, Tensor)) else None


def _whole(terms: Any) -> Tensor:
    """All terms as one tensor, from whose graph calls of modules are counted."""
    import torch

    from gradtrace.measures.conflicts import checked_terms

    return torch.stack([term.sum() for term, _ in checked_terms(terms).values()]).sum()
