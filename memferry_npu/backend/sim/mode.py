"""The dispatch mode that makes CPU tensors behave like tensors of a small device.

Owns: mapping storages to charged memory and reporting every op's reads and writes
to the checker. Active between `__enter__` and `__exit__` of `SimBackend.session()`
and only in the thread that entered it. Must not know about units, plans or optimizers.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ..base import BackendError
from .checker import Region, Timeline

if TYPE_CHECKING:
    from .backend import SimBackend

CHARGE_BYTES = 512
"""Block size of the device allocator that charges are rounded up to."""


class Record:
    """What is known of one storage: its region, and how it may be used."""

    __slots__ = ("buffer", "charged", "cpu_side", "ptr", "ref", "region")

    def __init__(self, ptr: int, region: Region, *, cpu_side: bool = False, buffer: object = None) -> None:
        self.ptr, self.region, self.cpu_side, self.buffer = ptr, region, cpu_side, buffer
        self.charged = 0
        self.ref: weakref.ref[Any] | None = None


def byte_range(t: torch.Tensor) -> tuple[int, int]:
    """[lo, hi) in bytes from the start of the storage that elements of `t` span."""
    if t.numel() == 0:
        return 0, 0
    item = t.element_size()
    lo = int(t.storage_offset()) * item
    if t.is_contiguous():
        return lo, lo + int(t.numel()) * item
    return lo, lo + (sum((int(n) - 1) * int(s) for n, s in zip(t.shape, t.stride(), strict=True)) + 1) * item


def _has_memory(t: torch.Tensor) -> bool:
    """Meta tensors and sparse ones have no storage of their own to look at."""
    return t.device.type == "cpu" and t.layout is torch.strided


class _OpInfo:
    """What the schema says of one op; looked up once per op."""

    __slots__ = ("name", "view", "writes_args", "writes_kwargs")

    def __init__(self, func: Any) -> None:
        schema = func._schema
        self.name = str(func)
        self.writes_args: frozenset[int] = frozenset(
            i for i, a in enumerate(schema.arguments) if a.alias_info is not None and a.alias_info.is_write
        )
        self.writes_kwargs: frozenset[str] = frozenset(
            a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write
        )
        self.view = not self.writes_args and any(r.alias_info is not None for r in schema.returns)


def _tensors(value: Any, out: list[torch.Tensor]) -> None:
    if isinstance(value, torch.Tensor):
        out.append(value)
    elif isinstance(value, list | tuple):
        for item in value:
            _tensors(item, out)


_MATMULS = {"mm", "addmm", "bmm", "baddbmm", "linear", "mkldnn_linear"}


def _flops(func: Any, reads: list[torch.Tensor], outs: list[torch.Tensor]) -> float:
    """2 M N K of matrix products; attention as two products; 0 for everything else."""
    name = func._schema.name.split("::")[1]
    if name in _MATMULS and outs:
        return 2.0 * outs[0].numel() * reads[-2].shape[-1]
    if "attention" in name and len(reads) >= 3:
        q, k = (reads[1], reads[2]) if "backward" in name else (reads[0], reads[1])
        scale = 10.0 if "backward" in name else 4.0
        return scale * q.numel() * k.shape[-2]
    return 0.0


class SimMode(TorchDispatchMode):
    """State over time: the storages that are alive on the device."""

    def __init__(self, backend: SimBackend) -> None:
        super().__init__()
        self._backend = backend
        self._info: dict[Any, _OpInfo] = {}
        self.records: dict[int, Record] = {}
        self.paused = 0
        self.failure: BaseException | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.paused:
            return func(*args, **kwargs)
        if self.failure is not None:
            failure, self.failure = self.failure, None
            raise failure
        info = self._info.get(func)
        if info is None:
            info = self._info[func] = _OpInfo(func)
        if info.view:
            return func(*args, **kwargs)
        reads: list[torch.Tensor] = []
        writes: list[torch.Tensor] = []
        for i, value in enumerate(args):
            _tensors(value, writes if i in info.writes_args else reads)
        for key, value in kwargs.items():
            _tensors(value, writes if key in info.writes_kwargs else reads)
        backend = self._backend
        if self._on_host(info.name, reads, writes):
            return func(*args, **kwargs)
        with backend.lock:
            timeline = backend.compute.begin()
            dha_read = self.report(timeline, reads, info.name, write=False)
            dha_write = self.report(timeline, writes, info.name, write=True)
        result = func(*args, **kwargs)
        outs: list[torch.Tensor] = []
        _tensors(result, outs)
        with backend.lock:
            for out in outs:
                self._produced(timeline, out, info.name)
            nbytes = sum(t.numel() * t.element_size() for group in (reads, writes, outs) for t in group)
            seconds = backend.kernel_model.seconds(nbytes - dha_read - dha_write, _flops(func, reads, outs))
            backend.clock.kernel(seconds, dha_read, dha_write)
            backend.count_dha(dha_read, dha_write)
        return result

    def _record(self, t: torch.Tensor) -> Record | None:
        if not _has_memory(t):
            return None
        return self.records.get(t.untyped_storage().data_ptr())

    def _on_host(self, op: str, reads: list[torch.Tensor], writes: list[torch.Tensor]) -> bool:
        """Is this an op of the CPU on host tensors (optimizer state)? Then report it as the host's.

        A copy between a host tensor and a device tensor is one that blocks, as in torch.

        Raises:
            BackendError: the op mixes host tensors with device tensors.
        """
        found = [(self._record(t), t, False) for t in reads] + [(self._record(t), t, True) for t in writes]
        host = [record for record, _, _ in found if record is not None and record.cpu_side]
        if not host:
            return False
        device = [t for record, t, _ in found if record is not None and not record.cpu_side]
        backend = self._backend
        if device:
            if op not in ("aten.copy_.default", "aten._to_copy.default") and any(t.dim() for t in device):
                raise BackendError(
                    f"'{op}' mixes the CPU tensor '{host[0].region.label}' with device tensors; move one of them"
                )
            backend.compute.record().synchronize()
        with backend.lock:
            timeline = backend.host_timeline()
            timeline.tick()
            for record, t, write in found:
                if record is not None:
                    lo, hi = (0, record.region.nbytes) if record.charged else byte_range(t)
                    backend.checker.access(timeline, record.region, lo, hi, write=write, op=op)
        return True

    def report(self, timeline: Timeline, tensors: Sequence[torch.Tensor], op: str, *, write: bool) -> int:
        """Check the accesses of one op; returns the bytes that lie in host memory."""
        host_bytes = 0
        for t in tensors:
            record = self._record(t)
            if record is None:
                continue
            if record.charged or record.buffer is None:
                self._backend.checker.access(timeline, record.region, 0, record.region.nbytes, write=write, op=op)
            else:
                lo, hi = byte_range(t)
                self._backend.checker.access(timeline, record.region, lo, hi, write=write, op=op)
                if self._backend.is_host(record.buffer):
                    host_bytes += t.numel() * t.element_size()
        return host_bytes

    def _produced(self, timeline: Any, out: torch.Tensor, op: str) -> None:
        if not _has_memory(out):
            return
        storage = out.untyped_storage()
        ptr = storage.data_ptr()
        record = self.records.get(ptr)
        if record is None or (record.ref is not None and record.ref() is not storage):
            if record is not None:
                self.release(record)
            record = self.charge(storage, self._backend.current_label())
            if record is None:
                return
        if record.charged:
            self._backend.checker.access(timeline, record.region, 0, record.region.nbytes, write=True, op=op)

    def charge(self, storage: Any, label: str) -> Record | None:
        """Count a storage that torch allocated. Raises OutOfMemoryError past the cap."""
        nbytes = storage.nbytes()
        if nbytes == 0:
            return None
        charged = -(-nbytes // CHARGE_BYTES) * CHARGE_BYTES
        self._backend.device_account.take(charged, label)
        record = Record(storage.data_ptr(), Region(f"tensor of {label}", nbytes, strict=False))
        record.charged = charged
        record.ref = weakref.ref(storage, lambda _: self.release(record))
        self.records[record.ptr] = record
        return record

    def release(self, record: Record) -> None:
        """A storage died: give its bytes back; a copy that still reads it is a race."""
        backend = self._backend
        with backend.lock:
            if not record.charged:
                return
            backend.device_account.give(record.charged)
            record.charged = 0
            if self.records.get(record.ptr) is record:
                del self.records[record.ptr]
            if backend.closed:
                return
            backend.source_freed(record.ptr, record.region.nbytes)
            clock = [max(a, b) for a, b in zip(backend.compute.timeline.clock, backend.main.clock, strict=True)]
            stamp = backend.checker.unordered_readers(record.region, clock)
            if stamp is not None and self.failure is None:
                self.failure = backend.race_on_free(record.region, stamp)
