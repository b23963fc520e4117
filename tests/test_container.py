"""Files: what goes in comes out, nothing is half written, and nothing else is taken for one."""

from __future__ import annotations

import errno
import io
import json
import math
import os
import pickle
import re
import stat
import struct
import zipfile
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from thorough import few
from torch import Tensor, nn

import gradtrace
from gradtrace.errors import GradtraceError
from gradtrace.io import atomic_files, container, tuning
from gradtrace.io.container import BadFile, Contents, read, write


@pytest.fixture
def at(tmp_path: Path) -> Path:
    return tmp_path / "run.gradtrace"


def back(at: Path, meta: dict[str, Any], **tensors: Tensor) -> Contents:
    write(at, "trace", meta, tensors)
    return read(at, "trace")


def same(a: Tensor, b: Tensor) -> bool:
    """Equal to the last bit, NaN included."""
    alike = a.dtype == b.dtype and a.shape == b.shape
    return alike and raw(a) == raw(b)


def raw(tensor: Tensor) -> bytes:
    flat = tensor.detach().resolve_neg().reshape(-1).clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8).numpy().tobytes()


def refused(at: str | Path, *words: str, kind: str | None = None) -> str:
    """The message of a refusal: it names the file, and holds these words."""
    with pytest.raises(BadFile) as caught:
        read(at, kind)
    message = str(caught.value)
    assert message.startswith(repr(str(at)))
    assert [word for word in words if word not in message] == []
    return message


# What goes in comes out --------------------------------------------------------------------------

VALUES: dict[str, Callable[[], Tensor]] = {
    "bool": lambda: torch.tensor([True, False, True]),
    "uint8": lambda: torch.arange(256).to(torch.uint8),
    "uint64": lambda: torch.tensor([2**64 - 1, 0], dtype=torch.uint64),
    "int8": lambda: torch.tensor([-128, 127], dtype=torch.int8),
    "int64": lambda: torch.tensor([-(2**63), 2**63 - 1]),
    "float16": lambda: torch.tensor([65504.0, 6e-8, -0.0], dtype=torch.float16),
    "bfloat16": lambda: torch.tensor([3e38, math.nan, -math.inf], dtype=torch.bfloat16),
    "float32": lambda: torch.tensor([1e-45, math.inf, math.nan, -0.0]),
    "float64": lambda: torch.tensor([[5e-324, 1 / 3], [math.pi, -math.inf]], dtype=torch.float64),
    "nan with a payload": lambda: torch.tensor([0x7FC12345], dtype=torch.int32).view(torch.float32),
    "0-d": lambda: torch.tensor(7.0),
    "0-d bool": lambda: torch.tensor(True),
    "empty": lambda: torch.empty(0),
    "empty of a shape": lambda: torch.empty(3, 0, 2, dtype=torch.int16),
    "transposed": lambda: torch.arange(6.0).reshape(2, 3).T,
    "strided": lambda: torch.arange(20)[3::4],
    "expanded": lambda: torch.tensor([1.0]).expand(3, 2),
    "part of another": lambda: torch.arange(100.0)[40:43],
    "negative view": lambda: torch.tensor([1 + 2j, 3 - 4j]).conj().imag,
    "negative view of one": lambda: torch.tensor([1 + 2j]).conj().imag,
    "channels last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "parameter": lambda: nn.Parameter(torch.ones(2)),
    "with a graph": lambda: nn.Linear(2, 2)(torch.ones(1, 2)) * 2,
}


@pytest.mark.parametrize("make", VALUES.values(), ids=VALUES)
def test_a_tensor_comes_back(at: Path, make: Callable[[], Tensor]) -> None:
    tensor = make()
    found = back(at, {}, x=tensor).tensors["x"]
    assert same(found, tensor)
    assert type(found) is Tensor and not found.requires_grad and found.is_contiguous()


def test_all_tensors_come_back_in_order(at: Path) -> None:
    tensors = {name: make() for name, make in VALUES.items()}
    write(at, "trace", {}, tensors)
    found = read(at).tensors
    assert list(found) == list(tensors)
    assert all(same(found[name], tensors[name]) for name in tensors)


def test_tensors_that_share_memory_come_back_apart(at: Path) -> None:
    base = torch.arange(6.0)
    tied = {"a": base, "b": base, "view": base[1:4], "rows": base.reshape(2, 3), "t": base[::2]}
    write(at, "trace", {}, tied)
    found = read(at).tensors
    assert all(same(found[name], tied[name]) for name in tied)
    found["a"].zero_()
    assert same(found["b"], base)


def test_tensors_read_do_not_hang_on_the_file(at: Path) -> None:
    found = back(at, {}, x=torch.arange(1000.0)).tensors["x"]
    at.write_bytes(b"\xff" * at.stat().st_size)
    assert same(found, torch.arange(1000.0))


def test_tensors_given_are_left_alone(at: Path) -> None:
    weight = nn.Parameter(torch.arange(6.0).reshape(2, 3))
    weight.grad = torch.ones(2, 3)
    before = weight.detach().clone()
    write(at, "trace", {}, {"w": weight, "t": weight.T})
    assert weight.requires_grad and same(weight, before) and same(weight.grad, torch.ones(2, 3))


def test_an_empty_file_of_ours(at: Path) -> None:
    assert back(at, {}) == Contents("trace", {}, {})


def test_a_default_device_does_not_matter(at: Path) -> None:
    write(at, "trace", {}, {"x": torch.ones(3)})
    with torch.device("meta"):
        found = read(at).tensors["x"]
    assert found.device.type == "cpu" and same(found, torch.ones(3))


NAMES = [
    "",
    ".",
    "../../etc/passwd",
    "/dev/null",
    "C:\\con",
    "a/b\\c\0d",
    "__metadata__",
    "gradtrace",
    "t1",
    "t0",
    "$int",
    "$$",
    "解码器.🚀",
    "\u202eevil",
    "\ud800",
    "x" * 10_000,
    '"}],{"',
    "0" * 64,
]


def test_names_are_only_text(at: Path) -> None:
    tensors = {name: torch.tensor(float(i)) for i, name in enumerate(NAMES)}
    write(at, "0" * 64, {name: name for name in NAMES}, tensors)
    kind, meta, found = read(at)
    assert kind == "0" * 64
    assert meta == {name: name for name in NAMES}
    assert {name: value.item() for name, value in found.items()} == {
        name: float(i) for i, name in enumerate(NAMES)
    }
    assert [path.name for path in at.parent.iterdir()] == [at.name]


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(2**20000), 2**20000)
    | st.floats()
    | st.text(st.characters(), max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["a", "$int", "$float", "$", "$$x", ""]), inner)
    ),
    max_leaves=12,
)


def exact(value: Any) -> Any:
    """As something that compares by type and bits: True is not 1, NaN is NaN, -0.0 is not 0.0."""
    if isinstance(value, float):
        return ("float", struct.pack("<d", value) if value == value else "nan")
    if isinstance(value, list):
        return [exact(item) for item in value]
    if isinstance(value, dict):
        return {key: exact(item) for key, item in value.items()}
    return (type(value).__name__, value)


@settings(max_examples=few(40, 150))
@given(st.dictionaries(st.text(st.characters(), max_size=5), json_values, max_size=4))
@example({"$int": "0x5"})
@example({"$float": {"$float": "nan"}, "$x": {"$$int": math.nan}})
@example({"a": [2**53, 2**53 + 1, -(2**53) - 1, 10**6000, -(10**6000), 1e308, 5e-324, -0.0]})
def test_metadata_comes_back(tmp_path_factory: pytest.TempPathFactory, meta: Any) -> None:
    at = tmp_path_factory.getbasetemp() / "meta.gradtrace"
    assert exact(back(at, meta).meta) == exact(meta)


def test_tuples_come_back_as_lists(at: Path) -> None:
    assert back(at, {"shape": (2, (3,))}).meta == {"shape": [2, [3]]}


def test_metadata_of_subclasses_comes_back_plain(at: Path) -> None:
    import numpy as np

    meta = back(at, {"x": np.float64(0.1), "nan": np.float64("nan")}).meta
    assert meta["x"] == 0.1 and type(meta["x"]) is float and math.isnan(meta["nan"])


def test_paths_may_be_text_and_start_at_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    write("~/a run.of mine", "trace", {"n": 1}, {})
    write("plain", "trace", {"n": 2}, {})
    assert sorted(os.listdir(tmp_path)) == ["a run.of mine", "plain"]
    assert read(tmp_path / "a run.of mine").meta == {"n": 1}
    assert read("plain").meta == {"n": 2}


def test_others_can_open_it(at: Path) -> None:
    """It is safetensors, with strict JSON, neutral keys, and what made it."""
    write(at, "trace", {"x": math.nan, "n": 2**60}, {"a/b": torch.ones(2)})
    with safe_open(at, "pt") as held:
        assert held.keys() == ["t0"]
        assert same(held.get_tensor("t0"), torch.ones(2))
        (text,) = held.metadata().values()

    def strict(constant: str) -> None:
        raise AssertionError(constant)

    document = json.loads(text, parse_constant=strict)
    created = document.pop("created")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", created)
    assert re.fullmatch("[0-9a-f]{64}", document.pop("sha256"))
    assert document == {
        "schema": 2,
        "kind": "trace",
        "gradtrace": gradtrace.__version__,
        "torch": torch.__version__,
        "names": {"t0": "a/b"},
        "meta": {"x": {"$float": "nan"}, "n": {"$int": hex(2**60)}},
    }


def test_ten_thousand_tensors(at: Path) -> None:
    tensors = {f"layer.{i}": torch.tensor([i]) for i in range(10_000)}
    write(at, "trace", {}, tensors)
    found = read(at).tensors
    assert list(found) == list(tensors)
    assert [int(value) for value in found.values()] == list(range(10_000))


# All or nothing ----------------------------------------------------------------------------------


@pytest.fixture(params=["new", "old"])
def place(request: pytest.FixtureRequest, at: Path) -> Iterator[Path]:
    """Where a write is to fail: with a file before it or not, all must be as it was."""
    if request.param == "old":
        write(at, "trace", {"old": True}, {"x": torch.ones(3)})
    before = {path: path.read_bytes() for path in at.parent.iterdir()}
    yield at
    assert {path: path.read_bytes() for path in at.parent.iterdir()} == before


def failing(error: BaseException) -> Callable[..., Any]:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise error

    return fail


FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_step_that_fails_leaves_nothing(
    place: Path, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, step, failing(FULL))
        with pytest.raises(BadFile, match=r"No space left.*untouched.*free some space") as caught:
            write(place, "trace", {}, {"x": torch.ones(5)})
    assert caught.value.__cause__ is FULL
    assert str(place) in str(caught.value)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_a_full_disk(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def put(file: Any, data: bytes) -> None:
        with open("/dev/full", "wb", buffering=0) as full:
            full.write(data)

    monkeypatch.setattr(atomic_files, "put", put)
    with pytest.raises(BadFile, match="No space left on device"):
        write(place, "trace", {}, {"x": torch.ones(5)})


def test_a_file_that_the_system_lets_not_grow(place: Path) -> None:
    """The library's own complaint of a write that failed."""
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    tensor = torch.ones(100_000)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        with pytest.raises(BadFile, match=r"was not written .*untouched"):
            write(place, "trace", {}, {"x": tensor})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


STEPS = [
    *((container, name) for name in ("_plain", "_document", "_packed", "_bytes")),
    *((atomic_files, name) for name in ("lock", "put", "sync")),
    *((os, name) for name in ("chmod", "replace", "fsync")),
]


@pytest.mark.parametrize(
    ("where", "step"), STEPS, ids=lambda value: getattr(value, "__name__", value)
)
@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_leaves_nothing(
    place: Path, where: Any, step: str, kind: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(where, step, failing(kind()))
        with pytest.raises(kind):
            write(place, "trace", {}, {"x": torch.ones(5)})


def test_the_old_file_is_there_until_the_new_one_is_whole(
    at: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(at, "trace", {"n": 1}, {})
    seen = []
    replace = os.replace

    def spy(source: Path, target: Path) -> None:
        assert source.parent == target.parent == at.parent  # a rename within one file system
        seen.append((read(at).meta["n"], read(source).meta["n"]))
        replace(source, target)

    monkeypatch.setattr(os, "replace", spy)
    write(at, "trace", {"n": 2}, {})
    assert seen == [(1, 2)]
    assert read(at).meta == {"n": 2}


def test_it_is_on_the_disk_before_it_has_its_name(
    at: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    for name in ("fsync", "replace"):
        real = getattr(os, name)
        monkeypatch.setattr(
            os, name, lambda *args, real=real, name=name: order.append(name) or real(*args)
        )
    write(at, "trace", {}, {})
    assert [name for name in order if name in ("fsync", "replace")][-2:] == ["fsync", "replace"]
    assert order.count("replace") == 1


def test_places_where_nothing_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("text")
    cases = {
        tmp_path / "no" / "run": "folder that does not exist: make the folder first",
        tmp_path / "file" / "run": "folder that does not exist: make the folder first",
        tmp_path: "folder or a device: give the name of a file",
        tmp_path / ("x" * 300): "was not written",
        tmp_path / "a\0b": "leads nowhere|was not written",
        Path("~no-such-user-here/run"): "leads nowhere .*: give another path",
    }
    for path, words in cases.items():
        with pytest.raises(BadFile, match=words):
            write(path, "trace", {}, {})
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "text"


def test_no_permission(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    denied = PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    with monkeypatch.context() as patch:
        patch.setattr(atomic_files, "open", failing(denied), raising=False)
        with pytest.raises(BadFile, match=r"Permission denied.*folder that you may write"):
            write(place, "trace", {}, {})


def test_a_read_only_file_is_not_replaced(at: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(at, "trace", {"n": 1}, {})
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write to any file
    with pytest.raises(BadFile, match="is read-only"):
        write(at, "trace", {"n": 2}, {})
    assert read(at).meta == {"n": 1}


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes")
def test_pipes_and_devices_are_neither_replaced_nor_waited_for(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(BadFile, match="folder or a device"):
        write(pipe, "trace", {}, {})
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    refused(pipe, "device or a pipe")


@pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")
def test_permissions_are_those_of_any_new_file_or_of_the_old_one(at: Path) -> None:
    other = at.with_name("other")
    other.touch()
    write(at, "trace", {}, {"x": torch.ones(3)})
    assert at.stat().st_mode == other.stat().st_mode
    at.chmod(0o640)
    write(at, "trace", {}, {"x": torch.ones(3)})
    assert stat.S_IMODE(at.stat().st_mode) == 0o640


@pytest.mark.skipif(os.name != "posix", reason="links of POSIX")
def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "data" / "run")
    write(link, "trace", {"n": 1}, {})
    assert link.is_symlink() and read(tmp_path / "data" / "run").meta == {"n": 1}


def deep(levels: int) -> dict[str, Any]:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return {"deep": value}


circle: dict[str, Any] = {}
circle["circle"] = circle

UNFIT: dict[str, tuple[str, Any, Any, str]] = {
    "a set": ("trace", {"x": {1}}, {}, "cannot hold a set as metadata"),
    "a tensor": ("trace", {"x": [torch.ones(1)]}, {}, "cannot hold a Tensor as metadata"),
    "bytes": ("trace", {"x": b""}, {}, "cannot hold a bytes as metadata"),
    "complex": ("trace", {"x": 1j}, {}, "cannot hold a complex as metadata"),
    "keys": ("trace", {"x": {1: 2}}, {}, "a dict with keys that are not str"),
    "outer keys": ("trace", {1: 2}, {}, "a dict with keys that are not str"),
    "depth": ("trace", deep(5000), {}, "more than 100 levels"),
    "circle": ("trace", circle, {}, "more than 100 levels"),
    "no dict": ("trace", None, {}, "was not written"),
    "kind": (3, {}, {}, "needs text"),  # type: ignore[dict-item]
    "name": ("trace", {}, {3: torch.ones(1)}, "needs text"),
    "no tensor": ("trace", {}, {"x": [1.0]}, "was not written"),
    "sparse": ("trace", {}, {"x": torch.eye(2).to_sparse()}, "give dense"),
    "meta": ("trace", {}, {"x": torch.ones(2, device="meta")}, "give dense"),
    "complex128": ("trace", {}, {"x": torch.ones(2, dtype=torch.complex128)}, "real numbers"),
    "complex64": ("trace", {}, {"x": torch.ones(2, dtype=torch.complex64)}, "real numbers"),
}


@pytest.mark.parametrize(("kind", "meta", "tensors", "words"), UNFIT.values(), ids=UNFIT)
def test_what_cannot_be_held(place: Path, kind: str, meta: Any, tensors: Any, words: str) -> None:
    with pytest.raises(BadFile, match=words):
        write(place, kind, meta, tensors)


def test_a_hundred_levels_can_be_held(at: Path) -> None:
    assert back(at, deep(99)).meta == deep(99)


def test_too_much_metadata(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(tuning, "HEADER_MAX_BYTES", 10_000)
        with pytest.raises(BadFile, match="over the limit of 10,000"):
            write(place, "trace", {"x": "y" * 10_000}, {})


# What is refused ---------------------------------------------------------------------------------


def pack(header: bytes, data: bytes = b"") -> bytes:
    return struct.pack("<Q", len(header)) + header + data


def spec(shape: list[int], start: int, stop: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


def forged(
    tensors: dict[str, Any] | None = None,
    data: bytes = b"",
    text: str | None = None,
    **changes: Any,
) -> bytes:
    """A file by a hand that knows the format: the checksum is right, all else may be wrong."""
    document: dict[str, Any] = {"schema": 1, "sha256": "0" * 64, "kind": "trace"}
    names = {key: f"name of {key}" for key in tensors or {}}
    document |= {"gradtrace": "9.9.9", "torch": "2", "created": "", "names": names, "meta": {}}
    document |= changes
    text = json.dumps(document) if text is None else text
    blob = pack(json.dumps({"__metadata__": {"gradtrace": text}, **(tensors or {})}).encode(), data)
    return blob.replace(b"0" * 64, sha256(blob).hexdigest().encode(), 1)


def torch_file() -> bytes:
    buffer = io.BytesIO()
    torch.save({"x": torch.ones(2)}, buffer)
    return buffer.getvalue()


def zip_file() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("a", "b")
    return buffer.getvalue()


ONE = {"t0": spec([1], 0, 4)}
TWO = {"t0": spec([1], 0, 4), "t1": spec([1], 4, 8)}
DEEP = '{"schema":1,"meta":' + "[" * 200_000 + "]" * 200_000 + "}"

BAD: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is empty: copy it again"),
    "one byte": (b"\x08", "not a gradtrace file, or cut short"),
    "eight bytes": (struct.pack("<Q", 500), "not a gradtrace file, or cut short"),
    "torch.save": (torch_file(), "a zip archive, such as torch.save writes"),
    "zip": (zip_file(), "a zip archive"),
    "pickle": (pickle.dumps({"a": 1}, protocol=4), "a pickle, which could run anything"),
    "gzip": (b"\x1f\x8b\x08" + bytes(20), "gzip"),
    "html": (b"<!DOCTYPE html><html></html>", "HTML or XML, perhaps the error page"),
    "lfs": (b"version https://git-lfs.github.com/spec/v1\noid ...", "git lfs pull"),
    "text": (b"hello, this is text", "not a gradtrace file"),
    "json": (b'{"schema": 1, "kind": "trace"}', "not a gradtrace file"),
    "huge header": (
        struct.pack("<Q", 10**14) + b"{" + bytes(11),
        "would have 100,000,000,000,000 ",
    ),
    "largest header": (b"\xff" * 8 + b"{}", "would have 18,446,744,073,709,551,615 bytes"),
    "long header": (struct.pack("<Q", 10**8) + b"{}", "cut short, its header alone has"),
    "no header": (struct.pack("<Q", 0) + b"{}", "cut short or damaged"),
    "not json": (pack(b"{this is not json}"), "cut short or damaged"),
    "deep header": (pack(b'{"a":' * 100_000), "cut short or damaged"),
    "no utf-8": (pack(b'{"\xff":1}'), "cut short or damaged"),
    "no metadata": (pack(json.dumps(ONE).encode(), bytes(4)), "gradtrace did not write"),
    "others' metadata": (
        pack(json.dumps({"__metadata__": {"format": "pt"}, **ONE}).encode(), bytes(4)),
        "is a safetensors file that gradtrace did not write: give",
    ),
    "metadata twice": (
        pack(b'{"__metadata__":{"gradtrace":"{}"},"__metadata__":{"gradtrace":"{}"}}'),
        "cut short or damaged",
    ),
    "metadata no text": (pack(b'{"__metadata__":{"gradtrace":{}}}'), "cut short or damaged"),
    "newer": (forged(schema=3), "was made by a newer gradtrace: update gradtrace"),
    "much newer": (forged(schema=10**40, meta=3), "update gradtrace"),
    "schema 0": (forged(schema=0), "no known version"),
    "schema true": (forged(schema="1"), "no known version"),
    "schema none": (forged(text="{}"), "no known version"),
    "document a list": (forged(text="[1]"), "no known version"),
    "document a number": (forged(text='{"$int": "0x1"}'), "no known version"),
    "document empty": (forged(text=""), "cut short or damaged"),
    "document cut": (forged(text='{"schema":1,'), "cut short or damaged"),
    "document deep": (forged(text=DEEP), "nested too deep to be read"),
    "a long number": (forged(text='{"schema":' + "9" * 5000 + "}"), "cut short or damaged"),
    "key twice": (forged(text='{"schema":1,"schema":1}'), "a key is there twice"),
    "kind no text": (forged(kind=3), "without a proper 'kind'"),
    "names a list": (forged(names=["a"]), "without a proper 'names'"),
    "meta a list": (forged(meta=[]), "without a proper 'meta'"),
    "sum a number": (forged(sha256=0), "without a proper 'sha256'"),
    "sum empty": (forged(sha256=""), "its checksum is wrong"),
    "sum wrong": (forged(sha256="f" * 64), "its checksum is wrong"),
    "unknown tag": (forged(meta={"$bytes": "00"}), "a key starts with a single $"),
    "tag and more": (forged(meta={"x": {"$int": "0x1", "y": 1}}), "single $"),
    "tag no text": (forged(meta={"x": {"$int": 1}}), "single $"),
    "tag no number": (forged(meta={"x": {"$int": "zz"}}), "cut short or damaged"),
    "tag no float": (forged(meta={"x": {"$float": "1e5"}}), "cut short or damaged"),
    "climbing key": (
        forged({"../../etc/passwd": spec([1], 0, 4)}, bytes(4)),
        "under a key never written, '../../etc/passwd'",
    ),
    "key with NUL": (forged({"t\0": spec([1], 0, 4)}, bytes(4)), "never written, 't\\x00'"),
    "key with a line": (forged({"t0\n": spec([1], 0, 4)}, bytes(4)), "never written, 't0\\n'"),
    "key of other digits": (forged({"t٣": spec([1], 0, 4)}, bytes(4)), "never written"),
    "names too few": (forged(TWO, bytes(8), names={"t0": "a"}), "names other tensors"),
    "names too many": (forged(ONE, bytes(4), names={"t0": "a", "t1": "b"}), "names other tensors"),
    "names others": (forged(ONE, bytes(4), names={"t7": "a"}), "names other tensors"),
    "names no text": (forged(ONE, bytes(4), names={"t0": ["a"]}), "names other tensors"),
    "names alike": (forged(TWO, bytes(8), names={"t0": "a", "t1": "a"}), "the same name"),
    "shape negative": (forged({"t0": spec([-1], 0, 4)}, bytes(4)), "cut short or damaged"),
    "shape huge": (forged({"t0": spec([2**40, 2**40], 0, 4)}, bytes(4)), "cut short or damaged"),
    "shape wraps": (forged({"t0": spec([2**32, 2**32, 1], 0, 0)}), "cut short or damaged"),
    "shape too long": (forged({"t0": spec([0, 2**63], 0, 0)}), "cut short or damaged"),
    "shape other": (forged({"t0": spec([2], 0, 4)}, bytes(4)), "cut short or damaged"),
    "overlap": (
        forged({"t0": spec([2], 0, 8), "t1": spec([1], 4, 8)}, bytes(8)),
        "cut short or damaged",
    ),
    "twice the same bytes": (
        forged({"t0": spec([1], 0, 4), "t1": spec([1], 0, 4)}, bytes(4)),
        "cut short or damaged",
    ),
    "backwards": (forged({"t0": spec([1], 4, 0)}, bytes(4)), "cut short or damaged"),
    "hole": (forged({"t0": spec([1], 4, 8)}, bytes(8)), "cut short or damaged"),
    "past the end": (forged(TWO, bytes(4)), "cut short or damaged"),
    "bytes too many": (forged(ONE, bytes(5)), "cut short or damaged"),
    "dtype unknown": (forged({"t0": spec([4], 0, 4, "Q7")}, bytes(4)), "cut short or damaged"),
    "dtype of no torch": (
        forged({"t0": spec([4], 0, 3, "F6_E2M3")}, bytes(3)),
        "cut short or damaged",
    ),
}


@pytest.mark.parametrize(("blob", "words"), BAD.values(), ids=BAD)
def test_a_bad_file_is_refused(at: Path, blob: bytes, words: str) -> None:
    at.write_bytes(blob)
    message = refused(at, words)
    assert ": " in message, "it says what to do"
    assert len(message) < 1000 + len(str(at)) and message.isprintable()
    assert at.read_bytes() == blob


def test_a_good_forgery_is_read(at: Path) -> None:
    """So that the refusals above are for what is wrong in each, and not for something else."""
    at.write_bytes(forged(TWO, struct.pack("<2f", 1.5, -2.0), meta={"a": {"$int": "0x5"}}))
    kind, meta, tensors = read(at)
    assert (kind, meta) == ("trace", {"a": 5})
    assert {name: t.tolist() for name, t in tensors.items()} == {
        "name of t0": [1.5],
        "name of t1": [-2.0],
    }


def test_a_huge_header_is_not_allocated(at: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of 20 bytes: no more is asked for than it has."""
    asked: list[int] = []

    class Spy(io.FileIO):
        def read(self, size: int | None = -1, /) -> bytes:
            asked.append(-1 if size is None else size)
            return super().read(size)

    monkeypatch.setattr(os, "fdopen", Spy)
    for size in (10**14, tuning.HEADER_MAX_BYTES, 2**64 - 1):
        at.write_bytes(struct.pack("<Q", size) + b"{" + bytes(11))
        refused(at)
    assert asked and max(asked) <= 20 and min(asked) >= 0


def test_nothing_is_unpickled(at: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return (os.mkdir, (str(at) + ".hit",))

    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        at.write_bytes(pickle.dumps(Bomb(), protocol=protocol))
        refused(at)
    assert os.listdir(at.parent) == [at.name]


def test_there_is_no_file(tmp_path: Path) -> None:
    refused(tmp_path / "none", "does not exist: check the name and the folder")
    refused(tmp_path / "no" / "none", "does not exist")
    refused(tmp_path, "is a folder: name a file in it")
    refused(tmp_path / "a\nb", "does not exist")
    refused(tmp_path / "a\0b")
    refused(tmp_path / ("x" * 300), "cannot be opened (File name too long)")
    refused("~no-such-user-here/x", "leads nowhere (", "): give another path")


def test_a_file_that_may_not_be_opened(at: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(at, "trace", {}, {})
    denied = PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    monkeypatch.setattr(os, "open", failing(denied))
    refused(at, "cannot be opened (Permission denied): check its permissions")


def test_another_kind(at: Path) -> None:
    write(at, "influence" * 100, {}, {})
    message = refused(at, "holds 'influenceinfluence", "'trace' was asked for", kind="trace")
    assert len(message) < 300 + len(str(at))
    assert read(at).kind == "influence" * 100


def test_refusals_are_errors_of_gradtrace() -> None:
    assert issubclass(BadFile, GradtraceError)
    assert BadFile.__doc__


# Damage ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A valid file with a bit of everything; a header that ends in padding."""
    at = tmp_path_factory.mktemp("whole") / "run.gradtrace"
    tensors = {
        "a.weight": torch.arange(6.0).reshape(2, 3),
        "flags": torch.tensor([True, False, True]),
        "empty": torch.empty(0, 2),
        "n": torch.tensor(3),
    }
    for more in range(8):
        meta = {"loss": math.nan, "n": 2**70, "list": [1, "é", {"$": None}], "pad": "x" * more}
        write(at, "trace", meta, tensors)
        blob = at.read_bytes()
        if blob[: header_of(blob)].endswith(b"    "):
            return blob
    raise AssertionError("no padding")


def header_of(blob: bytes) -> int:
    return 8 + int.from_bytes(blob[:8], "little")


def test_the_whole_file_is_good(at: Path, whole: bytes) -> None:
    at.write_bytes(whole)
    assert read(at, "trace").meta["n"] == 2**70


def test_cut_anywhere_it_is_refused(at: Path, whole: bytes) -> None:
    for length in range(len(whole)):
        at.write_bytes(whole[:length])
        message = refused(at)
        if 8 < length < header_of(whole):
            assert "is cut short, its header alone has" in message


def test_with_any_bit_flipped_it_is_refused(at: Path, whole: bytes) -> None:
    for index in range(len(whole)):
        for bit in {0, index % 8}:
            broken = bytearray(whole)
            broken[index] ^= 1 << bit
            at.write_bytes(broken)
            message = refused(at)
            if index >= header_of(whole):
                assert "its checksum is wrong" in message


@settings(max_examples=few(50, 300))
@given(st.data())
def test_with_any_byte_changed_it_is_refused(
    tmp_path_factory: pytest.TempPathFactory, whole: bytes, data: st.DataObject
) -> None:
    at = tmp_path_factory.getbasetemp() / "changed.gradtrace"
    index = data.draw(st.integers(0, len(whole) - 1))
    value = data.draw(st.integers(0, 255).filter(lambda value: value != whole[index]))
    at.write_bytes(whole[:index] + bytes([value]) + whole[index + 1 :])
    refused(at)


def test_padding_counts_too(at: Path, whole: bytes) -> None:
    """Blanks for blanks: JSON is the same with them, the file is not."""
    end = header_of(whole)
    at.write_bytes(whole[: end - 1] + b"\t" + whole[end:])
    refused(at, "its checksum is wrong")


@settings(max_examples=few(50, 200))
@given(st.data())
def test_pieces_moved_or_added_are_refused(
    tmp_path_factory: pytest.TempPathFactory, whole: bytes, data: st.DataObject
) -> None:
    at = tmp_path_factory.getbasetemp() / "moved.gradtrace"
    index = data.draw(st.integers(0, len(whole)))
    piece = data.draw(st.binary(min_size=1, max_size=20))
    blob = whole[:index] + piece + whole[index:]
    if data.draw(st.booleans()):
        blob = blob[: len(whole)]
    if blob != whole:
        at.write_bytes(blob)
        refused(at)


@settings(max_examples=few(50, 300))
@given(st.binary(max_size=200))
@example(b"\x02\0\0\0\0\0\0\0{}")
def test_noise_is_refused(tmp_path_factory: pytest.TempPathFactory, blob: bytes) -> None:
    at = tmp_path_factory.getbasetemp() / "noise.gradtrace"
    at.write_bytes(blob)
    refused(at)
    at.write_bytes(pack(b"{" + blob))
    refused(at)


hostile_specs = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "BOOL", "F64", "F4", "F8_E8M0", "C64", "BF16", "?"]),
        "shape": st.lists(st.sampled_from([0, 1, 2, 3, -1, 2**31, 2**62, 2**63, 2**64, 1.5])),
        "data_offsets": st.lists(st.sampled_from([0, 1, 4, 8, 12, 2**63, -1]), max_size=3),
    }
)


@settings(max_examples=few(50, 400))
@given(
    st.dictionaries(st.sampled_from(["t0", "t1", "t00", "", "t-1"]), hostile_specs, max_size=3),
    st.binary(max_size=16),
)
def test_hostile_tensors_are_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, tensors: dict[str, Any], data: bytes
) -> None:
    """Whatever a header claims, with a right checksum: contents, or a refusal, and no crash."""
    at = tmp_path_factory.getbasetemp() / "hostile.gradtrace"
    at.write_bytes(forged(tensors, data))
    try:
        found = read(at)
    except BadFile as error:
        assert str(at) in str(error)
    else:
        assert sum(t.numel() * t.element_size() for t in found.tensors.values()) == len(data)


# As others write it ------------------------------------------------------------------------------


def test_the_bytes_are_those_of_safetensors(at: Path) -> None:
    """What an older gradtrace wrote with that library is what is written now, byte for byte."""
    from safetensors.torch import load, save

    tensors = {name: make().detach().resolve_neg().contiguous() for name, make in VALUES.items()}
    write(at, "trace", {"a": "é"}, tensors)
    blob = at.read_bytes()
    with safe_open(at, "pt") as held:
        metadata = held.metadata()
    assert save(load(blob), metadata) == blob


def test_files_of_ever_new_sizes_leave_nothing_behind(at: Path) -> None:
    """Not even a type: ctypes keeps one for every size it has seen."""
    import gc

    def ctypes_arrays() -> int:
        types = (each for each in gc.get_objects() if type in type(each).__mro__)
        return sum("_Array_" in each.__name__ for each in types)

    before = ctypes_arrays()
    for size in range(50):
        write(at, "view", {}, {"view": torch.zeros(70_001 + size, dtype=torch.uint8)})
        read(at)
    assert ctypes_arrays() == before


def test_large_tensors_are_written_in_chunks(at: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "CHUNK_BYTES", 7)
    tensor = torch.arange(100, dtype=torch.int16).reshape(4, 25)
    assert same(back(at, {}, x=tensor, y=tensor.T).tensors["y"], tensor.T)


def test_a_bool_is_0_or_1(at: Path) -> None:
    write(at, "trace", {}, {"x": torch.tensor([True, False])})
    blob = at.read_bytes()
    digest = re.search(rb'sha256\\":\\"([0-9a-f]{64})', blob)
    assert digest is not None
    blank = blob.replace(digest[1], b"0" * 64)[:-1] + b"\x02"
    at.write_bytes(blank.replace(b"0" * 64, sha256(blank).hexdigest().encode(), 1))
    refused(at, "a bool is neither 0 nor 1")
