"""Files that somebody changed: read, or refused with GradtraceError, whatever it was."""

from __future__ import annotations

import json
import os
import random
import time
from pathlib import Path
from typing import Any

import mutants
import pytest
import torch
from gradtrace.runs import history
from gradtrace.runs.writer import Writer

import gradtrace as gt
from gradtrace.errors import GradtraceError
from gradtrace.io import container, schemas, strict_json, tuning
from gradtrace.io.validation import SchemaMismatch

COUNT = {
    "trace": 40,
    "view": 25,
    "influence": 60,
    "run": 40,
    "decompose": 20,
    "incident": 60,
}
"""Of each kind, here; ``python tests/mutants.py`` tries thousands."""


@pytest.mark.parametrize("kind", mutants.KINDS)
def test_mutants_are_read_or_refused(tmp_path: Path, kind: str) -> None:
    made = mutants.KINDS[kind].make(tmp_path)
    for blob in made:
        mutants.KINDS[kind].read(blob, tmp_path)  # as they are they are read
    found = [mutants.tried(kind, made, number, tmp_path) for number in range(COUNT[kind])]
    assert [trial for trial in found if trial.told not in ("read", "refused")] == []
    assert {trial.told for trial in found} >= {"refused"}


def test_shapes_have_limits() -> None:
    schemas.SHAPE([1] * 64)
    with pytest.raises(SchemaMismatch, match="65 items"):
        schemas.SHAPE([1] * 65)


# Bombs -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "made.gradtrace"
    mutants.traced().save(path, sample=5)
    return path


def put(meta: dict[str, Any], tensors: dict[str, Any], *path: Any, value: Any) -> None:
    at: Any = meta
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value


HUGE = 2**100_000
BOMBS: dict[str, tuple[tuple[Any, ...], Any]] = {
    "fraction of text": (("tables", "", "rows", 0, "count", 0), ["1e99999999"]),
    "fraction of texts": (("tables", "", "rows", 0, "gradient", 0), ["1e99999999", "1"]),
    "huge fraction": (("tables", "", "rows", 0, "count", 0), [HUGE, HUGE - 1]),
    "denominator 0": (("tables", "", "rows", 0, "count", 0), [1, 0]),
    "denominator below 0": (("tables", "", "rows", 0, "count", 0), [-1, -1]),
    "through over eligible": (("tables", "", "rows", 0, "count", 0), [10**9, 1]),
    "four moments": (("tables", "", "rows", 0, "count"), [[0, 1]] * 4),
    "no sums": (("tables", "", "rows", 0, "count"), [[1, 1], [2, 1], [1, 1], [2, 1], [9, 1]]),
    "half an element": (("tables", "", "rows", 0, "count", 0), [1, 2]),
    "own below 0": (("tables", "", "rows", 0, "own"), -1),
    "own a bool": (("tables", "", "rows", 0, "own"), True),
    "a shape of many dimensions": (("kinds", 0, "shape"), [1] * 500_000),
    "a shape below 0": (("kinds", 0, "shape"), [-1]),
    "a shape of floats": (("kinds", 0, "shape"), [1.0]),
    "pairs without end": (("pairs",), HUGE),
    "pairs a float": (("pairs",), 1.5),
    "a rule of nobody": (("rule",), "\x1b[31m"),
    "notes a text": (("notes",), "note"),
    "notes of numbers": (("notes",), [1]),
    "aliases a list": (("aliases",), []),
    "aliases elsewhere": (("aliases", "x"), "nowhere"),
    "leaves twice": (("leaves",), ["a", "a"]),
    "modules of numbers": (("modules", "mix"), 3),
    "a depth too large": (("flow", "profile", 0, "depth"), 2**70),
    "a norm below 0": (("flow", "profile", 0, "norm"), -1.0),
    "a field too many": (("flow", "profile", 0, "__class__"), 1),
    "an infinite loop": (("flow", "findings"), {"a": 1}),
    "depth": (("modules", "mix"), mutants.DEEP[0][0]),
}


@pytest.mark.parametrize(("where", "value"), BOMBS.values(), ids=BOMBS)
def test_bombs_are_refused(tmp_path: Path, saved: Path, where: Any, value: Any) -> None:
    contents = container.read(saved)
    put(contents.meta, contents.tensors, *where, value=value)
    if value is mutants.DEEP[0][0]:
        with pytest.raises(GradtraceError, match="more than 100 levels"):
            container.write(tmp_path / "x", contents.kind, contents.meta, contents.tensors)
        return
    container.write(tmp_path / "x", contents.kind, contents.meta, contents.tensors)
    with pytest.raises(
        container.BadFile, match="is damaged: its contents do not fit together"
    ) as told:
        gt.load(tmp_path / "x")
    assert str(told.value).isprintable() and len(str(told.value)) < 600 + len(str(tmp_path))


def _elements(t: dict[str, Any]) -> None:
    t["steps"][0, 1] = 10**6


def _negative(t: dict[str, Any]) -> None:
    t["steps"][-1, 0] = -1


def _lengths(t: dict[str, Any]) -> None:
    t["lengths"][0], t["lengths"][1] = -1, t["lengths"][0] + t["lengths"][1] + 1


def _overflow(t: dict[str, Any]) -> None:
    t["lengths"] = torch.tensor([2**62] * 4 + t["lengths"].tolist()[4:])


TENSORS: dict[str, Any] = {
    "element outside": _elements,
    "negative kind": _negative,
    "negative length": _lengths,
    "lengths that wrap": _overflow,
    "pair outside": lambda t: t["pairs"].fill_(10**6),
    "steps of floats": lambda t: t.update(steps=t["steps"].double()),
    "one column": lambda t: t.update(steps=t["steps"][:, :1].clone()),
    "numbers of ints": lambda t: t.update(numbers=t["numbers"].long()),
    "gradient of ints": lambda t: t.update({"gradient 0": t["gradient 0"].long()}),
    "another shape": lambda t: t.update({"gradient 0": t["gradient 0"].T.clone()}),
    "a tensor more": lambda t: t.update({"gradient 99": torch.ones(1)}),
    "a tensor less": lambda t: t.pop("gradient 0"),
    "a view of floats": lambda t: t.update(view=t["view"].float()),
    "half a view": lambda t: t.update(view=t["view"][: len(t["view"]) // 2].clone()),
    "an empty view": lambda t: t.update(view=t["view"][:0].clone()),
}


@pytest.mark.parametrize("change", TENSORS.values(), ids=TENSORS)
def test_tensors_that_do_not_fit(tmp_path: Path, saved: Path, change: Any) -> None:
    contents = container.read(saved)
    change(contents.tensors)
    container.write(tmp_path / "x", contents.kind, contents.meta, contents.tensors)
    with pytest.raises(container.BadFile, match="its contents do not fit together"):
        gt.load(tmp_path / "x")


def test_json_that_would_take_gigabytes_is_not_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its size in memory is known from its characters, before anything is made of it."""
    monkeypatch.setattr(json, "loads", lambda *_, **__: pytest.fail("parsed"))
    for bomb in ("[" + "[]," * 3_000_000 + "1]", '{"a":{}}' * 1_200_000, "1," * 7_000_000):
        with pytest.raises(
            SchemaMismatch, match="would take more than 400,000,000 bytes of memory"
        ):
            strict_json.parse(bomb)


@pytest.mark.parametrize(
    "text",
    [
        "[[],[],[],[[]]]" * 1,
        json.dumps([[[]] * 2000] * 50),
        json.dumps([{str(n): n + 1000 for n in range(2000)}] * 30),
        json.dumps([{"a": {}}] * 50_000),
        json.dumps([n + 1000 for n in range(200_000)]),
        json.dumps([f"text {n}" for n in range(100_000)]),
        json.dumps(["é" * 100_000, "🙂" * 100_000]),
    ],
    ids=["small", "lists", "keys", "dicts", "numbers", "texts", "wide"],
)
def test_the_memory_of_json_is_foreseen(text: str) -> None:
    import tracemalloc

    tracemalloc.start()
    try:
        found = strict_json.parse(text)
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert found is not None and held <= strict_json.weight(text) + 10_000


def test_what_cannot_be_read_again_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "JSON_MAX_BYTES", 10_000)
    with pytest.raises(container.BadFile, match="save fewer or smaller tables"):
        container.write(tmp_path / "x", "trace", {"x": [[]] * 1000}, {})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("word", ["NaN", "Infinity", "-Infinity", '{"a":1,"a":1}', "1" * 5000, "["])
def test_json_is_strict(word: str) -> None:
    with pytest.raises(SchemaMismatch):
        strict_json.parse(f'{{"x": {word}}}')
    with pytest.raises(SchemaMismatch):
        strict_json.parse(b'{"x": "\xff"}')


def test_digits_are_looked_at_once() -> None:
    """A search for many of them that begins anew at each takes 4 s for a megabyte of this."""
    text = ("9" * (tuning.MAX_DIGITS - 1) + "a") * 2000
    begun = time.process_time()
    assert strict_json.parse(f'{{"a": "{text}"}}') == {"a": text}
    assert time.process_time() - begun < 8
    for before in (0, 1, 1999, 2000, 2001, 3999):
        with pytest.raises(SchemaMismatch, match="an integer has 4,001 digits"):
            strict_json.parse("[" + " " * before + "9" * 4001 + "]")
    assert strict_json.parse("[" + "9" * 4000 + "]") == [10**4000 - 1]


# Runs --------------------------------------------------------------------------------------------

BEGIN = {"kind": "run", "schema_version": 1, "step": 0, "settings": {}, "versions": {}}


@pytest.mark.parametrize("line", ["", " ", "x", "[]", "{}"])
def test_lines_that_say_nothing_are_not_read_for_ever(line: str) -> None:
    lines = json.dumps(BEGIN) + "\n" + f"{line}\n" * 5_000_000
    begun = time.process_time()
    with pytest.raises(GradtraceError, match=r"damaged in line 2 \(1,000 lines say nothing"):
        history.parse(lines.encode(), "it")
    assert time.process_time() - begun < 8


def test_a_file_is_read_line_by_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file without ends of lines may be larger than memory: this one has a terabyte of zeros."""
    monkeypatch.setattr("gradtrace.io.tuning.LINE_MAX_BYTES", 1000)
    run = tmp_path / "run.jsonl"
    run.touch()
    os.truncate(run, 2**40)
    for call in (lambda: history.read(run), lambda: Writer(run, {})):
        with pytest.raises(GradtraceError, match=r"jsonl.*more than 1,000 bytes in line 1"):
            call()


def test_steps_in_any_order_are_put_in_order() -> None:
    """Whatever the order; each that is out of order moves none of the others."""
    draw = random.Random(0)
    for _ in range(50):
        found, plain = history.Timeline[int](), dict[int, int]()
        for n in range(60):
            step = draw.randrange(40)
            if draw.random() < 0.1:
                gone = [each for each in plain if each >= step]
                assert found.cut(step) == len(gone)
                plain = {each: plain[each] for each in plain if each < step}
            else:
                found.put(step, n)
                plain[step] = n
            assert found.steps == tuple(sorted(plain))
            assert found.all() == tuple(plain[each] for each in sorted(plain))
    begun = time.process_time()
    for step in range(400_000, 0, -1):
        found.put(step + 100, 0)
    assert time.process_time() - begun < 8


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rows", [[20, 0, [["1e99999999"], [0, 1], [0, 1], [0, 1], [0, 1]], [[0, 1]] * 5]]),
        ("rows", [[20, 0, 5.0, 4.0, 0.0, 0.0]]),
        ("rows", [[20, 0, 1.0, "inf", 0.0, 0.0]]),
        ("rows", [[-1, 0, 1.0, 2.0, 0.0, 0.0]]),
        ("rows", [[True, 0, 1.0, 2.0, 0.0, 0.0]]),
        ("rows", [[1, 0, 1.0]]),
        ("weight", "heavy"),
        ("rule", "\x1b[31m"),
        ("pairs", 10**30),
        ("notes", [1]),
    ],
)
def test_tables_of_a_run_are_checked(key: str, value: Any) -> None:
    table = {"rows": [[1, 0, 1.0, 2.0, 0.5, 0.5]], "pairs": 1, "weight": "count", "rule": "greedy"}
    step: dict[str, Any] = {"kind": "step", "step": 0, "loss": 1.0, "verdict": "", "norms": {}}
    step |= {"scale": 1.0, "seconds": 0.1, "share": 0.1, "notes": []}
    lines: list[Any] = [BEGIN, {"kind": "names", "names": ["a"]}, step]

    def parsed() -> history.History:
        return history.parse(b"".join(json.dumps(x).encode() + b"\n" for x in lines), "it")

    step["influence"] = {**table, "notes": [], "interrupted": False}
    assert parsed().components == ("a",)
    step["influence"][key] = value
    with pytest.raises(GradtraceError, match="damaged in line 3"):
        parsed()


@pytest.mark.parametrize("second", ["nan", "inf", -1.0, "1", True, [], 10**400])
def test_times_of_a_run_are_checked(second: Any) -> None:
    times = {"kind": "times", "step": 0, "seconds": [0.5, None, second]}
    lines = "".join(json.dumps(line) + "\n" for line in (BEGIN, times))
    with pytest.raises(GradtraceError, match="damaged in line 2"):
        history.parse(lines.encode(), "it")


@pytest.mark.parametrize("version", ["\x1b[31m", 10**400, True, None, [], 1.5])
def test_versions_that_are_none(version: Any) -> None:
    line = json.dumps({"kind": "run", "schema_version": version}).encode() + b"\n"
    with pytest.raises(GradtraceError) as told:
        history.parse(line, "it")
    assert str(told.value).isprintable() and len(str(told.value)) < 300


# Journals ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        lambda meta: meta.pop("settings"),
        lambda meta: meta.pop("influence"),
        lambda meta: meta.update(settings=None),
        lambda meta: meta.update(influence=None),
        lambda meta: meta.update(batches={}),
        lambda meta: meta.update(batches={"": "-0x7"}),
        lambda meta: meta.update(batches={"": "0x7" + "f" * 20}),
        lambda meta: meta.update(batches={"5/2": "0x7"}),
        lambda meta: meta.update(batches=10**30),
        lambda meta: meta["influence"].update(pairs=1),
        lambda meta: meta["influence"]["rows"].append(meta["influence"]["rows"][0]),
        lambda meta: meta["influence"]["rows"][0].update(count=[[1, 0]] * 5),
        lambda meta: meta["influence"]["rows"][0].update(unreached=-5),
    ],
)
def test_journals_are_checked(tmp_path: Path, change: Any) -> None:
    mutants.counted(tmp_path / "x")
    meta = container.read(tmp_path / "x").meta
    schemas.JOURNALS["influence"](meta)
    change(meta)
    container.write(tmp_path / "x", "influence", meta, {})
    with pytest.raises(container.BadFile, match="its contents do not fit together"):
        mutants.counted(tmp_path / "x")


@pytest.mark.parametrize(
    "change",
    [
        lambda table: table.update(pairs=7),
        lambda table: table["rows"].pop(0),
        lambda table: table["rows"][0].update(name="mixed"),
        lambda table: table["rows"][0].update(own=1),
        lambda table: table["coverage"]["parts"].pop(),
        lambda table: table.update(weight="gradient"),
        lambda table: table.update(interrupted=True),
    ],
)
def test_journals_with_other_counts_are_refused(tmp_path: Path, change: Any) -> None:
    """Counts that could be, but were not made: no schema tells them from others."""
    mutants.counted(tmp_path / "x", mutants.DATA[:2])
    meta = container.read(tmp_path / "x").meta
    change(meta["influence"])
    schemas.JOURNALS["influence"](meta)
    container.write(tmp_path / "x", "influence", meta, {})
    before = (tmp_path / "x").read_bytes()
    with pytest.raises(GradtraceError, match=r"x was changed since it was written.*delete it"):
        mutants.counted(tmp_path / "x")
    assert (tmp_path / "x").read_bytes() == before


# Views -------------------------------------------------------------------------------------------


def test_a_view_that_leads_in_a_circle_is_refused(tmp_path: Path, saved: Path) -> None:
    """A page would follow it for ever."""
    from dataclasses import replace

    from gradtrace.report.encode import loaded
    from gradtrace.report.encode import saved as packed

    view = loaded(container.read(saved).tensors["view"])
    following = view.forest.next.copy()
    following[-1] = 0
    with pytest.raises(SchemaMismatch, match="forest paths lead in a circle"):
        loaded(packed(replace(view, forest=replace(view.forest, next=following))))


def test_columns_that_share_bytes_are_refused() -> None:
    """Few bytes would become many when they are written again."""
    from gradtrace.report import encode

    text = b'[{"$":"u1","o":0,"n":8},{"$":"u1","o":0,"n":8}]'
    data = len(text).to_bytes(4, "little") + text
    with pytest.raises(SchemaMismatch, match="not where it should be"):
        encode.read(data + bytes(-len(data) % 8) + bytes(8))


def test_files_of_schema_1_are_read(tmp_path: Path, saved: Path) -> None:
    """They have no view; as an older gradtrace wrote them, by the safetensors library."""
    from hashlib import sha256

    from safetensors.torch import save

    contents = container.read(saved)
    contents.tensors.pop("view")
    names = {f"t{n}": name for n, name in enumerate(contents.tensors)}
    document = {"schema": 1, "sha256": "0" * 64, "kind": "trace", "names": names}
    text = json.dumps({**document, "meta": container._encoded(contents.meta)})
    tensors = {key: contents.tensors[name].clone() for key, name in names.items()}
    blob = save(tensors, {"gradtrace": text})
    (tmp_path / "x").write_bytes(blob.replace(b"0" * 64, sha256(blob).hexdigest().encode(), 1))
    found, now = gt.load(tmp_path / "x"), gt.load(saved)
    assert found.influence() == now.influence() and list(found.paths()) == list(now.paths())
    with pytest.raises(GradtraceError, match="holds no view"):
        found.report(tmp_path / "x.html")


# Files of triggers -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def incident(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("incident")
    (folder / "made.gradtrace").write_bytes(mutants.make_incidents(folder)[1])
    return folder / "made.gradtrace"


def test_a_tensor_named_often_is_copied_once(tmp_path: Path, incident: Path) -> None:
    contents = container.read(incident)
    one = {"tensor": 1, "device": "cpu", "grad": True, "channels_last": True}
    contents.meta["data"] = {"list": [{"list": [one] * 1000}, {"list": []}, None]}
    container.write(tmp_path / "x", contents.kind, contents.meta, contents.tensors)
    batch = gt.load(tmp_path / "x").batch
    assert len(batch) == 1000 and len({each.data_ptr() for each in batch}) == 1


def test_an_incident_is_printed_without_escapes(tmp_path: Path, incident: Path) -> None:
    contents = container.read(incident)
    contents.meta["words"] = "a\x1b]0;t\x07\nb\u202e"
    container.write(tmp_path / "x", contents.kind, contents.meta, contents.tensors)
    told = str(gt.load(tmp_path / "x")).splitlines()
    assert all(map(str.isprintable, told)) and told[-2:] == ["a\\x1b]0;t\\x07", "b\\u202e"]
