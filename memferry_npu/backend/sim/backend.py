"""`SimBackend`: one simulated accelerator of a node, as a `base.Backend`.

Owns: putting the checker, the memory, the streams, the dispatch mode and the virtual
clock together. Must not import torch.cuda, nor anything of memferry_npu above `backend/`.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Iterable, Iterator, Sequence

import torch

import topology

from ..base import BackendError, Buffer, Counters, Place, RaceError, Span, Stream, Window
from ..hostops import load_host_ops
from .checker import Checker, Region, Stamp, Timeline
from .clock import KernelModel, VirtualClock
from .lanes import node_lanes
from .memory import POISON, Account, SimDeviceBuffer, SimHostBuffer
from .mode import Record, SimMode, byte_range
from .streams import Copy, SimHostFlag, SimStream

DEFAULT_NODE = "sim-2"


class SimBackend:
    """A virtual accelerator with its host memory, streams, checker and clock.

    Args:
        node: a `topology.Node`, the name of a preset, or a path.
        device: which accelerator of the node.
        device_memory_bytes: its memory; None takes the node's figure.
        host_memory_bytes: pinned memory there is; None takes the node's figure.
        kernel_model: how long kernels take on the virtual clock.

    Raises:
        ValueError: the node has no such device.
    """

    name: str = "sim"
    device = torch.device("cpu")

    def __init__(
        self,
        node: topology.Node | str = DEFAULT_NODE,
        *,
        device: int = 0,
        device_memory_bytes: int | None = None,
        host_memory_bytes: int | None = None,
        kernel_model: KernelModel | None = None,
    ) -> None:
        self.node = topology.load_node(node) if isinstance(node, str) else node
        lanes = self._lanes = node_lanes(self.node, device)
        self.kernel_model = kernel_model or KernelModel()
        self.lock = threading.RLock()
        self.checker = Checker()
        self.clock = VirtualClock(dict(self.node.capacities()), lanes.by_name)
        self.device_account = Account(
            f"device {device}",
            device_memory_bytes if device_memory_bytes is not None else lanes.device_memory_bytes,
            "offload more of the model (stream or dha), keep fewer gradients, use fewer slots or a smaller batch, or "
            "raise device_memory",
        )
        self.host_account = Account(
            "pinned host",
            host_memory_bytes if host_memory_bytes is not None else lanes.host_memory_bytes,
            "turn split_master on, leave units resident, or raise host_memory",
        )
        self._hosts: dict[int, Timeline] = {}
        self.main = self.host_timeline()
        self.compute = self._stream("compute", eager=True)
        self.h2d = self._stream("h2d", eager=False)
        self.d2h = self._stream("d2h", eager=False)
        self.mode = SimMode(self)
        self.closed = False
        self._buffers: list[SimHostBuffer | SimDeviceBuffer] = []
        self._label = "user code"
        self._ops = load_host_ops()
        self._counts = {"h2d": 0, "d2h": 0, "dha_read": 0, "dha_write": 0, "buffers": 0}

    # Memory -------------------------------------------------------------------------

    def host_buffer(self, nbytes: int, label: str) -> SimHostBuffer:
        buffer = SimHostBuffer(nbytes, label, self.host_account)
        with self.lock:
            self._keep(buffer)
            self.mode.records[buffer.cpu_base] = Record(buffer.cpu_base, buffer.region, cpu_side=True, buffer=buffer)
            self.mode.records[buffer.mapped_base] = Record(buffer.mapped_base, buffer.region, buffer=buffer)
        return buffer

    def device_buffer(self, nbytes: int, label: str) -> SimDeviceBuffer:
        buffer = SimDeviceBuffer(nbytes, label, self.device_account)
        with self.lock:
            self._keep(buffer)
            self.mode.records[buffer.base] = Record(buffer.base, buffer.region, buffer=buffer)
        return buffer

    def _keep(self, buffer: SimHostBuffer | SimDeviceBuffer) -> None:
        self._buffers.append(buffer)
        self._counts["buffers"] += 1

    def adopt(self, tensor: torch.Tensor, label: str) -> None:
        with self.lock:
            if tensor.untyped_storage().data_ptr() not in self.mode.records:
                self.mode.charge(tensor.untyped_storage(), label)

    def limit_memory(self, device_bytes: int | None, host_bytes: int | None) -> None:
        for account, limit in ((self.device_account, device_bytes), (self.host_account, host_bytes)):
            account.cap_bytes = account.size_bytes if limit is None else min(account.size_bytes, limit)

    def is_host(self, buffer: object) -> bool:
        return isinstance(buffer, SimHostBuffer)

    # Work ---------------------------------------------------------------------------

    def copy(self, stream: Stream, pairs: Sequence[tuple[Place, Place]]) -> None:
        assert isinstance(stream, SimStream)
        with self.lock:
            for dst, src in pairs:
                dst_ptr, dst_region, dst_lo, nbytes, dst_host = self._resolve(dst)
                src_ptr, src_region, src_lo, src_bytes, src_host = self._resolve(src)
                if nbytes != src_bytes:
                    raise BackendError(f"copy of {src_bytes} bytes into {nbytes} ({src_region.label})")
                if dst_host == src_host:
                    raise BackendError(f"copy {src_region.label} -> {dst_region.label}: one end must be host memory")
                if nbytes == 0:
                    continue
                lane = "d2h" if dst_host else "h2d"
                op = f"{lane.upper()} {src_region.label} -> {dst_region.label}"
                timeline = stream.begin()
                self.checker.access(timeline, src_region, src_lo, src_lo + nbytes, write=False, op=op)
                self.checker.access(timeline, dst_region, dst_lo, dst_lo + nbytes, write=True, op=op)
                _fill(dst_ptr, nbytes)
                stream.push(Copy(dst_ptr, src_ptr, nbytes))
                self.clock.copy(stream.name, lane, nbytes)
                self._counts[lane] += nbytes

    def _resolve(self, place: Place) -> tuple[int, Region, int, int, bool]:
        """(address for copy engines, region, first byte in it, size, is host memory)."""
        if isinstance(place, Span):
            buffer = place.buffer
            if place.offset < 0 or place.offset + place.nbytes > buffer.nbytes:
                raise BackendError(f"span [{place.offset}, +{place.nbytes}) is outside '{buffer.label}'")
            if isinstance(buffer, SimHostBuffer):
                return buffer.cpu_base + place.offset, buffer.region, place.offset, place.nbytes, True
            assert isinstance(buffer, SimDeviceBuffer)
            return buffer.base + place.offset, buffer.region, place.offset, place.nbytes, False
        record = self.mode.records.get(place.untyped_storage().data_ptr())
        if record is None or not record.charged:
            raise BackendError("a copy's tensor end must be a device tensor that torch made; name buffers by Span")
        lo, hi = byte_range(place)
        if hi - lo != place.numel() * place.element_size():
            raise BackendError("a copy's tensor end must be dense")
        return place.data_ptr(), record.region, 0, hi - lo, False

    def grad_stats(self, src: torch.Tensor, chunk_sums: torch.Tensor, nonfinite: torch.Tensor) -> None:
        self._kernel("mf_grad_stats", (src,), (chunk_sums, nonfinite))
        with self.internal():
            nonfinite.fill_(int(self._ops.grad_stats(src, chunk_sums)))

    def grad_write(
        self,
        src: torch.Tensor,
        dst: torch.Tensor,
        accumulate: bool,
        chunk_sums: torch.Tensor,
        nonfinite: torch.Tensor,
    ) -> None:
        self._kernel("mf_grad_write", (src, dst) if accumulate else (src,), (dst, chunk_sums, nonfinite))
        with self.internal():
            nonfinite.fill_(int(self._ops.grad_write(src, dst, accumulate, chunk_sums)))

    def _kernel(self, name: str, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]) -> None:
        """Check and time one of our own kernels."""
        with self.lock:
            timeline = self.compute.begin()
            dha_read = self.mode.report(timeline, reads, name, write=False)
            dha_write = self.mode.report(timeline, writes, name, write=True)
            nbytes = sum(t.numel() * t.element_size() for t in (*reads, *writes)) - dha_read - dha_write
            self.clock.kernel(self.kernel_model.seconds(nbytes, 0.0), dha_read, dha_write)
            self.count_dha(dha_read, dha_write)

    def host_access(
        self, name: str, *, reads: Iterable[Span] = (), writes: Iterable[Span] = (), threads: int | None = 1
    ) -> None:
        with self.lock:
            timeline = self.host_timeline()
            timeline.tick()
            totals = [0, 0]
            for spans, write in ((reads, False), (writes, True)):
                for span in spans:
                    if not isinstance(span.buffer, SimHostBuffer):
                        raise BackendError(f"'{name}': the host cannot access {span.buffer.label}")
                    region = span.buffer.region
                    self.checker.access(
                        timeline, region, span.offset, span.offset + span.nbytes, write=write, op=name
                    )
                    totals[write] += span.nbytes
            if sum(totals):
                self.clock.host(sum(totals), self._lanes.host(totals[0], totals[1], threads))

    def host_flag(self) -> SimHostFlag:
        return SimHostFlag(self)

    def host_timeline(self) -> Timeline:
        """The calling thread's timeline."""
        ident = threading.get_ident()
        timeline = self._hosts.get(ident)
        if timeline is None:
            with self.lock:
                timeline = self._hosts[ident] = self.checker.timeline(threading.current_thread().name)
        return timeline

    def _stream(self, name: str, *, eager: bool) -> SimStream:
        return SimStream(self, name, self.checker.timeline(name), eager=eager)

    def count_dha(self, read_bytes: int, write_bytes: int) -> None:
        self._counts["dha_read"] += read_bytes
        self._counts["dha_write"] += write_bytes

    # Validity of slots ----------------------------------------------------------------

    def invalidate(self, span: Span, reason: str) -> None:
        """From now on every access to `span` but a copy's is an error, with `reason`."""
        region = _region(span)
        with self.lock:
            region.closed_by = [c for c in region.closed_by if c[0] != span.offset]
            region.closed_by.append((span.offset, span.offset + span.nbytes, reason))

    def validate(self, span: Span) -> None:
        region = _region(span)
        with self.lock:
            region.closed_by = [c for c in region.closed_by if c[0] != span.offset]

    # Freed memory ---------------------------------------------------------------------

    def source_freed(self, base: int, nbytes: int) -> None:
        for stream in (self.h2d, self.d2h):
            stream.source_freed(base, nbytes)

    def race_on_free(self, region: Region, stamp: Stamp) -> RaceError:
        return RaceError(
            f"{region.label} was freed before '{stamp[2]}' ({self.checker.timelines[stamp[0]].name}) is done with it: "
            "hold the tensor until its event"
        )

    # Session ------------------------------------------------------------------------

    @contextlib.contextmanager
    def session(self) -> Iterator[None]:
        with self.mode:
            yield

    @contextlib.contextmanager
    def internal(self) -> Iterator[None]:
        self.mode.paused += 1
        try:
            yield
        finally:
            self.mode.paused -= 1

    def label(self, unit: str) -> None:
        self._label = unit

    def current_label(self) -> str:
        return self._label

    def synchronize(self) -> None:
        with self.lock:
            for stream in (self.h2d, self.d2h, self.compute):
                stream.drain()
                self.host_timeline().join(stream.timeline.clock)
                self.clock.host_wait(self.clock.last(stream.name))

    def mark(self) -> Window:
        """Simulated figures of the work since the last mark."""
        with self.lock:
            return self.clock.mark()

    def counters(self) -> Counters:
        account = self.device_account
        return Counters(
            h2d_bytes=self._counts["h2d"],
            d2h_bytes=self._counts["d2h"],
            dha_read_bytes=self._counts["dha_read"],
            dha_write_bytes=self._counts["dha_write"],
            buffers_created=self._counts["buffers"],
            streams_created=3,
            device_used_bytes=account.used_bytes,
            device_static_bytes=account.static_bytes,
            device_peak_bytes=account.peak_bytes,
            device_cap_bytes=account.cap_bytes,
            host_used_bytes=self.host_account.used_bytes,
        )

    def close(self) -> None:
        with self.lock:
            if self.closed:
                return
            self.closed = True
            for buffer in self._buffers:
                buffer.close()
            self._buffers.clear()


def _region(span: Span) -> Region:
    buffer: Buffer = span.buffer
    assert isinstance(buffer, SimHostBuffer | SimDeviceBuffer)
    return buffer.region


def _fill(ptr: int, nbytes: int) -> None:
    ctypes.memset(ptr, POISON, nbytes)
