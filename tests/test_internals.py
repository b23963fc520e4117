"""A torch whose insides have changed is refused, with what has changed."""

from __future__ import annotations

import ast
import importlib
import re
import types
from pathlib import Path
from typing import Any

import fresh
import pytest
import torch
from torch.utils import checkpoint
from torch.utils.hooks import RemovableHandle

from gradtrace.autodiff import hooks, pass_scope
from gradtrace.errors import GradtraceError, IncompatibleTorch
from gradtrace.pytorch import internals

MUL, SPLIT, BORN = torch.Tensor.__mul__, torch.split, RemovableHandle.__init__


def _uncounted(self: Any, *args: Any, **kwargs: Any) -> None:
    count = RemovableHandle.next_id
    BORN(self, *args, **kwargs)
    RemovableHandle.next_id = count


Patch = tuple[Any, str, Any]
CHANGES: dict[str, tuple[Patch, str]] = {
    "edges in another order": (
        (torch.Tensor, "__mul__", lambda x, y: MUL(y, x) if isinstance(y, torch.Tensor) else x + y),
        "for each argument, in order",
    ),
    "another formula": (
        (torch.Tensor, "__mul__", lambda x, y: MUL(MUL(x, y), 2)),
        "by the formula of its operator",
    ),
    "metadata of something else": (
        (torch, "split", lambda x, sizes, dim: SPLIT(x, sizes[::-1], dim)),
        "what split says of its outputs",
    ),
    "numbers that stand still": (
        (torch.autograd, "_get_sequence_nr", lambda: 0),
        "nodes made one after the other have the numbers",
    ),
    "hooks without a count": (
        (RemovableHandle, "__init__", _uncounted),
        "the count of hooks after",
    ),
    "a table without the hook": (
        (RemovableHandle, "__init__", lambda self, table, **kw: BORN(self, {}, **kw)),
        "takes the next number",
    ),
    "Python functions of another type": (
        (torch.autograd.function, "BackwardCFunction", type("Other", (), {})),
        "are Python's",
    ),
    "versions that stay as they are": (
        (torch._C._autograd, "_unsafe_set_version_counter", lambda tensors, versions: None),
        "the version that was set is 1, not 0",
    ),
    "another number for no pass": (
        (torch._C, "_current_graph_task_id", lambda: 0),
        "the running backward pass",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_another_meaning_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    patch, text = CHANGES[name]
    monkeypatch.setattr(*patch)
    with pytest.raises(IncompatibleTorch) as caught:
        internals.check()
    monkeypatch.undo()
    told = str(caught.value)
    assert text in told and f"torch {torch.__version__}" in told and internals.TESTED in told
    internals.check()


def test_versions_are_set_one_by_one_in_torch_2_6(monkeypatch: pytest.MonkeyPatch) -> None:
    setter, seen = torch._C._autograd._unsafe_set_version_counter, []

    def one(tensor: torch.Tensor, version: int) -> None:
        if not isinstance(tensor, torch.Tensor):
            raise TypeError("incompatible function arguments")
        seen.append(version)

    monkeypatch.setattr(torch._C._autograd, "_unsafe_set_version_counter", one)
    internals.set_version(torch.ones(2), 3)
    assert seen == [3]
    monkeypatch.setattr(torch._C._autograd, "_unsafe_set_version_counter", setter)
    x = torch.ones(2)
    internals.set_version(x, 3)
    assert x._version == 3


@pytest.mark.parametrize("name", internals.NAMES)
def test_a_name_that_is_gone_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in {name, internals.INSTEAD.get(name, name)}:
        *folder, last = path.split(".")
        owner: Any = torch
        for part in folder:
            owner = getattr(owner, part)
        monkeypatch.delattr(owner, last, raising=False)
    told = internals.missing()
    assert any(f"torch.{name} is gone, which {internals.NAMES[name]} needs" in t for t in told)
    with pytest.raises(IncompatibleTorch, match=r"(?s)whose autograd has changed.*newer gradtrace"):
        internals.check()


def test_every_private_name_of_torch_is_listed() -> None:
    """What the sources read of ``torch._C`` and ``torch.autograd._...`` is checked at import."""
    root = Path(internals.__file__).parents[1]
    text = "\n".join(path.read_text() for path in root.rglob("*.py") if path.name != "internals.py")
    used = set(re.findall(r"torch\.(_C\.\w+|autograd\._\w+|_foreach_\w+)", text))
    on_a_gpu = {"_C._cuda_getCurrentRawStream"}
    listed = {re.sub(r"(_C\.\w+)\..*", r"\1", name) for name in internals.NAMES}
    assert used - on_a_gpu <= listed, "list them in internals.NAMES, with what they are for"


WITH_A_WAY_ROUND = {
    "torch.backends.fp32_precision": "kernels.precision: torch 2.8 and older have allow_tf32 alone",
    "torch.backends.cudnn.conv": "the same",
    "torch._C._get_graph_exec_group": "passes: torch 2.9 and older count by uuid",
    "torch._C._set_graph_exec_group": "the same",
    "torch.utils.checkpoint.GraphExecGroup": "the same",
    "torch._C._cuda_getCurrentRawStream": "in builds for CUDA, which alone come to it",
    "torch.cuda._utils._nvrtc_compile": "kernels.cuda_launch: without it, plain torch on the GPU",
}


def test_every_name_of_torch_that_is_read_exists() -> None:
    """Of all sources, also those that run on a GPU or in a group: nothing that this torch lacks."""
    root = Path(internals.__file__).parents[1]
    paths = set().union(*(named(ast.parse(file.read_text())) for file in root.rglob("*.py")))
    assert len(paths) > 300
    lacking = {path for path in paths if not exists(path)}
    assert lacking <= WITH_A_WAY_ROUND.keys()


def named(tree: ast.AST) -> set[str]:
    """The names under ``torch`` that a source reads, in full."""
    short, found = {}, set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                short[name.asname or name.name.partition(".")[0]] = (
                    name.name if name.asname else name.name.partition(".")[0]
                )
        elif isinstance(node, ast.ImportFrom) and not node.level:
            for name in node.names:
                short[name.asname or name.name] = f"{node.module}.{name.name}"
                found.add(f"{node.module}.{name.name}")
    for node in ast.walk(tree):
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.insert(0, node.attr)
            node = node.value
        if parts and isinstance(node, ast.Name) and node.id in short:
            found.add(".".join([short[node.id], *parts]))
    return {path for path in found if path.startswith("torch.") and "tensorboard" not in path}


def exists(path: str) -> bool:
    """Whether it can be read, or imported; of values only the first name is looked at."""
    found: Any = torch
    parts = path.split(".")
    for end in range(2, len(parts) + 1):
        if not isinstance(found, (types.ModuleType, type)):
            return True
        try:
            found = getattr(found, parts[end - 1])
        except AttributeError:
            try:
                found = importlib.import_module(".".join(parts[:end]))
            except ImportError:
                return False
    return True


def test_importing_says_so_at_once() -> None:
    """Before any number is computed, and as the command line tells errors."""
    broken = "import torch; del torch.autograd._get_sequence_nr\n"
    script = (
        broken
        + "import gradtrace as gt\ntry: gt.watch\nexcept gt.errors.GradtraceError as e: print(e)"
    )
    done = fresh.python("-c", script, check=True)
    assert "torch.autograd._get_sequence_nr is gone" in done.stdout


def test_it_can_be_imported_anywhere() -> None:
    """Grad modes and default devices at the time of the import do not matter."""
    script = (
        "import torch\n"
        "with torch.no_grad(), torch.inference_mode(), torch.device('meta'):\n"
        "    import gradtrace.session\n"
        "x = torch.ones(2, requires_grad=True)\nprint(gradtrace.session.backward((x * x).sum()))"
    )
    done = fresh.python("-c", script, check=True)
    assert done.stdout == "{'leaf0': tensor([2., 2.])}\n"


def test_asking_leaves_nothing_behind() -> None:
    """The hooks that are tried are not taken for the user's; no random number is drawn."""
    state, watch = torch.get_rng_state(), hooks.HookWatch()
    internals.check()
    assert torch.equal(state, torch.get_rng_state())
    assert watch.clear_since() in (watch._sequence, hooks.NEVER)


# Before torch 2.10 -------------------------------------------------------------------------------


def test_an_older_torch_recomputes_once_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """There one number stands for one recomputation: within a pass it is the same."""
    monkeypatch.delattr(checkpoint, "GraphExecGroup", raising=False)
    monkeypatch.setattr(checkpoint, "uuid", types.ModuleType("uuid"), raising=False)
    with pass_scope.recomputed_once():
        first, second = (checkpoint.uuid.uuid4() for _ in range(2))
        with pass_scope.recomputed_once():
            inner = checkpoint.uuid.uuid4()
        assert checkpoint.uuid.uuid4() == first == second != inner
    assert checkpoint.uuid.uuid4() != first
    assert issubclass(IncompatibleTorch, GradtraceError)
