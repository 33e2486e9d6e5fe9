"""The host's numeric work on CPU tensors: AdamW, gradient statistics, copies.

Owns: `HostOps` and its two implementations, C++ (`NativeHostOps`) and numpy
(`NumpyHostOps`), which give the same bits, and the choice between them. May
import only torch, numpy and, of memferry_npu, `abi`, `arithmetic`, `build` and `hostargs`.

Tensors are 1-D contiguous CPU tensors in memory order unless a method says
otherwise; anything else raises ValueError before memory is touched. Tensors of
0 elements are fine everywhere. Methods may be called from several threads.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import warnings
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
import torch

from . import abi, arithmetic, build
from .arithmetic import AdamwScalars
from .hostargs import (
    GRAD_DTYPES,
    AdamwBuffers,
    require_bytes,
    require_copy,
    require_master,
    require_stats,
    require_write,
)

__all__ = ["AdamwBuffers", "AdamwScalars", "HostOps", "NativeHostOps", "NumpyHostOps", "load_host_ops"]


class HostOps(Protocol):
    """What the runtime asks of the host's cores."""

    name: str
    """"native" or "numpy"."""
    threads: int
    info: dict[str, Any]
    """For the environment report: abi_version, compiler, flags, simd."""
    cause: str | None
    """Why this is not the native implementation; None if it is."""

    def adamw(self, buffers: AdamwBuffers, scalars: AdamwScalars, coef: float) -> None:
        """One AdamW step in place; the gradient is multiplied by fp32(coef)."""

    def grad_stats(self, grad: torch.Tensor, chunk_sums_out: torch.Tensor) -> bool:
        """Writes fp32[chunk_count(n)] sums of squares; returns whether an element is not finite."""

    def grad_write(self, grad: torch.Tensor, dst: torch.Tensor, accumulate: bool, chunk_sums_out: torch.Tensor) -> bool:
        """dst = grad (same dtype, or fp32 from bf16), or fp32 dst += grad; statistics of what was written."""

    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        """Copies the bytes of src; any contiguous shapes and dtypes of one size in bytes."""

    def copy_raw(self, dst_ptr: int, src_ptr: int, nbytes: int) -> None:
        """Copies between CPU addresses that the caller keeps alive; no overlap."""

    def split(self, master: torch.Tensor, hi_bf16: torch.Tensor, low: torch.Tensor) -> None:
        """fp32 master to (bf16 working weight, int16 low half)."""

    def join(self, hi_bf16: torch.Tensor, low: torch.Tensor, master_out: torch.Tensor) -> None:
        """The inverse of `split`."""

    def round_bf16(self, master: torch.Tensor, out_bf16: torch.Tensor) -> None:
        """fp32 master to the bf16 working weight."""


def load_host_ops(threads: int | None = None) -> HostOps:
    """The native ops, built if need be; numpy with one warning that names the cause if they cannot be.

    threads: most threads of one call; None for one per core this process may use.
    """
    try:
        return NativeHostOps(threads)
    except (build.BuildError, abi.OpError, OSError, AttributeError) as error:
        cause = str(error)
    warnings.warn(
        f"memferry_npu runs its host optimizer in numpy (same results, many times slower): {cause}",
        RuntimeWarning,
        stacklevel=2,
    )
    return NumpyHostOps(threads, cause)


class NativeHostOps:
    """The C++ implementation. Every call releases the GIL."""

    name = "native"
    cause: str | None = None

    def __init__(self, threads: int | None = None) -> None:
        self.threads = _thread_count(threads)
        built = build.build_host_ops()
        try:
            self._library = abi.OpsLibrary(built.path)
        finally:
            if built.private is not None:
                shutil.rmtree(built.private, ignore_errors=True)
        self._ctx = abi.Ctx(device=-1, max_cores=self.threads)
        query = self._library.info
        self.info: dict[str, Any] = {
            "abi_version": query.abi_version,
            "compiler": built.compiler,
            "flags": " ".join(built.flags),
            "simd": query.simd.decode(),
            "has_fma": bool(query.has_fma),
        }
        _self_check(self)

    def adamw(self, buffers: AdamwBuffers, scalars: AdamwScalars, coef: float) -> None:
        b = buffers
        args = abi.AdamwHostArgs(
            grad=b.grad.data_ptr(),
            exp_avg=b.exp_avg.data_ptr(),
            exp_avg_sq=b.exp_avg_sq.data_ptr(),
            master=None if b.master is None else b.master.data_ptr(),
            working=None if b.working is None else b.working.data_ptr(),
            low=None if b.low is None else b.low.data_ptr(),
            n=b.grad.numel(),
            grad_dtype=GRAD_DTYPES[b.grad.dtype],
            threads=self.threads,
            scalars=abi.AdamwScalarsStruct(
                scalars.decay,
                scalars.one_minus_beta1,
                scalars.one_minus_beta2,
                scalars.beta2,
                scalars.step_size,
                scalars.sqrt_bc2,
                scalars.eps,
                coef,
            ),
        )
        self._library.call(self._ctx, args)

    def grad_stats(self, grad: torch.Tensor, chunk_sums_out: torch.Tensor) -> bool:
        n = require_stats(grad, chunk_sums_out)
        flag = ctypes.c_uint32(0)
        args = abi.GradStatsArgs(
            grad=grad.data_ptr(),
            chunk_sums=chunk_sums_out.data_ptr(),
            nonfinite=ctypes.addressof(flag),
            n=n,
            grad_dtype=GRAD_DTYPES[grad.dtype],
        )
        self._library.call(self._ctx, args)
        return bool(flag.value)

    def grad_write(self, grad: torch.Tensor, dst: torch.Tensor, accumulate: bool, chunk_sums_out: torch.Tensor) -> bool:
        n = require_write(grad, dst, accumulate, chunk_sums_out)
        flag = ctypes.c_uint32(0)
        args = abi.GradWriteArgs(
            grad=grad.data_ptr(),
            dst=dst.data_ptr(),
            chunk_sums=chunk_sums_out.data_ptr(),
            nonfinite=ctypes.addressof(flag),
            n=n,
            grad_dtype=GRAD_DTYPES[grad.dtype],
            dst_dtype=GRAD_DTYPES[dst.dtype],
            accumulate=int(accumulate),
        )
        self._library.call(self._ctx, args)
        return bool(flag.value)

    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        self.copy_raw(dst.data_ptr(), src.data_ptr(), require_copy(dst, src))

    def copy_raw(self, dst_ptr: int, src_ptr: int, nbytes: int) -> None:
        self._library.call(self._ctx, abi.CopyArgs(dst=dst_ptr, src=src_ptr, bytes=require_bytes(nbytes)))

    def split(self, master: torch.Tensor, hi_bf16: torch.Tensor, low: torch.Tensor) -> None:
        self._convert(abi.MASTER_SPLIT, master, hi_bf16, low)

    def join(self, hi_bf16: torch.Tensor, low: torch.Tensor, master_out: torch.Tensor) -> None:
        self._convert(abi.MASTER_JOIN, master_out, hi_bf16, low)

    def round_bf16(self, master: torch.Tensor, out_bf16: torch.Tensor) -> None:
        self._convert(abi.MASTER_ROUND, master, out_bf16, None)

    def _convert(self, mode: int, master: torch.Tensor, hi: torch.Tensor, low: torch.Tensor | None) -> None:
        n = require_master(master, hi, low)
        args = abi.MasterHostArgs(
            master=master.data_ptr(),
            working=hi.data_ptr(),
            low=None if low is None else low.data_ptr(),
            n=n,
            mode=mode,
            threads=self.threads,
        )
        self._library.call(self._ctx, args)


class NumpyHostOps:
    """`arithmetic` in blocks, so that temporaries stay small. One thread; holds the GIL for most of it."""

    name = "numpy"
    _BLOCK = arithmetic.CHUNK

    def __init__(self, threads: int | None = None, cause: str | None = None) -> None:
        self.threads = _thread_count(threads)
        self.cause = cause
        self.info: dict[str, Any] = {
            "abi_version": abi.ABI_VERSION,
            "compiler": None,
            "flags": None,
            "simd": f"numpy {np.__version__}",
        }

    def adamw(self, buffers: AdamwBuffers, scalars: AdamwScalars, coef: float) -> None:
        b = buffers
        grad, m, v = _array(b.grad), _array(b.exp_avg), _array(b.exp_avg_sq)
        master = None if b.master is None else _array(b.master)
        working = None if b.working is None else _array(b.working)
        low = None if b.low is None else _array(b.low)
        with _gradual_underflow():
            for at in self._blocks(b.grad.numel()):
                if master is not None:
                    p = master[at]
                else:
                    assert working is not None and low is not None
                    p = arithmetic.join_master(working[at], low[at])
                p, m[at], v[at] = arithmetic.adamw(p, m[at], v[at], _widen(grad[at]), scalars, coef)
                if master is not None:
                    master[at] = p
                if working is not None:
                    working[at], half = arithmetic.split_master(p)
                    if low is not None:
                        low[at] = half

    def grad_stats(self, grad: torch.Tensor, chunk_sums_out: torch.Tensor) -> bool:
        require_stats(grad, chunk_sums_out)
        return self._stats(_array(grad), _array(chunk_sums_out))

    def grad_write(self, grad: torch.Tensor, dst: torch.Tensor, accumulate: bool, chunk_sums_out: torch.Tensor) -> bool:
        n = require_write(grad, dst, accumulate, chunk_sums_out)
        source, target = _array(grad), _array(dst)
        with _gradual_underflow(), np.errstate(all="ignore"):
            for at in self._blocks(n):
                if accumulate:
                    target[at] = arithmetic.canonical_nan(target[at] + _widen(source[at]))
                elif source.dtype == target.dtype:
                    target[at] = source[at]
                else:
                    target[at] = _widen(source[at])
        return self._stats(target, _array(chunk_sums_out))

    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        self.copy_raw(dst.data_ptr(), src.data_ptr(), require_copy(dst, src))

    def copy_raw(self, dst_ptr: int, src_ptr: int, nbytes: int) -> None:
        if require_bytes(nbytes):
            if not dst_ptr or not src_ptr:
                raise abi.OpError(abi.EINVAL, "copy: a pointer is null")
            if abs(dst_ptr - src_ptr) < nbytes:
                raise abi.OpError(abi.EINVAL, "copy: dst and src overlap")
            ctypes.memmove(dst_ptr, src_ptr, nbytes)

    def split(self, master: torch.Tensor, hi_bf16: torch.Tensor, low: torch.Tensor) -> None:
        n = require_master(master, hi_bf16, low)
        source, hi, half = _array(master), _array(hi_bf16), _array(low)
        for at in self._blocks(n):
            hi[at], half[at] = arithmetic.split_master(source[at])

    def join(self, hi_bf16: torch.Tensor, low: torch.Tensor, master_out: torch.Tensor) -> None:
        n = require_master(master_out, hi_bf16, low)
        target, hi, half = _array(master_out), _array(hi_bf16), _array(low)
        for at in self._blocks(n):
            target[at] = arithmetic.join_master(hi[at], half[at])

    def round_bf16(self, master: torch.Tensor, out_bf16: torch.Tensor) -> None:
        n = require_master(master, out_bf16, None)
        source, out = _array(master), _array(out_bf16)
        for at in self._blocks(n):
            out[at] = arithmetic.round_bf16(source[at])

    def _stats(self, values: Any, sums: Any) -> bool:
        nonfinite = False
        with _gradual_underflow():
            for index, at in enumerate(self._blocks(values.size)):
                block = _widen(values[at])
                sums[index] = arithmetic.chunk_sums(block)[0]
                nonfinite = arithmetic.has_nonfinite(block) or nonfinite
        return nonfinite

    def _blocks(self, n: int) -> Iterator[slice]:
        return (slice(begin, min(begin + self._BLOCK, n)) for begin in range(0, n, self._BLOCK))


_NUMPY_DTYPES: dict[torch.dtype, Any] = {
    torch.float32: np.float32,
    torch.bfloat16: np.uint16,
    torch.int16: np.int16,
}


def _array(tensor: torch.Tensor) -> Any:
    """A numpy view of a checked tensor. By address, so that no torch operator runs (a dispatch mode may be on)."""
    dtype = np.dtype(_NUMPY_DTYPES[tensor.dtype])
    n = tensor.numel()
    if n == 0:
        return np.empty(0, dtype)
    raw = (ctypes.c_char * (n * dtype.itemsize)).from_address(tensor.data_ptr())
    return np.frombuffer(raw, dtype)


def _widen(values: Any) -> Any:
    return arithmetic.bf16_to_f32(values) if values.dtype == np.uint16 else values


@contextlib.contextmanager
def _gradual_underflow() -> Iterator[None]:
    """Turns off flush-to-zero in this thread for a while, if torch.set_flush_denormal(True) turned it on."""
    flushes = bool(np.full(1, 2.0**-126, np.float32)[0] * np.float32(0.5) == 0)
    if flushes:
        torch.set_flush_denormal(False)
    try:
        yield
    finally:
        if flushes:
            torch.set_flush_denormal(True)


def _thread_count(threads: int | None) -> int:
    if threads is None:
        return max(1, len(os.sched_getaffinity(0)))
    if not 1 <= threads <= 1024:
        raise ValueError(f"threads must be in 1..1024, got {threads}")
    return threads


def _self_check(native: NativeHostOps) -> None:
    """Raises OpError if the compiled AdamW differs from `arithmetic` in one bit (a compiler that contracts, say)."""
    rng = np.random.default_rng(0)
    scale = np.exp2(rng.integers(-70, 20, 512)).astype(np.float32)
    p, m, g = (rng.standard_normal(512).astype(np.float32) * scale for _ in range(3))
    arrays = [p, m, m * m, g]
    scalars = arithmetic.adamw_scalars(1e-2, 0.9, 0.99, 1e-8, 0.1, 3)
    tensors = [torch.from_numpy(array.copy()) for array in arrays]
    native.adamw(AdamwBuffers(tensors[3], tensors[1], tensors[2], tensors[0]), scalars, 0.75)
    with _gradual_underflow():
        expected = arithmetic.adamw(p, m, m * m, g, scalars, 0.75)
    for name, tensor, want in zip(("p", "exp_avg", "exp_avg_sq"), tensors, expected, strict=False):
        if _array(tensor).tobytes() != want.tobytes():
            raise abi.OpError(abi.EUNSUPPORTED, f"the compiled AdamW fails its self-check in {name}")
