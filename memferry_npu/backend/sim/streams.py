"""Streams, events and host flags of the simulated node.

Owns: the order of work. Copies are lazy: they move bytes at the latest legal moment,
when something waits for them, and their destination is poisoned until then, so that
a missing wait shows in the result as well as in the checker. Compute is eager (torch
runs the op), so events of the compute stream are always done. Must not import torch.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..base import Event
from .checker import Timeline

if TYPE_CHECKING:
    from .backend import SimBackend


@dataclass(slots=True)
class Copy:
    """Bytes to move. `src` becomes 0 when the source was freed before the copy ran."""

    dst: int
    src: int
    nbytes: int

    def run(self) -> None:
        if self.src:
            ctypes.memmove(self.dst, self.src, self.nbytes)


@dataclass(frozen=True, slots=True, eq=False)
class SimEvent:
    stream: SimStream
    position: int
    clock: list[int] = field(repr=False)
    task: int | None

    def synchronize(self) -> None:
        backend = self.stream.backend
        with backend.lock:
            self.stream.run_to(self.position)
            backend.host_timeline().join(self.clock)
            backend.clock.host_wait(self.task)


class SimStream:
    """One queue. `eager` streams (compute) have nothing pending."""

    def __init__(self, backend: SimBackend, name: str, timeline: Timeline, *, eager: bool) -> None:
        self.backend, self.name, self.timeline, self.eager = backend, name, timeline, eager
        self._pending: deque[Copy | SimEvent] = deque()
        self._issued = 0
        self._done = 0

    def begin(self) -> Timeline:
        """The stream's timeline, ticked for a new operation of the calling host thread."""
        self.timeline.join(self.backend.host_timeline().clock)
        self.timeline.tick()
        return self.timeline

    def push(self, item: Copy | SimEvent) -> None:
        self._pending.append(item)
        self._issued += 1

    def record(self) -> SimEvent:
        with self.backend.lock:
            self.begin()
            return SimEvent(self, self._issued, list(self.timeline.clock), self.backend.clock.last(self.name))

    def wait(self, event: Event) -> None:
        assert isinstance(event, SimEvent)
        with self.backend.lock:
            self.timeline.join(event.clock)
            self.backend.clock.stream_wait(self.name, event.task)
            if self.eager:
                event.stream.run_to(event.position)
            elif event.stream is not self:
                self.push(event)

    def run_to(self, position: int) -> None:
        """Execute what was put in up to `position` (and what that waits for)."""
        while self._done < position and self._pending:
            item = self._pending.popleft()
            self._done += 1
            if isinstance(item, SimEvent):
                item.stream.run_to(item.position)
            else:
                item.run()

    def drain(self) -> None:
        self.run_to(self._issued)

    def source_freed(self, base: int, nbytes: int) -> None:
        """Copies still to run that read freed memory must not: their target stays poisoned."""
        for item in self._pending:
            if isinstance(item, Copy) and base <= item.src < base + nbytes:
                item.src = 0


class SimHostFlag:
    """See `base.HostFlag`; also carries the setter's clock."""

    def __init__(self, backend: SimBackend) -> None:
        self._backend = backend
        self._event = threading.Event()
        self._clock: list[int] | None = None
        self._task: int | None = None
        self._error: BaseException | None = None

    def set(self) -> None:
        with self._backend.lock:
            timeline = self._backend.host_timeline()
            timeline.tick()
            self._clock = list(timeline.clock)
            self._task = self._backend.clock.last_host()
        self._event.set()

    def fail(self, error: BaseException) -> None:
        self._error = error
        self._event.set()

    def clear(self) -> None:
        self._event.clear()
        self._clock, self._task, self._error = None, None, None

    def is_set(self) -> bool:
        return self._event.is_set()

    def wait(self) -> None:
        self._event.wait()
        if self._error is not None:
            raise RuntimeError(f"the host optimizer failed earlier: {self._error}") from self._error
        with self._backend.lock:
            if self._clock is not None:
                self._backend.host_timeline().join(self._clock)
            self._backend.clock.host_wait(self._task)
