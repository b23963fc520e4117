"""Pass that finds the values which nothing is computed from but one leaf."""

from __future__ import annotations

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
