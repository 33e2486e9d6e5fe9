"""The backend protocol: the few things a device must offer to run MemFerry.

Owns: errors, `Span`, and the protocols for buffers, streams, events and the
backend itself. `sim`, `cuda` and `ascend` implement it; nothing above
`backend/` may import torch.cuda or torch.npu. Must not import anything of
memferry_npu outside `backend/`.

Addresses. A host buffer has an address for the CPU and the copy engines and,
per device, one for kernels. They may differ and are never converted into each
other: code above this line passes `Span`s and tensors, not pointers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

PROTOCOL_VERSION = 1
"""Raised whenever a method of `Backend` changes; checkpoints and reports carry it."""

ALIGN_BYTES = 256
"""Start of every parameter in every storage. BLAS results may depend on alignment, so
all storages of a parameter are aligned alike; 256 B also suits vector units and DMA."""

GIB = 1 << 30


def align_up(nbytes: int, to: int = ALIGN_BYTES) -> int:
    """The least multiple of `to` that is at least `nbytes`."""
    return -(-nbytes // to) * to


def format_bytes(nbytes: int) -> str:
    """`nbytes` for people: whole bytes below 1 KiB, else KiB/MiB/GiB with two digits."""
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB"):
        if abs(value) < 1024:
            return f"{int(value)} B" if unit == "B" else f"{value:.2f} {unit}"
        value /= 1024
    return f"{value:.2f} GiB"


class OutOfMemoryError(torch.OutOfMemoryError):
    """A tier is full. Carries what a user needs to change something.

    Args:
        tier: "device 0", "pinned host", ...
        unit: the unit (or activity) that asked.
        asked_bytes, free_bytes: what was asked and what was left of the tier's cap.
        cap_bytes: size of the tier, or of the budget set for it.
        hint: what to change.
    """

    def __init__(self, *, tier: str, unit: str, asked_bytes: int, free_bytes: int, cap_bytes: int, hint: str) -> None:
        self.tier, self.unit, self.hint = tier, unit, hint
        self.asked_bytes, self.free_bytes, self.cap_bytes = asked_bytes, free_bytes, cap_bytes
        super().__init__(
            f"out of memory on {tier}: {unit} asked for {format_bytes(asked_bytes)}, "
            f"{format_bytes(free_bytes)} of {format_bytes(cap_bytes)} are free; {hint}"
        )


class RaceError(RuntimeError):
    """Two accesses to the same memory are not ordered. Found by the sim backend."""


class BackendError(RuntimeError):
    """A device call failed, or an address was used where it is not valid."""


@runtime_checkable
class Buffer(Protocol):
    """Memory of exact size with a stable address, in host or device memory."""

    nbytes: int
    label: str

    def close(self) -> None:
        """Release the memory. The views become invalid; closing twice is harmless."""


class HostBuffer(Buffer, Protocol):
    """Page-locked host memory that kernels of the device can address too."""

    def cpu(self) -> torch.Tensor:
        """uint8 [nbytes]: for the CPU (and the copy engines)."""

    def mapped(self) -> torch.Tensor:
        """uint8 [nbytes]: a device tensor over the same bytes, for kernels."""


class DeviceBuffer(Buffer, Protocol):
    """Device memory that lives as long as the run: slots, resident weights."""

    def tensor(self) -> torch.Tensor:
        """uint8 [nbytes]: the device tensor over the whole buffer."""


@dataclass(frozen=True, slots=True)
class Span:
    """`nbytes` bytes at `offset` of a buffer: what copies and access reports name."""

    buffer: HostBuffer | DeviceBuffer
    offset: int
    nbytes: int


Place = Span | torch.Tensor
"""An end of a copy: a span of a buffer, or a dense device tensor that autograd made."""


class Event(Protocol):
    """A point in a stream's work."""

    def synchronize(self) -> None:
        """Block the calling thread until the work before the event is done."""


class Stream(Protocol):
    """Work of one queue of the device, in order."""

    name: str

    def record(self) -> Event:
        """An event after everything that is in the stream now."""

    def wait(self, event: Event) -> None:
        """What is put into this stream from now on runs after `event`. Does not block."""


class HostFlag(Protocol):
    """Set by one thread, waited for by others; orders the memory accesses of both."""

    def set(self) -> None: ...

    def clear(self) -> None: ...

    def is_set(self) -> bool: ...

    def wait(self) -> None:
        """Block (GIL released) until set, or raise what `fail` was given."""

    def fail(self, error: BaseException) -> None:
        """Wake all waiters with `error`."""


@dataclass(frozen=True, slots=True)
class Counters:
    """Bytes and objects since the backend was made. All monotone but `*_used_bytes`."""

    h2d_bytes: int
    d2h_bytes: int
    dha_read_bytes: int
    dha_write_bytes: int
    buffers_created: int
    streams_created: int
    device_used_bytes: int
    device_static_bytes: int
    device_peak_bytes: int
    device_cap_bytes: int
    host_used_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Figures of the work between two marks."""

    seconds: float
    compute_busy_s: float
    h2d_bytes: int
    """By copy engine or by kernels that read host memory."""
    d2h_bytes: int
    simulated: bool

    @property
    def stall_fraction(self) -> float:
        """Share of the time in which the compute stream waited."""
        return 1.0 - self.compute_busy_s / self.seconds if self.seconds > 0 else 0.0


@runtime_checkable
class Backend(Protocol):
    """One device, seen from one process.

    Methods that put work on a stream return at once. None of them allocates
    device memory except `device_buffer`.
    """

    @property
    def name(self) -> str: ...

    @property
    def device(self) -> torch.device:
        """Where device tensors live for torch."""

    @property
    def compute(self) -> Stream:
        """The user's kernels and ours."""

    @property
    def h2d(self) -> Stream:
        """Loads, by copy engine."""

    @property
    def d2h(self) -> Stream:
        """Stores, by copy engine."""

    def host_buffer(self, nbytes: int, label: str) -> HostBuffer:
        """Exactly `nbytes` (page-rounded) of pinned, mapped host memory. Raises OutOfMemoryError."""

    def device_buffer(self, nbytes: int, label: str) -> DeviceBuffer:
        """`nbytes` of device memory. Raises OutOfMemoryError."""

    def copy(self, stream: Stream, pairs: Sequence[tuple[Place, Place]]) -> None:
        """Copy (destination, source) pairs of equal size, in order, on a copy stream."""

    def grad_stats(self, src: torch.Tensor, chunk_sums: torch.Tensor, nonfinite: torch.Tensor) -> None:
        """Kernel on the compute stream: statistics of a gradient (docs/arithmetic.md).

        Args:
            src: bf16 or fp32 [n], device memory or a mapped view, contiguous.
            chunk_sums: fp32 [ceil(n / 65536)], likewise; squared sums per chunk.
            nonfinite: int32 [1], likewise; set to 1 where `src` has a NaN or an infinity, else to 0.
        """

    def grad_write(
        self,
        src: torch.Tensor,
        dst: torch.Tensor,
        accumulate: bool,
        chunk_sums: torch.Tensor,
        nonfinite: torch.Tensor,
    ) -> None:
        """Kernel on the compute stream: `dst = src`, or `dst += src` in fp32, with the statistics of `dst`.

        Args:
            dst: [n] of the dtype of `src`, or fp32; device memory or a mapped view, contiguous.
            src, chunk_sums, nonfinite: as in `grad_stats`.
        """

    def host_access(
        self, name: str, *, reads: Iterable[Span] = (), writes: Iterable[Span] = (), threads: int | None = 1
    ) -> None:
        """Report what the calling thread is about to read and write in host buffers, with how many
        threads (None: as many as the host has cores)."""

    def host_flag(self) -> HostFlag:
        """A new flag, not set."""

    def adopt(self, tensor: torch.Tensor, label: str) -> None:
        """Count an existing tensor (a module buffer) as device memory until it is freed."""

    def limit_memory(self, device_bytes: int | None, host_bytes: int | None) -> None:
        """Lower what the run may use of each tier; None leaves it at what there is."""

    def session(self) -> AbstractContextManager[None]:
        """Active while models run on this backend; leaving it detaches every interception."""

    def internal(self) -> AbstractContextManager[None]:
        """The runtime's own bookkeeping (making views): neither charged nor checked."""

    def label(self, unit: str) -> None:
        """Name the unit that works now, for error messages and timelines."""

    def synchronize(self) -> None:
        """Block until every stream is idle."""

    def counters(self) -> Counters: ...

    def mark(self) -> Window:
        """Figures of the work since the last mark."""

    def invalidate(self, span: Span, reason: str) -> None:
        """The span holds nothing that may be used until `validate`. Checked where it can be."""

    def validate(self, span: Span) -> None: ...

    def close(self) -> None:
        """Release all buffers. Closing twice is harmless."""
