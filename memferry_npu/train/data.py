"""Text that every machine has, cut into batches.

Owns: reading the text of a run and the mapping from (seed, step, micro-batch) to
a batch. The same numbers give the same batch in any run, whatever ran before.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from memferry_npu.config import ConfigError, DataConfig

# Installed packages lie below the standard library's folder but are not part of it.
_NOT_STDLIB = frozenset({"site-packages", "dist-packages", "__pycache__"})


def load_text(config: DataConfig) -> np.ndarray:
    """The run's text as uint8, at most `max_bytes`. Raises ConfigError where there is none."""
    if config.source == "stdlib":
        folder = Path(sysconfig.get_path("stdlib"))
        files = _files(folder, ".py")
        what = f"the standard library in {folder}"
    else:
        assert config.path is not None  # RunConfig checks it
        root = Path(config.path)
        if not root.exists():
            raise ConfigError(f"data.path: {root}: no such file or folder")
        files = iter([root]) if root.is_file() else _files(root, "")
        what = str(root)
    text = bytearray()
    for path in files:
        try:
            text += path.read_bytes()
        except OSError as error:
            raise ConfigError(f"data: cannot read {path}: {error.strerror}") from error
        if len(text) >= config.max_bytes:
            break
    if not text:
        raise ConfigError(f"data: {what} has no text")
    return np.frombuffer(bytes(text[: config.max_bytes]), dtype=np.uint8)


def _files(folder: Path, suffix: str) -> Iterator[Path]:
    """Files below `folder` in an order that does not depend on the file system."""
    for path in sorted(folder.iterdir(), key=lambda p: p.name):
        if path.is_dir() and not path.is_symlink():
            if path.name not in _NOT_STDLIB:
                yield from _files(path, suffix)
        elif path.is_file() and path.name.endswith(suffix):
            yield path


class Batches:
    """Batches of (inputs, targets), each int64 (batch, context), drawn at random positions of the text."""

    def __init__(self, text: np.ndarray, *, batch: int, context: int, seed: int) -> None:
        if len(text) < context + 1:
            raise ConfigError(f"data: {len(text)} bytes of text are fewer than model.context + 1 ({context + 1})")
        self._text = text
        self._batch = batch
        self._context = context
        self._seed = seed

    def get(self, step: int, micro: int) -> tuple[Tensor, Tensor]:
        """The batch of one micro-batch of one step."""
        rng = np.random.default_rng([self._seed, step, micro])
        starts = rng.integers(0, len(self._text) - self._context, size=self._batch)
        window = self._text[starts[:, None] + np.arange(self._context + 1)].astype(np.int64)
        return torch.from_numpy(window[:, :-1].copy()), torch.from_numpy(window[:, 1:].copy())
