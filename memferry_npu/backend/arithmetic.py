"""The arithmetic of MemFerry, defined as pure numpy functions.

Owns: the exact result of every numeric step that a backend must reproduce bit
for bit (AdamW, the bf16 working weight, the split master, the gradient norm).
`docs/arithmetic.md` says the same in words. Must not import torch or anything
of memferry_npu: the C++, CUDA and Ascend C kernels are tested against this.

Arrays are numpy arrays of any shape unless said otherwise; fp32 means
`np.float32`. NaN results of AdamW and of the norm have the bits 0x7FC00000, so
that "bit-equal" has no exception. The caller's thread must not flush
subnormals to zero (`torch.set_flush_denormal(True)`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
U16 = npt.NDArray[np.uint16]
I16 = npt.NDArray[np.int16]

CHUNK = 65_536
"""Elements of a parameter whose squares are summed by one fixed tree."""

_EXPONENT = np.uint32(0x7F80_0000)
_MAGNITUDE = np.uint32(0x7FFF_FFFF)
_NAN_BITS = np.uint32(0x7FC0_0000)
_BF16_NAN = np.uint16(0x7FC0)
# Overflow to infinity and NaN are results here, not accidents.
_QUIET: dict[str, Any] = {"over": "ignore", "invalid": "ignore", "under": "ignore", "divide": "ignore"}


@dataclass(frozen=True)
class AdamwScalars:
    """Scalars of one AdamW step; each is a float that fp32 represents exactly."""

    decay: float
    """1 - lr * weight_decay; multiplies the parameter."""
    one_minus_beta1: float
    one_minus_beta2: float
    beta2: float
    step_size: float
    """lr / (1 - beta1**step); used negated."""
    sqrt_bc2: float
    """sqrt(1 - beta2**step)."""
    eps: float


def adamw_scalars(lr: float, beta1: float, beta2: float, eps: float, weight_decay: float, step: int) -> AdamwScalars:
    """Computes the scalars in double, then rounds each to fp32 once.

    `step` counts the parameter's updates from 1 (this update included). Raises
    ValueError for values outside the ranges that torch.optim.AdamW accepts.
    """
    if step < 1:
        raise ValueError(f"step counts from 1, got {step}")
    for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
        if not value >= 0.0:
            raise ValueError(f"{name} must be >= 0, got {value}")
    for name, value in (("beta1", beta1), ("beta2", beta2)):
        if not 0.0 <= value < 1.0:
            raise ValueError(f"{name} must be in [0, 1), got {value}")
    bc1 = 1 - beta1**step
    bc2 = 1 - beta2**step
    with np.errstate(**_QUIET):
        return AdamwScalars(
            decay=float(np.float32(1 - lr * weight_decay)),
            one_minus_beta1=float(np.float32(1 - beta1)),
            one_minus_beta2=float(np.float32(1 - beta2)),
            beta2=float(np.float32(beta2)),
            step_size=float(np.float32(lr / bc1)),
            sqrt_bc2=float(np.float32(bc2**0.5)),
            eps=float(np.float32(eps)),
        )


def fma32(a: npt.ArrayLike, b: npt.ArrayLike, c: npt.ArrayLike) -> F32:
    """a * b + c of fp32 values (broadcast), rounded once to fp32, nearest even.

    The product of two fp32 is exact in double. Its sum with c is rounded to odd
    in double, so the final rounding to fp32 (29 bits fewer) sees on which side
    of a tie the exact sum lies. Subnormal results, overflow, infinities and
    signed zeros come out as IEEE 754 asks; NaN payloads are not defined.
    """
    with np.errstate(**_QUIET):
        product = np.asarray(a, np.float32).astype(np.float64) * np.asarray(b, np.float32).astype(np.float64)
        addend = np.asarray(c, np.float32).astype(np.float64)
        total = np.asarray(product + addend)
        # TwoSum: `error` is exactly what `total` lost. It is NaN where total is not finite.
        part = total - product
        error = (product - (total - part)) + (addend - part)
        bits = total.view(np.int64)
        lost = np.isfinite(total) & (error != 0) & ((bits & 1) == 0)
        outward = (error > 0) == (total > 0)
        odd = bits + np.where(lost, np.where(outward, 1, -1), 0)
        return np.asarray(odd.view(np.float64).astype(np.float32))


def flush_subnormal(x: F32) -> F32:
    """x with +0 where its exponent field is 0: subnormals and -0 become +0."""
    bits = _bits(x)
    return np.where((bits & _EXPONENT) == 0, np.uint32(0), bits).view(np.float32)


def canonical_nan(x: F32) -> F32:
    """x with the bits 0x7FC00000 in place of every NaN."""
    bits = _bits(x)
    return np.where((bits & _MAGNITUDE) > _EXPONENT, _NAN_BITS, bits).view(np.float32)


def adamw(
    p: F32, m: F32, v: F32, g: F32, scalars: AdamwScalars, coef: float | np.float32 = 1.0
) -> tuple[F32, F32, F32]:
    """One AdamW step on the fp32 master. Returns the new (p, m, v); inputs stay.

    p, m, v, g: fp32 of one shape. `coef` is the clip coefficient, rounded to
    fp32; exactly 1.0 leaves the gradient as it is.
    """
    f = np.float32
    with np.errstate(**_QUIET):
        if f(coef) != f(1.0):
            g = np.multiply(g, f(coef), dtype=np.float32)
        p = np.multiply(p, f(scalars.decay), dtype=np.float32)
        m = fma32(f(scalars.one_minus_beta1), g - m, m)
        v = fma32(f(scalars.one_minus_beta2) * g, g, f(scalars.beta2) * v)
        m = canonical_nan(flush_subnormal(m))
        v = canonical_nan(flush_subnormal(v))
        denominator = np.sqrt(v) / f(scalars.sqrt_bc2) + f(scalars.eps)
        p = np.add(p, (f(-scalars.step_size) * m) / denominator, dtype=np.float32)
    return canonical_nan(p), m, v


def round_bf16(master: F32) -> U16:
    """bf16 bits of the working weight: nearest, ties away from 0; NaN is 0x7FC0."""
    bits = _bits(master)
    rounded = ((bits + np.uint32(0x8000)) >> np.uint32(16)).astype(np.uint16)
    return np.where((bits & _MAGNITUDE) > _EXPONENT, _BF16_NAN, rounded)


def bf16_to_f32(bits: U16) -> F32:
    """The fp32 values of bf16 bits, exactly (NaN payloads too)."""
    return (np.asarray(bits, np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)


def split_master(master: F32) -> tuple[U16, I16]:
    """(hi, lo) with master bits = (hi << 16) + lo. hi is `round_bf16(master)`.

    Exact for every master that is not NaN; NaN becomes 0x7FC00000 (lo 0).
    """
    bits = _bits(canonical_nan(master))
    hi = round_bf16(master)
    low = (bits & np.uint32(0xFFFF)).astype(np.uint16).view(np.int16)
    return hi, low


def join_master(hi: U16, lo: I16) -> F32:
    """The fp32 master that `split_master` split: bits (hi << 16) + lo, modulo 2**32."""
    high = np.asarray(hi, np.uint16).astype(np.uint32) << np.uint32(16)
    return (high + np.asarray(lo, np.int16).astype(np.int32).view(np.uint32)).view(np.float32)


def chunk_count(n: int) -> int:
    """Chunks of a parameter of n elements; 0 for 0."""
    return -(-n // CHUNK)


def chunk_sums(g: F32) -> F32:
    """Sums of squares of g (fp32, flattened) per chunk: fp32[chunk_count(g.size)].

    Within a chunk every operation is rounded to fp32: s[i] = x[i] * x[i], 0 past
    the end; then for h = 32768, 16384, ..., 1: s[i] += s[i + h] for i < h.
    """
    flat = np.ascontiguousarray(g, np.float32).reshape(-1)
    out = np.empty(chunk_count(flat.size), np.float32)
    with np.errstate(**_QUIET):
        for index in range(out.size):
            x = flat[index * CHUNK : (index + 1) * CHUNK]
            s = np.zeros(CHUNK, np.float32)
            np.multiply(x, x, out=s[: x.size])
            h = CHUNK // 2
            while h:
                s[:h] += s[h : 2 * h]
                h //= 2
            out[index] = s[0]
    return canonical_nan(out)


def has_nonfinite(g: F32) -> bool:
    """Whether any element of g (fp32) is infinite or NaN: exponent field all ones."""
    return bool(((_bits(g) & _EXPONENT) == _EXPONENT).any())


def global_norm(sums: Iterable[F32]) -> float:
    """L2 norm from the `chunk_sums` of every parameter, in parameter order.

    Added one after the other in double; the root is taken in double.
    """
    total = 0.0
    for array in sums:
        for value in array.tolist():
            total += value
    return math.sqrt(total)


def clip_coef(norm: float, max_norm: float) -> np.float32:
    """fp32(min(1, max_norm / (norm + 1e-6))), computed in double; NaN for a NaN norm."""
    coef = max_norm / (norm + 1e-6)
    return np.float32(1.0 if coef >= 1.0 else coef)


def skips_step(nonfinite: bool, norm: float | None) -> bool:
    """Whether `step()` leaves everything as it was.

    True iff a gradient element is not finite, or clipping is on (`norm` given)
    and the norm is not finite (finite elements can overflow it).
    """
    return nonfinite or (norm is not None and not math.isfinite(norm))


def _bits(x: F32) -> npt.NDArray[np.uint32]:
    return np.ascontiguousarray(x, np.float32).view(np.uint32)
