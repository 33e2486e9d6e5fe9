"""What the host ops accept: `AdamwBuffers` and the checks of tensor arguments.

Owns: the ValueErrors of `hostops`, one sentence each, raised before memory is
touched. May import only torch and, of memferry_npu, `abi` and `arithmetic`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from . import abi
from .arithmetic import chunk_count

GRAD_DTYPES = {torch.float32: abi.F32, torch.bfloat16: abi.BF16}
"""Dtypes a gradient may have, and their codes in the ABI."""


@dataclass(frozen=True)
class AdamwBuffers:
    """Where one parameter's gradient and state lie; n elements each, none overlapping.

    Three layouts: `master` (fp32 parameter); `master` and `working` (fp32 master
    with its bf16 working copy); `working` and `low` (split master).
    """

    grad: torch.Tensor
    """fp32 or bf16; only read."""
    exp_avg: torch.Tensor
    """fp32."""
    exp_avg_sq: torch.Tensor
    """fp32."""
    master: torch.Tensor | None = None
    """fp32."""
    working: torch.Tensor | None = None
    """bf16; written, and read only in the split layout."""
    low: torch.Tensor | None = None
    """int16."""

    def __post_init__(self) -> None:
        n = require("grad", self.grad, tuple(GRAD_DTYPES))
        require("exp_avg", self.exp_avg, (torch.float32,), n)
        require("exp_avg_sq", self.exp_avg_sq, (torch.float32,), n)
        if self.master is not None:
            require("master", self.master, (torch.float32,), n)
        if self.working is not None:
            require("working", self.working, (torch.bfloat16,), n)
        if self.low is not None:
            require("low", self.low, (torch.int16,), n)
        split = self.low is not None
        if split and (self.master is not None or self.working is None):
            raise ValueError("a split master is working and low, without master")
        if not split and self.master is None:
            raise ValueError("give master, or master and working, or working and low")


def require(name: str, tensor: torch.Tensor, dtypes: tuple[torch.dtype, ...], n: int | None = None) -> int:
    """The tensor's size; ValueError unless it is 1-D, contiguous, on the CPU, of a dtype and size asked for."""
    if tensor.dtype not in dtypes:
        raise ValueError(f"{name} must be {' or '.join(map(str, dtypes))}, got {tensor.dtype}")
    if tensor.device.type != "cpu":
        raise ValueError(f"{name} must be on the CPU, got {tensor.device}")
    if tensor.dim() != 1 or not tensor.is_contiguous():
        raise ValueError(f"{name} must be 1-D and contiguous, got {tuple(tensor.shape)} with {tensor.stride()}")
    size = tensor.numel()
    if n is not None and size != n:
        raise ValueError(f"{name} must have {n} elements, got {size}")
    return size


def require_stats(grad: torch.Tensor, sums: torch.Tensor) -> int:
    n = require("grad", grad, tuple(GRAD_DTYPES))
    require("chunk_sums_out", sums, (torch.float32,), chunk_count(n))
    return n


def require_write(grad: torch.Tensor, dst: torch.Tensor, accumulate: bool, sums: torch.Tensor) -> int:
    n = require_stats(grad, sums)
    widened = accumulate or grad.dtype == torch.float32
    require("dst", dst, (torch.float32,) if widened else tuple(GRAD_DTYPES), n)
    return n


def require_master(master: torch.Tensor, hi: torch.Tensor, low: torch.Tensor | None) -> int:
    n = require("master", master, (torch.float32,))
    require("hi_bf16", hi, (torch.bfloat16,), n)
    if low is not None:
        require("low", low, (torch.int16,), n)
    return n


def require_copy(dst: torch.Tensor, src: torch.Tensor) -> int:
    for name, tensor in (("dst", dst), ("src", src)):
        if tensor.device.type != "cpu" or not tensor.is_contiguous():
            raise ValueError(f"{name} must be a contiguous CPU tensor")
    if dst.nbytes != src.nbytes:
        raise ValueError(f"dst has {dst.nbytes} bytes and src {src.nbytes}")
    return src.nbytes


def require_bytes(nbytes: int) -> int:
    if nbytes < 0:
        raise ValueError(f"nbytes must be >= 0, got {nbytes}")
    return nbytes
