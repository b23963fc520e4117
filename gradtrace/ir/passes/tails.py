"""Pass that finds the values which nothing is computed from but one leaf."""

from __future__ import annotations

from collections import Counter

from gradtrace.ir.program import Program


def find_tails(program: Program) -> set[int]:
    """Values whose only use leads to a leaf through gathers and sums: no map chooses after them.

    Includes the leaves themselves. Their values need not be computed before the leaf is counted.
    """
    ends = {leaf.value for leaf in program.leaves}
    found, used = set(ends), set[int]()
    for out, terms, _, _ in reversed(program.steps()):  # users of a value come before its maker
        on = out in found
        for at, value in terms:
            if value not in used:
                used.add(value)
                if on and program.maps[at].is_gather:
                    found.add(value)
            elif value in found and value not in ends:
                found.remove(value)  # it has another user
    return found


def find_lone_tails(program: Program) -> set[int]:
    """Of the tails, those that are moved to their leaf and added to nothing, nor used otherwise."""
    users = Counter(value for step in program.steps() for _, value in step.terms)
    found = {leaf.value for leaf in program.leaves if not users[leaf.value]}
    for out, terms, _, _ in reversed(program.steps()):
        if out in found and len(terms) == 1:
            at, value = terms[0]
            if program.maps[at].is_gather and users[value] == 1:
                found.add(value)
    return found
