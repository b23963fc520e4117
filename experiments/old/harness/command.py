"""Implements ``gradtrace experiment``: from the command's options to runs."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from typing import Any

from gradtrace.distributed.process_group import ProcessGroup, joined, launched
from gradtrace.errors import GradtraceError, RankFailed, did_you_mean, needs
from gradtrace.experiments.harness import drawing, results
from gradtrace.experiments.harness.code import refresh
from gradtrace.experiments.harness.findings import Experiment
from gradtrace.experiments.harness.loading import ExperimentSource, about, load
from gradtrace.experiments.harness.published_rows import unpacked
from gradtrace.experiments.harness.publishing import document, gather, publish
from gradtrace.experiments.harness.runner import Outcome, RunPlan, Say, recomputed
from gradtrace.experiments.harness.runner import run as run_plan
from gradtrace.experiments.harness.table import available

OUT = Path("gradtrace-experiments")
NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,79}")
NO_FIGURES = (
    f"LEFT OUT: figures. {needs('Drawing them', 'matplotlib')}; then give the same command again "
    "to draw what is measured"
)


@dataclass(frozen=True)
class ExperimentOptions:
    """The options of the command."""

    quick: bool = False
    seeds: int | None = None
    workers: int | None = None
    out: Path | None = None
    settings: tuple[str, ...] = ()
    text: Path | None = None
    docs: Path | None = None
    restart: bool = False
    ray: bool = False
    name: str | None = None
    rows: tuple[Path, ...] = ()

    @property
    def form(self) -> str:
        """The name of the form: quick or full."""
        return "quick" if self.quick else "full"

    @property
    def folder(self) -> Path:
        """The output folder; by default, each form has its own, and what is made of rows."""
        return self.out or OUT / ("again" if self.rows else self.form)


@dataclass
class ExperimentOutcome:
    """Results by name, errors by name, and the page that shows them."""

    page: Path
    spoken: bool = True  # False on ranks that do not conclude
    found: dict[str, dict[str, Any]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


def listed() -> list[dict[str, str]]:
    """The name and the question of every experiment."""
    sources = [ExperimentSource(name, place) for name, place in available().items()]
    return [
        {"name": one.name, "question": about(load(one), one.name)["question"]} for one in sources
    ]


def sources(name: str | None, every: bool, rows: Sequence[Path] = ()) -> list[ExperimentSource]:
    """The experiments to run: one by its name or file, or all. Rows say whose they are, so with
    these the name of their page will do, or none.
    """
    known = available()
    if rows and rows[0].is_file() and not every and name not in known:
        ran = unpacked(rows[0]).ran
        name = ran["experiment"] if name in (None, ran["name"]) else name
    if every == (name is not None):
        raise GradtraceError("give the name of an experiment, or --all, or --list")
    if name is None:
        return [ExperimentSource(*item) for item in known.items()]
    if name in known:
        return [ExperimentSource(name, known[name])]
    if name.endswith(".py"):
        return [ExperimentSource.of(Path(name))]
    near = did_you_mean(name, known, 99)
    raise GradtraceError(
        f"there is no experiment {name!r}{near} (one of your own is given by its file: mine.py)"
    )


def run(
    chosen: Iterable[ExperimentSource], asked: ExperimentOptions, say: Say
) -> ExperimentOutcome:
    """Run one or more experiments; of several, a failed one does not stop the others."""
    chosen = list(chosen)
    _check_name(asked.name, chosen)
    _check_rows(asked.rows, chosen)
    if not drawing.possible():
        say(NO_FIGURES)
    try:
        with launched(), joined() as ranks:
            return _run(chosen, asked, say, ranks)
    except RankFailed as error:
        raise GradtraceError(
            f"{error}; rows that are written are kept, and the same command goes on from there"
        ) from error


def _run(
    chosen: list[ExperimentSource], asked: ExperimentOptions, say: Say, ranks: ProcessGroup
) -> ExperimentOutcome:
    done = ExperimentOutcome(asked.folder, spoken=ranks.first)
    plans = [plan(source, asked, ranks) for source in chosen]
    for one in plans:
        try:
            _one(one, asked, done, say if ranks.first else _quiet)
        except GradtraceError as error:
            if len(plans) == 1:
                raise
            done.failed[one.title] = str(error)
            say(f"{one.title} FAILED: {error}")
    return done


def _one(one: RunPlan, asked: ExperimentOptions, done: ExperimentOutcome, say: Say) -> None:
    if asked.rows:
        say(f"{one.title}, of the rows in {', '.join(map(str, asked.rows))}")
        outcome: Outcome | None = recomputed(one.source, *asked.rows)
    else:
        say(f"{one.title} ({one.form})")
        outcome = run_plan(one, say)
    if outcome is None:
        return
    folder = one.out / results.name(outcome.data)
    done.found[results.name(outcome.data)] = outcome.data
    done.page = publish(outcome.data, outcome.plots, folder, outcome.rows)
    every = gather(one.out)
    if len(done.found) > 1:
        done.page = every
    if asked.docs is not None:
        document(outcome.data, folder, asked.docs)


def _check_name(name: str | None, chosen: list[ExperimentSource]) -> None:
    """Check ``--name``, which becomes the name of a folder and a page, and applies to one run."""
    if name is None:
        return
    if len(chosen) > 1:
        raise GradtraceError("--name is of one experiment, not of --all")
    if not NAME.fullmatch(name):
        raise GradtraceError(
            f"--name {name!r}: write small letters, digits and hyphens, such as "
            f"--name {chosen[0].name}-mine"
        )
    if name != chosen[0].name and name in available():
        raise GradtraceError(f"--name {name} is another experiment's name")


def _check_rows(rows: Sequence[Path], chosen: list[ExperimentSource]) -> None:
    """Check ``--rows``, which is of one experiment."""
    if rows and len(chosen) > 1:
        raise GradtraceError("--rows is of one experiment, not of --all")
    for path in rows:
        if not path.is_file():
            raise GradtraceError(f"there is no file {str(path)!r} (in {Path.cwd()})")


def _quiet(line: str) -> None:
    """Print nothing: for ranks other than the first."""


def plan(source: ExperimentSource, asked: ExperimentOptions, ranks: ProcessGroup) -> RunPlan:
    """The plan of a run, from an experiment and the command's options."""
    refresh(source)
    experiment = load(source)
    seeds = experiment.SEEDS.quick if asked.quick else experiment.SEEDS.full
    settings = _settings(experiment, source.name, asked)
    return RunPlan(
        source=source,
        form=asked.form,
        settings=settings,
        seeds=asked.seeds or seeds,
        out=asked.folder,
        workers=asked.workers,
        ray=asked.ray,
        restart=asked.restart,
        ranks=ranks,
        name=asked.name or "",
        command=_command(source, asked, _changed(settings, experiment, asked.quick)),
    )


def _changed(settings: Mapping[str, Any], experiment: Experiment, quick: bool) -> dict[str, Any]:
    """The settings that differ from the form's defaults."""
    own = json.loads(json.dumps(dict(experiment.QUICK if quick else experiment.FULL)))
    return {key: value for key, value in settings.items() if value != own[key]}


def _command(source: ExperimentSource, asked: ExperimentOptions, changed: Mapping[str, Any]) -> str:
    """The command that reproduces the results, without options on workers and folders."""
    words = ["gradtrace", "experiment", source.typed]
    words += ["--quick"] if asked.quick else []
    words += ["--seeds", str(asked.seeds)] if asked.seeds else []
    for key, value in changed.items():
        if key == "text" and asked.text is not None:
            words += ["--text", str(value)]
        else:
            words += ["--set", f"{key}={value if isinstance(value, str) else json.dumps(value)}"]
    words += ["--name", asked.name] if asked.name else []
    return shlex.join(words)


def _settings(experiment: Experiment, name: str, asked: ExperimentOptions) -> dict[str, Any]:
    """The form's settings, changed by ``--set`` and ``--text``."""
    own = experiment.QUICK if asked.quick else experiment.FULL
    found: dict[str, Any] = json.loads(json.dumps(dict(own)))
    given = dict(_parsed(item) for item in asked.settings)
    if asked.text is not None:
        if not asked.text.is_file():
            raise GradtraceError(f"there is no text {str(asked.text)!r} (in {Path.cwd()})")
        given["text"] = str(asked.text)
    for key, value in given.items():
        if key not in found:
            what = "takes no --text" if key == "text" else f"has no setting {key!r}"
            raise GradtraceError(f"{name} {what}{did_you_mean(key, found, 99)}")
        _check(key, value, found[key])
        found[key] = value
    return found


def _parsed(item: str) -> tuple[str, Any]:
    """Parse ``key=value``; a value that is not JSON is text."""
    key, equals, value = item.partition("=")
    if not equals or not key:
        raise GradtraceError(f"--set {item!r}: write --set key=value, such as --set rounds=9")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


def _check(key: str, value: Any, default: Any) -> None:
    """Check that a setting has the type of its default; any type if that is null."""
    if default is not None and _kind(value) != _kind(default):
        raise GradtraceError(
            f"--set {key}={json.dumps(value)}: {key} is {_kind(default)}, as in "
            f"{key}={json.dumps(default)}"
        )


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "true or false"
    if isinstance(value, Real):
        return "a number"
    if isinstance(value, str):
        return "a text"
    return "null" if value is None else "a list" if isinstance(value, list) else "a dict"
