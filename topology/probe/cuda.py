"""The meter for CUDA devices: real copies through torch's streams and the CUDA runtime.

Owns buffers, timing and verification on CUDA. The only file of this package that imports torch, inside functions.
Copies go straight to `cudaMemcpyAsync` of the runtime that torch has loaded: `Tensor.copy_` between devices puts a
barrier on both streams, which hides what multi-path gives. Kernels on mapped memory need a copy kernel, which the
caller may give (this package may not import cuda_ops); without one they are waived.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from ..assemble import assemble
from ..codec import Table, TopologyError
from ..discover import discover
from ..model import DeviceKind, HostMemory, Link, LinkKind, Method, Node, Quantity, Rates, Resource, Source
from ..routes import Path
from ..texts import DeviceFacts, Facts
from .suite import MIB, Job
from .system import bound, runtime_memcpy, timed

Kernel = Callable[[int, int, int, int, int], None]
"""(device, destination, source, bytes, stream): enqueue a kernel that copies between addresses the device can reach."""

_SLOTS = 4
"""Staging buffers of a relay."""
_CHUNK = 8 * MIB


def unavailable() -> str | None:
    """Why CUDA cannot be measured here, or None."""
    try:
        import torch
    except Exception as error:  # a broken installation fails in many ways
        return f"torch cannot be imported ({type(error).__name__}: {error})"
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    return None


def open_meter(base: Node | None, *, quick: bool, kernel: Kernel | None = None) -> tuple[Node, CudaMeter]:
    """The node to measure (given, or discovered and completed by what torch knows) and its meter."""
    import torch

    count = torch.cuda.device_count()
    properties = [torch.cuda.get_device_properties(i) for i in range(count)]
    if base is None:
        base = discover(visible=_pci_ids(properties))
        if len(base.devices) != count:
            notes = [f"the tools list {len(base.devices)} devices and torch sees {count}: links are not known"]
            facts = Facts(devices=tuple(DeviceFacts(id=i) for i in range(count)))
            base = assemble(DeviceKind.CUDA, None, facts, hosts=base.hosts, notes=notes)
    if len(base.devices) != count:
        raise TopologyError(f"node {base.name!r} has {len(base.devices)} devices and torch sees {count}; give --node")
    devices = []
    for i, (device, found) in enumerate(zip(base.devices, properties, strict=True)):
        if device.id != i:
            raise TopologyError(f"node {base.name!r}: device ids must be 0 to {count - 1}, as torch counts")
        architecture = f"sm_{found.major}{found.minor}"
        devices.append(
            replace(
                device,
                name=found.name,
                kind=DeviceKind.CUDA,
                memory_bytes=int(found.total_memory),
                source=Source.MEASURED,
                architecture=architecture,
            )
        )
    node = replace(base, devices=tuple(devices))
    return (ready := _with_peer_links(node, torch)), CudaMeter(ready, torch, quick=quick, kernel=kernel)


def _pci_ids(properties: Sequence[Any]) -> list[str] | None:
    try:
        return [f"{p.pci_domain_id:04x}:{p.pci_bus_id:02x}:{p.pci_device_id:02x}.0" for p in properties]
    except AttributeError:
        return None


def _with_peer_links(node: Node, torch: Any) -> Node:
    """Adds a link of its own for each pair with peer access that the node does not join."""
    resources, links, notes = list(node.resources), list(node.links), list(node.notes)
    guess = Quantity(value=20.0, source=Source.ESTIMATE)
    for a in range(len(node.devices)):
        for b in range(a + 1, len(node.devices)):
            if not node.paths(a, b) and torch.cuda.can_device_access_peer(a, b):
                name = f"peer{a}-{b}"
                notes.append(f"devices {a} and {b} have peer access; over what is not known")
                resources.append(Resource(id=name, ab=guess, ba=guess))
                rates = Rates(ab=guess, ba=guess)
                links.append(
                    Link(id=f"link-{name}", a=f"dev{a}", b=f"dev{b}", kind=LinkKind.PCIE, resources=(name,), copy=rates)
                )
    return replace(node, resources=tuple(resources), links=tuple(links), notes=tuple(notes))


class CudaMeter:
    """Measures the CUDA devices of this process."""

    name = "cuda"
    simulated = False

    def __init__(self, node: Node, torch: Any, *, quick: bool, kernel: Kernel | None = None) -> None:
        self._node, self._torch, self._kernel = node, torch, kernel
        self._bytes = (256 if quick else 512) * MIB
        self._copies = 4 if quick else 16
        self._samples = 3
        self._buffers: dict[tuple[object, ...], Any] = {}
        self._checked: set[Job | str] = set()
        self._failures: list[str] = []
        for i in range(len(node.devices)):
            for j in range(len(node.devices)):
                # torch enables peer access at the first copy between two devices, one way.
                torch.zeros(1, device=f"cuda:{i}").to(f"cuda:{j}")
        self._memcpy = runtime_memcpy()
        how = "cudaMemcpyAsync" if self._memcpy else "Tensor.copy_ (the CUDA runtime was not found)"
        self.method = (
            f"{self._bytes // MIB} MiB pinned, median of {self._samples} x {self._copies}, first copy of each kind "
            f"verified, {how}"
        )

    def environment(self) -> Table:
        return (("backend", "cuda"), ("torch", self._torch.__version__), ("cuda", str(self._torch.version.cuda)))

    def why_not(self, job: Job) -> str | None:
        if job.method is Method.KERNEL and self._kernel is None:
            return "needs cuda_ops"
        if job.kind == "p2p" and not self._torch.cuda.can_device_access_peer(job.device, job.peer):
            return "no peer access"
        return None

    def failures(self) -> tuple[str, ...]:
        return tuple(self._failures)

    def rates(self, jobs: Sequence[Job]) -> list[float]:
        if any(job.method is Method.PAGEABLE for job in jobs):
            return [self._pageable(job) for job in jobs]
        if all(job.kind == "host" for job in jobs):
            return [self._host(job) for job in jobs]
        check = len(jobs) == 1 and jobs[0] not in self._checked
        if check:
            self._prepare(jobs[0])
        samples = [self._sample(jobs) for _ in range(self._samples)]
        if check:
            self._verify(jobs[0])
        return [statistics.median(values) for values in zip(*samples, strict=True)]

    def latency_s(self, job: Job) -> float:
        dst, src = self._ends(job)
        stream = self._stream(job, 0)
        times = []
        with self._torch.cuda.device(job.device):
            for _ in range(110):
                start = time.perf_counter()
                self._copy(dst, src, 4096, stream)
                stream.synchronize()
                times.append(time.perf_counter() - start)
        return statistics.median(times[10:])

    def load_gbps(self, device: int, nbytes: int, parts: Sequence[tuple[Path, float]]) -> float:
        host = self._node.host(parts[0][0].src)
        src = self._pinned("load", host, device, max(nbytes, self._bytes))
        dst = self._local("load", device, max(nbytes, self._bytes))
        label = f"load of {nbytes} bytes over {' + '.join(path.name for path, _ in parts)}"
        if label not in self._checked:
            self._fill(src, 7)
            dst.zero_()
        self._sync()
        times = [self._load(device, dst, src, nbytes, parts) for _ in range(6)]
        if label not in self._checked:
            self._checked.add(label)
            if not self._torch.equal(dst[:nbytes].cpu(), src[:nbytes]):
                self._failures.append(f"{label}: data differ")
        return nbytes / statistics.median(times[1:]) / 1e9

    # --- copies ---------------------------------------------------------------------------------------------------

    def _sample(self, jobs: Sequence[Job]) -> list[float]:
        """One run of all jobs. Each job's first half is timed; its second half keeps others company."""
        torch = self._torch
        moving = [(k, job) for k, job in enumerate(jobs) if job.kind != "host"]
        halves = 1 if len(jobs) == 1 else 3 if len(moving) < len(jobs) else 2
        events: dict[int, tuple[Any, Any]] = {}
        self._sync()
        for k, job in moving:
            dst, src = self._ends(job)
            stream = self._stream(job, k)
            with torch.cuda.device(job.device), torch.cuda.stream(stream):
                # Keeps the stream busy (about 10 ms) until everything is enqueued.
                torch.cuda._sleep(20_000_000)
                events[k] = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
                events[k][0].record(stream)
                for half in range(halves):
                    for _ in range(self._copies):
                        if job.method is Method.KERNEL and self._kernel is not None:
                            self._kernel(job.device, dst.data_ptr(), src.data_ptr(), self._bytes, stream.cuda_stream)
                        else:
                            self._copy(dst, src, self._bytes, stream)
                    if half == 0:
                        events[k][1].record(stream)
        rates = [0.0] * len(jobs)
        for k, job in enumerate(jobs):
            if job.kind == "host":
                time.sleep(0.012)
                rates[k] = self._host(job, while_busy=lambda: not all(end.query() for _, end in events.values()))
        self._sync()
        for k, (start, end) in events.items():
            moved = self._copies * self._bytes * (2 if jobs[k].kind == "mix" else 1)
            rates[k] = moved / (start.elapsed_time(end) * 1e-3) / 1e9
        return rates

    def _copy(self, dst: Any, src: Any, nbytes: int, stream: Any, dst_at: int = 0, src_at: int = 0) -> None:
        """Enqueue a copy of bytes; the current device must be the stream's."""
        if self._memcpy is not None:
            self._memcpy(dst.data_ptr() + dst_at, src.data_ptr() + src_at, nbytes, stream.cuda_stream)
            return
        with self._torch.cuda.stream(stream):
            dst[dst_at : dst_at + nbytes].copy_(src[src_at : src_at + nbytes], non_blocking=True)

    def _load(self, device: int, dst: Any, src: Any, nbytes: int, parts: Sequence[tuple[Path, float]]) -> float:
        """Seconds of one load: the direct part in pieces, each relay in chunks through a ring on its device."""
        start = time.perf_counter()
        at, left, feeds = 0, 1.0, []
        for path, part in parts:
            size = nbytes - at if part >= left - 1e-9 else min(nbytes - at, int(nbytes * part) // 4096 * 4096)
            feeds.append(
                self._direct(device, dst, src, at, size)
                if not path.relays
                else self._relay(path.relays[0], dst, src, at, size)
            )
            at, left = at + size, left - part
        # Turn by turn, so that no path waits until another one is enqueued.
        while feeds:
            feeds = [feed for feed in feeds if next(feed, False)]
        self._named_stream(device, "load").synchronize()
        for path, _ in parts:
            if path.relays:
                self._named_stream(path.relays[0], "relay out").synchronize()
        return time.perf_counter() - start

    def _direct(self, device: int, dst: Any, src: Any, at: int, size: int) -> Iterator[bool]:
        """Enqueues the bytes from `at`, a piece per step."""
        stream = self._named_stream(device, "load")
        for here in range(at, at + size, _CHUNK):
            with self._torch.cuda.device(device):
                self._copy(dst, src, min(_CHUNK, at + size - here), stream, here, here)
            yield True

    def _relay(self, peer: int, dst: Any, src: Any, at: int, size: int) -> Iterator[bool]:
        """Enqueues the bytes from `at` through a ring of staging buffers on `peer`, a chunk per step."""
        ring = self._local("ring", peer, _SLOTS * _CHUNK)
        chunk = min(_CHUNK, max(256 << 10, size // 4 // 4096 * 4096))
        into, out = self._named_stream(peer, "relay in"), self._named_stream(peer, "relay out")
        free: list[Any] = [None] * _SLOTS
        for k, here in enumerate(range(at, at + size, chunk)):
            piece, slot = min(chunk, at + size - here), k % _SLOTS
            with self._torch.cuda.device(peer):
                if free[slot] is not None:
                    into.wait_event(free[slot])
                self._copy(ring, src, piece, into, slot * _CHUNK, here)
                out.wait_event(into.record_event())
                self._copy(dst, ring, piece, out, here, slot * _CHUNK)
                free[slot] = out.record_event()
            yield True

    def _pageable(self, job: Job) -> float:
        host, size = self._node.home(job.device), min(64 * MIB, self._bytes)
        key = ("pageable", job.device)
        if key not in self._buffers:
            with bound(host):
                self._buffers[key] = self._torch.ones(size, dtype=self._torch.uint8)
        buffer, local = self._buffers[key], self._local("up", job.device, self._bytes)[:size]
        times = []
        for _ in range(4):
            self._sync()
            start = time.perf_counter()
            if job.kind == "h2d":
                local.copy_(buffer)
            else:
                buffer.copy_(local)
            self._torch.cuda.synchronize(job.device)
            times.append(time.perf_counter() - start)
        return size / statistics.median(times[1:]) / 1e9

    def _host(self, job: Job, while_busy: Callable[[], bool] | None = None) -> float:
        """GB/s of host threads; alone the median of three passes, else all passes that fit while copies run."""
        torch = self._torch
        host = self._node.host(job.host or "")
        count = max(1, min(256 * MIB, host.memory_bytes // 16 // 4))
        threads = torch.get_num_threads()
        with bound(host):
            try:
                torch.set_num_threads(job.threads)
                a, b = self._floats(host, count, "a"), self._floats(host, count, "b")
                if job.write == 0.0:
                    step, nbytes = (lambda: a.sum()), 4 * count
                elif job.read == 0.0:
                    step, nbytes = (lambda: a.fill_(1.0)), 4 * count
                else:
                    step, nbytes = (lambda: b.copy_(a)), 8 * count
                if while_busy is None:
                    step()
                    return nbytes / statistics.median(timed(step) for _ in range(3)) / 1e9
                start, passes = time.perf_counter(), 0
                while passes == 0 or while_busy():
                    step()
                    passes += 1
                return passes * nbytes / (time.perf_counter() - start) / 1e9
            finally:
                torch.set_num_threads(threads)

    # --- buffers and checks ---------------------------------------------------------------------------------------

    def _ends(self, job: Job) -> tuple[Any, Any]:
        """(destination, source) of a job."""
        host = self._node.host(job.host) if job.host else self._node.home(job.device)
        if job.kind == "mix":  # one kernel reads host memory and writes host memory
            return (
                self._pinned("down", host, job.device, self._bytes),
                self._pinned("up", host, job.device, self._bytes),
            )
        if job.kind == "h2d":
            return self._local("up", job.device, self._bytes), self._pinned("up", host, job.device, self._bytes)
        if job.kind == "d2h":
            return self._pinned("down", host, job.device, self._bytes), self._local("down", job.device, self._bytes)
        assert job.peer is not None
        return self._local("peer", job.peer, self._bytes), self._local("down", job.device, self._bytes)

    def _local(self, name: str, device: int, nbytes: int) -> Any:
        return self._buffer(
            (name, device), nbytes, lambda n: self._torch.ones(n, dtype=self._torch.uint8, device=f"cuda:{device}")
        )

    def _pinned(self, name: str, host: HostMemory, device: int, nbytes: int) -> Any:
        def make(n: int) -> Any:
            with bound(host):
                return self._torch.ones(n, dtype=self._torch.uint8, pin_memory=True)

        return self._buffer((name, host.id, device), nbytes, make)

    def _floats(self, host: HostMemory, count: int, name: str) -> Any:
        return self._buffer((name, host.id, "floats"), count, lambda n: self._torch.ones(n))

    def _buffer(self, key: tuple[object, ...], count: int, make: Callable[[int], Any]) -> Any:
        if key not in self._buffers or self._buffers[key].numel() < count:
            self._buffers.pop(key, None)
            self._buffers[key] = make(count)
        return self._buffers[key]

    def _fill(self, buffer: Any, seed: int) -> None:
        words = buffer.view(self._torch.int32)
        self._torch.arange(words.numel(), dtype=self._torch.int32, device=words.device, out=words)
        words.mul_(-1640531527).add_(seed)

    def _prepare(self, job: Job) -> None:
        dst, src = self._ends(job)
        self._fill(src, 1 + job.device)
        dst.zero_()

    def _verify(self, job: Job) -> None:
        self._checked.add(job)
        dst, src = self._ends(job)
        self._sync()
        # The pattern is made again where the data arrived: comparing there needs no second transfer.
        expected = self._torch.empty_like(dst)
        self._fill(expected, 1 + job.device)
        if not self._torch.equal(dst, expected):
            peer = f" to device {job.peer}" if job.peer is not None else ""
            self._failures.append(f"{job.kind} of device {job.device}{peer}: data differ")

    def _stream(self, job: Job, k: int) -> Any:
        return self._named_stream(job.device, f"job {k}")

    def _named_stream(self, device: int, name: str) -> Any:
        key = ("stream", device, name)
        if key not in self._buffers:
            self._buffers[key] = self._torch.cuda.Stream(device=device)
        return self._buffers[key]

    def _sync(self) -> None:
        for i in range(len(self._node.devices)):
            self._torch.cuda.synchronize(i)
