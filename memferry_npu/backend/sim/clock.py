"""The virtual clock of the simulated node: a log of tasks, timed by the fluid model.

Owns: turning what happened into `topology.flow` tasks and those into seconds. It
never reads the real clock: its figures are simulated, from the node's description
and from `KernelModel`. Must not import torch.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from topology import flow

from ..base import Window


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelModel:
    """How long a kernel takes on the virtual accelerator (estimates, not a product)."""

    launch_s: float = 5e-6
    memory_gbps: float = 1000.0
    tflops: float = 20.0

    def seconds(self, nbytes: float, flops: float) -> float:
        return self.launch_s + max(nbytes / (self.memory_gbps * 1e9), flops / (self.tflops * 1e12))


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """What a transfer uses: `flow` constraints with weights, and its own rate limit in GB/s."""

    uses: tuple[tuple[str, float], ...] = ()
    rate_cap_gbps: float | None = None
    latency_s: float = 0.0


@dataclass(slots=True)
class _Open:
    """A task that may still grow: consecutive kernels without a wait between them."""

    id: int
    deps: frozenset[int]
    seconds: float = 0.0
    lanes: dict[str, int] = field(default_factory=dict)


class VirtualClock:
    """Log of one node's work since the last mark. Callers hold the node's lock."""

    def __init__(self, capacities_gbps: dict[str, float], lanes: dict[str, Lane]) -> None:
        self._capacities, self._lanes = capacities_gbps, lanes
        self._tasks: list[flow.Task] = []
        self._next = 0
        self._first = 0
        self._last: dict[str, int] = {}
        self._stream_deps: dict[str, set[int]] = {}
        self._host_deps: dict[int, set[int]] = {}
        self._open: _Open | None = None
        self._compute_busy: list[tuple[int, ...]] = []
        self._bytes = {"h2d": 0, "d2h": 0}

    # What happened ------------------------------------------------------------------

    def kernel(self, seconds: float, dha_read_bytes: int, dha_write_bytes: int) -> None:
        """A kernel on the compute stream; host memory it touches crosses the link."""
        deps = self._take_deps("compute")
        if self._open is None or deps - self._open.deps:
            self._close()
            self._open = _Open(self._new_id(), frozenset(deps))
            self._last["compute"] = self._open.id
        self._open.seconds += seconds
        for lane, nbytes in (("dha_read", dha_read_bytes), ("dha_write", dha_write_bytes)):
            if nbytes:
                self._open.lanes[lane] = self._open.lanes.get(lane, 0) + nbytes
        self._bytes["h2d"] += dha_read_bytes
        self._bytes["d2h"] += dha_write_bytes

    def copy(self, stream: str, lane: str, nbytes: int) -> None:
        """A copy-engine transfer on `stream`; `lane` is "h2d" or "d2h"."""
        self._bytes[lane] += nbytes
        self._add(self._new_id(), stream, self._take_deps(stream), 0.0, nbytes, self._lanes[lane])

    def host(self, nbytes: int, lane: Lane) -> None:
        """The calling host thread reads and writes `nbytes` of host memory in all."""
        queue = f"host-{threading.get_ident()}"
        deps = frozenset(self._host_deps.pop(threading.get_ident(), set()))
        self._add(self._new_id(), queue, deps, 0.0, nbytes, lane)

    # Order --------------------------------------------------------------------------

    def last(self, stream: str) -> int | None:
        if stream == "compute":
            self._close()
        return self._last.get(stream)

    def last_host(self) -> int | None:
        return self._last.get(f"host-{threading.get_ident()}")

    def stream_wait(self, stream: str, task: int | None) -> None:
        if task is not None:
            if stream == "compute":
                self._close()
            self._stream_deps.setdefault(stream, set()).add(task)

    def host_wait(self, task: int | None) -> None:
        """What the calling thread puts on streams from now on comes after `task`."""
        if task is not None:
            self._host_deps.setdefault(threading.get_ident(), set()).add(task)

    # Time ---------------------------------------------------------------------------

    def mark(self) -> Window:
        """Time everything since the last mark; the log starts anew."""
        self._close()
        spans = flow.run(self._tasks, self._capacities)
        end = max((span.end_s for span in spans.values()), default=0.0)
        busy = 0.0
        for chain in self._compute_busy:
            busy += sum(spans[i].end_s - spans[i].start_s for i in chain)
        window = Window(
            seconds=end, compute_busy_s=busy, h2d_bytes=self._bytes["h2d"],
            d2h_bytes=self._bytes["d2h"], simulated=True,
        )
        self._tasks, self._compute_busy = [], []
        self._bytes = {"h2d": 0, "d2h": 0}
        self._first = self._next
        return window

    def _take_deps(self, stream: str) -> set[int]:
        deps = self._stream_deps.pop(stream, set())
        deps |= self._host_deps.get(threading.get_ident(), set())
        return deps

    def _new_id(self) -> int:
        self._next += 1
        return self._next - 1

    def _close(self) -> None:
        """Kernels end the open task: device time, then the bytes it moved over the link."""
        task, self._open = self._open, None
        if task is None:
            return
        ids = []
        deps = task.deps
        name = task.id
        parts: list[tuple[float, str | None, int]] = [(task.seconds, None, 0)]
        parts += [(0.0, lane, nbytes) for lane, nbytes in task.lanes.items()]
        for index, (seconds, lane, nbytes) in enumerate(parts):
            current = name if index == len(parts) - 1 else self._new_id()
            self._add(current, "compute", deps, seconds, nbytes, self._lanes[lane] if lane else Lane())
            ids.append(current)
        self._last["compute"] = name
        self._compute_busy.append(tuple(ids))

    def _add(
        self, task: int, queue: str, deps: frozenset[int] | set[int], seconds: float, nbytes: int, lane: Lane
    ) -> None:
        self._tasks.append(
            flow.Task(
                id=task,
                deps=tuple(sorted(d for d in deps if d >= self._first and d != task)),
                seconds=seconds + lane.latency_s,
                nbytes=float(nbytes),
                uses=lane.uses,
                rate_cap_gbps=lane.rate_cap_gbps,
                queue=queue,
            )
        )
        self._last[queue] = task
