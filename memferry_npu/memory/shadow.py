"""Shadow parameters: one `nn.Parameter`, several storages, one state machine per unit.

Owns: which storage a parameter shows (`Parameter.data`) and the states of a unit's
working weights on the device. Must not import runtime or optim.

[Note: what a parameter shows] Outside its unit's use a streamed parameter is a device
view of its mapped host working copy: always the current weights, with shape, dtype and
device unchanged. While the unit is in use it shows the unit's slot, the same slot every
time, so views that autograd saved (`weight.t()`) find the contents they were made of once
the unit is loaded again for backward. RESIDENT parameters always show device memory, DHA
parameters always the mapped host copy. Swapping `.data` moves no bytes and leaves the
version counter alone.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import nn

from ..backend.base import Backend, DeviceBuffer, Event, HostBuffer, HostFlag, Span, Stream
from .layout import Shape, flat


class Arrival(Protocol):
    """Bytes on their way to the device: the part of a ticket that a unit needs."""

    def wait(self, stream: Stream) -> None: ...

    def synchronize(self) -> None: ...


class UnitState(enum.Enum):
    """Where a streamed unit's working weights are valid."""

    HOST = "host"
    LOADING = "loading"
    DEVICE = "device"


_LEGAL = {
    (UnitState.HOST, UnitState.LOADING),
    (UnitState.LOADING, UnitState.DEVICE),
    (UnitState.LOADING, UnitState.HOST),
    (UnitState.DEVICE, UnitState.HOST),
}


@dataclass(slots=True, kw_only=True, eq=False)
class ShadowParam:
    """One parameter and its storages. 1-D views are in memory order, `numel` elements."""

    param: nn.Parameter
    names: tuple[str, ...]
    shape: Shape
    trainable: bool
    working: Span
    """Host bytes that are transmitted: bf16 weights, or fp32 weights (then also the master)."""
    working_cpu: torch.Tensor
    host_view: torch.Tensor
    """Device view of the mapped working copy, in the parameter's shape."""
    device_view: torch.Tensor | None = None
    """In a slot or in resident memory; None for DHA."""
    master: torch.Tensor | None = None
    """fp32 [numel] on the CPU; None where the working weights are the master, or split."""
    low: torch.Tensor | None = None
    """int16 [numel]: the lower half of a split master."""
    exp_avg: torch.Tensor | None = None
    exp_avg_sq: torch.Tensor | None = None
    state_spans: tuple[Span, ...] = ()
    """Host spans of master or low half, exp_avg and exp_avg_sq."""
    seen_version: int = 0
    """`param._version` up to which the master knows the weights."""

    @property
    def name(self) -> str:
        return self.names[0]

    def shape_fp32(self, values: torch.Tensor | None) -> torch.Tensor:
        """1-D fp32 `values` in memory order, viewed in the parameter's shape."""
        assert values is not None
        return values.as_strided(self.shape.size, self.shape.stride, values.storage_offset())

    def show(self, view: torch.Tensor) -> None:
        """Let the parameter show `view` (same shape, dtype and device)."""
        self.param.data = view

    def written_by_user(self) -> bool:
        """Has someone written to the parameter in place since `mark_seen`?"""
        return self.param._version != self.seen_version

    def mark_seen(self) -> None:
        self.seen_version = self.param._version


@dataclass(slots=True, eq=False)
class Slot:
    """Device memory that streamed units use in turn. State over time: who is in it."""

    buffer: DeviceBuffer
    span: Span
    holder: Unit | None = None
    ready: Arrival | None = None
    """The holder's load."""
    free: Event | None = None
    """After the last kernel that used the previous contents."""


@dataclass(slots=True, kw_only=True, eq=False)
class Unit:
    """Parameters that are placed and moved together. State over time: where they are."""

    index: int
    name: str
    placement: str
    gradient: str
    params: list[ShadowParam]
    working: Span
    updated: HostFlag
    """Set when the last update of this unit's host copy is complete."""
    slot: Slot | None = None
    resident: Span | None = None
    ready: Arrival | None = None
    """RESIDENT: the last upload, until someone waited for it."""
    versions: tuple[int, ...] = ()
    """Versions of the parameters when the device copy was made."""
    state: UnitState = UnitState.HOST
    borrows: list[Unit] = field(default_factory=list)
    """Units that own parameters tied into this one."""
    forward_depth: int = 0
    backward_depth: int = 0

    def move(self, to: UnitState) -> None:
        """Change state; an illegal change is a bug of ours."""
        assert (self.state, to) in _LEGAL, f"unit {self.name}: {self.state.value} -> {to.value}"
        self.state = to

    def current_versions(self) -> tuple[int, ...]:
        return tuple(shadow.param._version for shadow in self.params)

    @property
    def in_use(self) -> bool:
        return self.forward_depth > 0 or self.backward_depth > 0

    def show_device(self) -> None:
        for shadow in self.params:
            assert shadow.device_view is not None
            shadow.show(shadow.device_view)

    def show_host(self) -> None:
        for shadow in self.params:
            shadow.show(shadow.host_view)


def bind_slot(backend: Backend, unit: Unit, slot: Slot) -> None:
    """Give a streamed unit its slot, for the whole run."""
    unit.slot = slot
    with backend.internal():
        raw = slot.buffer.tensor()
        for shadow in unit.params:
            at = slot.span.offset + shadow.working.offset - unit.working.offset
            shadow.device_view = shadow.shape.view(raw, at)


def bind_resident(backend: Backend, unit: Unit, buffer: DeviceBuffer, offset: int) -> None:
    """Give a resident unit its device memory."""
    unit.resident = Span(buffer, offset, unit.working.nbytes)
    with backend.internal():
        raw = buffer.tensor()
        for shadow in unit.params:
            shadow.device_view = shadow.shape.view(raw, offset + shadow.working.offset - unit.working.offset)


def slab_view(buffer: HostBuffer, offset: int, numel: int, dtype: torch.dtype) -> tuple[torch.Tensor, Span]:
    """(CPU view, span) of `numel` elements in a host slab."""
    return flat(buffer.cpu(), offset, numel, dtype), Span(buffer, offset, numel * dtype.itemsize)
