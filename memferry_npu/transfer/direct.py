"""Loads and stores over the device's own link, as tickets.

Owns: `Ticket`, the handle of every transfer, and the engine with a single path. Relays
over peers come with the multi-path engine behind the same interface. Must not import
schedule, optim or runtime.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from ..backend.base import Backend, Event, Place, Stream


@runtime_checkable
class Ticket(Protocol):
    """A transfer that was put on its way."""

    @property
    def nbytes(self) -> int: ...

    def wait(self, stream: Stream) -> None:
        """Order `stream` after the transfer. Does not block the host. Raises what the engine died of."""

    def synchronize(self) -> None:
        """Block the calling thread until the bytes are there."""


@dataclass(frozen=True, slots=True)
class DirectTicket:
    """A transfer on one copy stream; done when its event is."""

    nbytes: int
    event: Event

    def wait(self, stream: Stream) -> None:
        stream.wait(self.event)

    def synchronize(self) -> None:
        self.event.synchronize()


def load(backend: Backend, pairs: Sequence[tuple[Place, Place]], nbytes: int, after: Event | None = None) -> Ticket:
    """H2D of (destination, source) pairs on the load stream, after `after`."""
    return _move(backend, backend.h2d, pairs, nbytes, after)


def store(backend: Backend, pairs: Sequence[tuple[Place, Place]], nbytes: int, after: Event | None = None) -> Ticket:
    """D2H of (destination, source) pairs on the store stream, after `after`."""
    return _move(backend, backend.d2h, pairs, nbytes, after)


def _move(
    backend: Backend, stream: Stream, pairs: Sequence[tuple[Place, Place]], nbytes: int, after: Event | None
) -> Ticket:
    if after is not None:
        stream.wait(after)
    backend.copy(stream, pairs)
    return DirectTicket(nbytes, stream.record())
