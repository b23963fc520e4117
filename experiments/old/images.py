"""Pictures of digits: scikit-learn's, which come with it, or MNIST in a file that a user has."""

from __future__ import annotations

import gzip
from importlib import import_module
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gradtrace.errors import GradtraceError, needs

HELP = "an idx file of images beside that of its labels, or a csv with one image a line and its "
HELP += "label first or last; either may be packed with gzip"


def pictures(path: str | None, samples: int, seed: int) -> tuple[Tensor, Tensor]:
    """So many pictures, values 0 to 1, with their labels: (samples, pixels) and (samples,).

    Without a path they are digits of 8 × 8 pixels. If there are too few, they are drawn again.
    """
    images, labels = digits() if path is None else mnist(Path(path))
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(images), generator=generator)
    while len(order) < samples:
        more = torch.randperm(len(images), generator=generator)
        order = torch.cat([order, more])
    return images[order[:samples]], labels[order[:samples]]


def digits() -> tuple[Tensor, Tensor]:
    """The 1,797 digits of 8 × 8 pixels that come with scikit-learn."""
    try:
        datasets = import_module("sklearn.datasets")
    except ImportError as error:
        raise GradtraceError(
            needs("the data set of digits", "scikit-learn")
            + "; or give a file of MNIST: --set mnist=FILE"
        ) from error
    found = datasets.load_digits()
    return torch.tensor(found.data / 16, dtype=torch.float32), torch.tensor(found.target)


def mnist(path: Path) -> tuple[Tensor, Tensor]:
    """Images and labels of an idx or csv file."""
    if not path.exists():
        raise GradtraceError(f"there is no file {path}; mnist is {HELP}")
    images, labels = _csv(path) if ".csv" in path.suffixes else _pair(path)
    if len(images) != len(labels) or not len(images):
        raise GradtraceError(f"{path} has {len(images)} images and {len(labels)} labels")
    flat = torch.tensor(images.reshape(len(images), -1) / 255, dtype=torch.float32)
    return flat, torch.tensor(labels.astype(np.int64))


def _pair(path: Path) -> tuple[np.ndarray, np.ndarray]:
    other = path.with_name(path.name.replace("images", "labels").replace("idx3", "idx1"))
    if other == path or not other.exists():
        raise GradtraceError(f"no labels beside {path} (looked for {other.name}); mnist is {HELP}")
    return _idx(path), _idx(other)


def _idx(path: Path) -> np.ndarray:
    """``0 0 8 d``, d sizes of 4 bytes, largest byte first, then bytes."""
    data = _bytes(path)
    if len(data) < 4 or data[:3] != b"\0\0\x08":
        raise GradtraceError(f"{path} is no idx file of bytes; mnist is {HELP}")
    dims = data[3]
    shape = np.frombuffer(data, ">u4", dims, 4).astype(int)
    return np.frombuffer(data, np.uint8, offset=4 + 4 * dims).reshape(shape)


def _csv(path: Path) -> tuple[np.ndarray, np.ndarray]:
    lines = _bytes(path).decode().splitlines()
    header = not lines[0].replace(",", "").replace(".", "").replace(" ", "").isdigit()
    table = np.loadtxt(lines[header:], delimiter=",", ndmin=2)
    for at in (0, -1):  # a pixel in a corner is nearly always 0
        values = np.unique(table[:, at])
        if len(values) > 2 and set(values) <= set(range(10)):
            return np.delete(table, at, axis=1), table[:, at]
    raise GradtraceError(f"no column of labels 0 to 9 at either end of {path}; mnist is {HELP}")


def _bytes(path: Path) -> bytes:
    data = path.read_bytes()
    return gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
