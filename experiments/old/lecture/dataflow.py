"""Execution of programs: "execute nodes in any topological order", or in parallel, "node executes
when inputs are available".

Programs here are tables of nodes: R(P,Q), a chain, a balanced tree of sums, and random programs.
Each is run in its own order, in topological orders drawn at random, and by threads that take up a
node as soon as its inputs are there: all should give the same bits. With a unit of time for each
node, T₁ nodes and T∞ on the longest path, p workers that never wait without need take
``max(T₁/p, T∞) ≤ T_p ≤ T₁/p + T∞ (1 - 1/p)`` (Brent, Graham); how much that is, is counted.

Backwards a value with several users gets a sum, whose bits depend on the order of its terms: our
three schedules are topological orders, too, and are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from itertools import pairwise
from math import comb, isfinite
from typing import Any, NamedTuple

import torch
from torch import Tensor

import gradtrace as gt
from gradtrace.experiments.harness.findings import (
    Cell,
    Findings,
    Plot,
    Result,
    Row,
    Series,
    Table,
    Tick,
)
from gradtrace.experiments.harness.statistics import Interval, student, with_interval

WORKERS = (1, 2, 4, 8)
SCHEDULES = ("kahn", "creation", "recursive")
LEAVES = 4


class Node(NamedTuple):
    """A function, and the names of the values that it is applied to."""

    run: Callable[..., Tensor]
    inputs: tuple[str, ...]


Table_ = dict[str, Node]


def running_example() -> Table_:
    """R(P,Q), with P, Q and the weights as given values."""
    return {
        "a": Node(torch.mul, ("x0", "x1")),
        "b": Node(lambda a, q: torch.tanh(a + q), ("a", "x2")),
        "c": Node(torch.mul, ("x3", "b")),
        "d": Node(torch.mul, ("x0", "b")),
        "e": Node(torch.sigmoid, ("c",)),
        "f": Node(torch.sin, ("d",)),
        "r": Node(torch.mul, ("e", "f")),
    }


def chain(nodes: int) -> Table_:
    """``h ← sin h``, so many times."""
    names = ["x0", *(f"h{i}" for i in range(nodes))]
    return {name: Node(torch.sin, (before,)) for before, name in pairwise(names)}


def tree(nodes: int) -> Table_:
    """Leaves ``cos``, added up in pairs: the largest tree of no more nodes."""
    level = [f"l{i}" for i in range(2 ** ((nodes + 1).bit_length() - 2))]
    found = {name: Node(torch.cos, (f"x{i % LEAVES}",)) for i, name in enumerate(level)}
    while len(level) > 1:
        above = []
        for i in range(0, len(level), 2):
            name = f"s{len(found)}"
            found[name] = Node(torch.add, (level[i], level[i + 1]))
            above.append(name)
        level = above
    return found


def drawn(nodes: int, seed: int) -> Table_:
    """Each node is a product or sum of two earlier values; the last adds up what has no user."""
    generator = torch.Generator().manual_seed(seed)
    names, found = [f"x{i}" for i in range(LEAVES)], {}

    def bounded(a: Tensor, b: Tensor) -> Tensor:
        return torch.tanh(a) * torch.cos(b)

    for i in range(nodes - 1):
        one, other = torch.randint(len(names), (2,), generator=generator).tolist()
        product = bool(torch.randint(2, (), generator=generator))
        found[f"n{i}"] = Node(bounded if product else torch.add, (names[one], names[other]))
        names.append(f"n{i}")
    used = {name for node in found.values() for name in node.inputs}
    ends = tuple(name for name in found if name not in used)
    return found | {"end": Node(lambda *terms: torch.stack(terms).sum(0), ends)}


def cells(settings: Mapping[str, Any], seeds: int) -> list[Cell]:
    """Fixed programs once; random ones for each seed."""
    kinds = [("R(P,Q)", 0), ("chain", 0), ("tree", 0), *(("drawn", s) for s in range(seeds))]
    return [{"kind": kind, "seed": seed, **settings} for kind, seed in kinds]


def program_of(cell: Cell) -> Table_:
    """The table of a cell's program."""
    if cell["kind"] == "R(P,Q)":
        return running_example()
    if cell["kind"] == "drawn":
        return drawn(cell["nodes"], cell["seed"])
    return {"chain": chain, "tree": tree}[cell["kind"]](cell["nodes"])


def measure(cell: Cell, tick: Tick) -> Result:
    """Orders, threads, steps, and gradients by three schedules."""
    program, generator = program_of(cell), torch.Generator().manual_seed(cell["seed"])
    values = torch.randn(LEAVES, 5, dtype=torch.float64, generator=generator)
    given = {f"x{i}": x for i, x in enumerate(values)}
    wanted = in_order(program, list(program), given)
    orders = {tuple(_random_order(program, generator)) for _ in range(cell["orders"])}
    others = [in_order(program, order, given) for order in sorted(orders)]
    others += [in_parallel(program, given, cell["threads"]) for _ in range(cell["runs"])]
    return {
        "nodes": len(program),
        "longest": longest(program),
        "orders": len(orders),
        "different": sum(not _same(wanted, other) for other in others),
        "steps": {str(p): steps(program, p) for p in WORKERS},
        **_backwards(program, given),
    }


def in_order(
    program: Table_, order: Sequence[str], given: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """All values, one node after another."""
    values = dict(given)
    for name in order:
        node = program[name]
        values[name] = node.run(*(values[x] for x in node.inputs))
    return values


def in_parallel(program: Table_, given: Mapping[str, Tensor], threads: int) -> dict[str, Tensor]:
    """All values; a node is handed to a thread when its inputs are available."""
    values, waiting = dict(given), dict(program)
    running: dict[Future[Tensor], str] = {}
    with ThreadPoolExecutor(threads) as pool:
        while waiting or running:
            for name in [n for n, node in waiting.items() if all(x in values for x in node.inputs)]:
                node = waiting.pop(name)
                running[pool.submit(node.run, *(values[x] for x in node.inputs))] = name
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for one in done:
                values[running.pop(one)] = one.result()
    return values


def longest(program: Table_) -> int:
    """Nodes on the longest path: T∞."""
    depth: dict[str, int] = {}
    for name, node in program.items():
        depth[name] = 1 + max((depth.get(x, 0) for x in node.inputs), default=0)
    return max(depth.values())


def steps(program: Table_, workers: int) -> int:
    """Units of time that workers take who start whatever nodes are ready: T_p."""
    done: set[str] = set()
    waiting, time = list(program), 0
    while waiting:
        ready = [
            n for n in waiting if all(x in done or x not in program for x in program[n].inputs)
        ]
        now = set(ready[:workers])
        waiting = [n for n in waiting if n not in now]
        done |= now
        time += 1
    return time


def _random_order(program: Table_, generator: torch.Generator) -> list[str]:
    order: list[str] = []
    while len(order) < len(program):
        ready = [
            n for n, node in program.items()
            if n not in order and all(x in order or x not in program for x in node.inputs)
        ]  # fmt: skip
        order.append(ready[int(torch.randint(len(ready), (), generator=generator))])
    return order


def _same(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


def _backwards(program: Table_, given: Mapping[str, Tensor]) -> Result:
    """How far the gradients of the three schedules are apart, and how parallel the graph is."""
    leaves = {name: x.clone().requires_grad_() for name, x in given.items()}
    *_, last = program
    loss = in_order(program, list(program), leaves)[last].sum()
    found = [dict(gt.backward(loss, names=leaves, schedule=s)) for s in SCHEDULES]
    largest = max(float(g.abs().max()) for g in found[0].values())
    apart = max(float((g[n] - found[0][n]).abs().max()) for g in found for n in found[0])
    graph = gt.graph(loss, names=leaves)
    users: dict[int, list[int]] = {}
    for edge in graph.edges:
        if edge.producer is not None:
            users.setdefault(edge.producer, []).append(edge.consumer)
    depth: dict[int, int] = {}
    for at in _from_root(users, len(graph.operators)):
        depth[at] = 1 + max((depth[user] for user in users.get(at, ())), default=0)
    return {
        "apart": apart / largest if largest else 0.0,
        "most_users": max(map(len, users.values()), default=0),
        "backward_nodes": len(depth),
        "backward_longest": max(depth.values()),
    }


def _from_root(users: Mapping[int, Sequence[int]], number: int) -> list[int]:
    """Operators, each after all its users."""
    order: list[int] = []
    placed: set[int] = set()
    while len(order) < number:
        ready = [
            at for at in range(number) if at not in placed and placed.issuperset(users.get(at, ()))
        ]
        order += ready
        placed.update(ready)
    return order


# What came out -----------------------------------------------------------------------------------


def conclude(rows: Sequence[Row]) -> Findings:
    """Whether order matters, and how many workers are of use."""
    if not rows:
        return Findings("")
    facts = _facts(rows)
    lines = tuple(
        (
            row.cell["kind"] + (f" {row.cell['seed']}" if row.cell["kind"] == "drawn" else ""),
            row.result["nodes"],
            row.result["longest"],
            *(row.result["steps"][str(p)] for p in WORKERS),
            round(row.result["nodes"] / row.result["longest"], 2),
            row.result["backward_nodes"],
            row.result["backward_longest"],
            row.result["apart"],
        )
        for row in rows
    )
    workers = (f"steps, {p} workers" for p in WORKERS)
    back = ("nodes back", "longest path back", "schedules differ by")
    columns = ("program", "nodes", "longest path", *workers, "nodes ÷ path", *back)
    note = (
        "a step is one node of each worker; the difference of gradients is a share of the largest"
    )
    table = Table("Parallel dataflow: steps by number of workers", columns, lines, note)
    return Findings(_sentence(facts), (table,), (_plot(rows),), facts)


def _facts(rows: Sequence[Row]) -> dict[str, Any]:
    results = [row.result for row in rows]
    bounds = [
        max(-(-r["nodes"] // p), r["longest"])
        <= r["steps"][str(p)]
        <= r["nodes"] / p + r["longest"] * (1 - 1 / p)
        for r in results
        for p in WORKERS
    ]
    kinds = {row.cell["kind"] for row in rows}
    example = [r for row, r in zip(rows, results) if row.cell["kind"] == "R(P,Q)"]
    return {
        "different": sum(r["different"] for r in results),
        "executions": sum(r["orders"] + row.cell["runs"] for row, r in zip(rows, results)),
        "bounded": all(bounds),
        "apart": max(r["apart"] for r in results),
        "apart_of_two": max((r["apart"] for r in results if r["most_users"] <= 2), default=0.0),
        "orders_of_example": example[0]["orders"] if example else None,
        "orders_by_hand": comb(4, 2),
        "parallel": {kind: _numbers(student(_parallel(rows, kind))) for kind in sorted(kinds)},
    }


def _parallel(rows: Sequence[Row], kind: str) -> list[float]:
    some = [row.result for row in rows if row.cell["kind"] == kind]
    return [result["nodes"] / result["longest"] for result in some]


def _numbers(found: Interval) -> list[float | None]:
    """An interval as JSON; of a program that is not drawn, its ends are not known."""
    return [x if isfinite(x) else None for x in found]


def _sentence(facts: Mapping[str, Any]) -> str:
    most = sorted(facts["parallel"].items())
    gains = ", ".join(f"{kind} {with_interval(each, '.1f')}" for kind, each in most)
    orders = facts["orders_of_example"]
    found = f" (of R(P,Q) all {orders} of {facts['orders_by_hand']} orders)" if orders else ""
    some = "all the same bits" if not facts["different"] else f"{facts['different']} DIFFER"
    bound = "within" if facts["bounded"] else "NOT within"
    return (
        f"Parallel dataflow: {facts['executions']:,} executions in other topological orders and by "
        f"threads{found}: {some}. Any number of workers makes programs faster by nodes ÷ longest "
        f"path at most: {gains}; counted steps are {bound} the bounds of Brent and Graham. "
        + _backward_sentence(facts)
    )


def _backward_sentence(facts: Mapping[str, Any]) -> str:
    if not facts["apart"] > 0:
        return "Backwards, too, gradients of our schedules are the same to the bit."
    two = "are the same" if not facts["apart_of_two"] > 0 else "DIFFER, too,"
    return (
        f"Backwards the order is seen: gradients of our schedules differ by up to "
        f"{facts['apart']:.1g} of the largest; they {two} where no value has more than two users."
    )


def _plot(rows: Sequence[Row]) -> Plot:
    series = []
    for row in rows:
        if row.cell["seed"]:
            continue
        found = row.result["steps"]
        speed = [row.result["nodes"] / found[str(p)] for p in WORKERS]
        series.append(Series(row.cell["kind"], list(WORKERS), speed))
    series.append(Series("as many as workers", list(WORKERS), list(WORKERS), style="dashed"))
    title = "Parallel dataflow: speed by number of workers"
    return Plot("dataflow", title, "workers", "nodes a step", tuple(series))
