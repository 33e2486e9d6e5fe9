"""Where things lie inside a slab: pure arithmetic over sizes, strides and offsets.

Owns: packing and the element order of a parameter in memory. Must not import backends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..backend.base import align_up


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Shape and strides of a dense tensor, and its dtype: enough to view a slab as it."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        n = 1
        for s in self.size:
            n *= s
        return n

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def view(self, raw: torch.Tensor, offset: int) -> torch.Tensor:
        """The tensor of this shape at byte `offset` of `raw` (uint8, 1-D)."""
        return flat(raw, offset, self.numel, self.dtype).as_strided(self.size, self.stride)


def flat(raw: torch.Tensor, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """1-D view of `numel` elements of `dtype` at byte `offset` of `raw` (uint8, 1-D)."""
    return raw[offset : offset + numel * dtype.itemsize].view(dtype)


def is_dense(size: Sequence[int], stride: Sequence[int]) -> bool:
    """Do the elements fill one stretch of memory without gaps or overlap?"""
    expected = 1
    for n, s in sorted(((n, s) for n, s in zip(size, stride, strict=True) if n != 1), key=lambda ns: ns[1]):
        if n == 0:
            return True
        if s != expected:
            return False
        expected *= n
    return True


def shape_of(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> Shape:
    """`tensor`'s shape with its own strides when dense (transposed, channels_last), else row-major."""
    size = tuple(tensor.shape)
    stride = tuple(tensor.stride())
    if not is_dense(size, stride):
        stride = contiguous_strides(size)
    return Shape(size=size, stride=stride, dtype=dtype or tensor.dtype)


def contiguous_strides(size: Sequence[int]) -> tuple[int, ...]:
    out = []
    step = 1
    for n in reversed(size):
        out.append(step)
        step *= max(n, 1)
    return tuple(reversed(out))


def pack(sizes_bytes: Sequence[int]) -> tuple[list[int], int]:
    """Offsets that put the sizes one after another, each aligned, and the total."""
    offsets = []
    at = 0
    for nbytes in sizes_bytes:
        offsets.append(at)
        at = align_up(at + nbytes)
    return offsets, at
