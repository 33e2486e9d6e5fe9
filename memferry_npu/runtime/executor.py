"""The executor: brings units' weights to the device before use and lets them go after.

Owns: acquire and release of units, prefetch, and the order between loads and kernels.
It replays a plan; it decides nothing about placement. Must not know about modules or
autograd (`hooks` does) or about the optimizer's arithmetic.

[Note: slots] A streamed unit has one slot for the whole run; loading it evicts whoever
was there. A unit is in use while one of its forward calls runs (`forward_depth`) or one
of its backward calls does (`backward_depth`). Only units not in use are evicted, with one
exception: a forward that runs inside backward (recomputation of a checkpointed region) may
displace a unit in backward use; it is loaded again before backward goes on.
"""

from __future__ import annotations

import torch

from ..backend.base import Backend, Span
from ..memory.shadow import Arrival, Unit, UnitState
from ..memory.store import Store
from ..transfer.direct import load, store

RELEASED = "its unit is not in use: a weight view outlived the unit's forward and backward"


class SlotConflict(RuntimeError):
    """Two units that share a slot are needed at the same time."""


class Executor:
    """State over time: which units are in use and what lies in the slots.

    Args:
        backend, store: the device and the storages.
        prefetch: how many streamed units ahead are loaded, if their slots are free.
    """

    def __init__(self, backend: Backend, store_: Store, prefetch: int) -> None:
        self.backend, self.store = backend, store_
        self._streamed = [u for u in store_.units if u.slot is not None]
        self._position = {u.index: i for i, u in enumerate(self._streamed)}
        self._prefetch = prefetch
        self._displaced: list[Unit] = []
        self._forward_total = 0
        self.in_backward = False

    # Use ------------------------------------------------------------------------------

    def enter_forward(self, unit: Unit) -> None:
        """A forward call of the unit's module begins."""
        self.backend.label(unit.name)
        self._acquire(unit, recompute=self.in_backward)
        self._forward_total += 1
        for part in (unit, *unit.borrows):
            part.forward_depth += 1
        if not self.in_backward:
            self._prefetch_from(unit, +1)

    def leave_forward(self, unit: Unit) -> None:
        """The call ended, normally, early or by an exception."""
        self._forward_total -= 1
        for part in (unit, *unit.borrows):
            part.forward_depth -= 1
            self._release(part)
        self.backend.label("user code")
        if self._forward_total == 0 and self._displaced:
            displaced, self._displaced = self._displaced, []
            for back in displaced:
                if back.backward_depth:
                    self._make_valid(back)

    def enter_backward(self, unit: Unit) -> None:
        """Gradients have reached the outputs of one of the unit's calls."""
        self.backend.label(unit.name)
        self._acquire(unit)
        for part in (unit, *unit.borrows):
            part.backward_depth += 1
        self._prefetch_from(unit, -1)

    def leave_backward(self, unit: Unit) -> None:
        """Every gradient of that call has been computed."""
        for part in (unit, *unit.borrows):
            part.backward_depth -= 1
            self._release(part)

    def reset(self) -> None:
        """After an exception: nothing is in use any more."""
        self._forward_total = 0
        self._displaced.clear()
        for unit in self.store.units:
            if unit.in_use:
                unit.forward_depth = unit.backward_depth = 0
                self._release(unit)

    def _acquire(self, unit: Unit, *, recompute: bool = False) -> None:
        for part in (unit, *unit.borrows):
            self.wait_updated(part)
            if part.slot is not None:
                if not part.in_use and part.state is not UnitState.HOST:
                    if part.versions != part.current_versions():
                        self._drop(part)  # the user wrote to the weights since this copy was made
                self._make_valid(part, recompute=recompute)
                if not part.in_use:
                    part.show_device()

    def _make_valid(self, unit: Unit, *, recompute: bool = False) -> None:
        """The unit's weights are in its slot and the compute stream is ordered after the load.

        Raises:
            SlotConflict: another unit is using the slot.
        """
        slot = unit.slot
        assert slot is not None
        if slot.holder is not unit:
            self._load(unit, recompute=recompute)
        if unit.state is UnitState.LOADING:
            assert slot.ready is not None
            slot.ready.wait(self.backend.compute)
            unit.move(UnitState.DEVICE)
        if not unit.in_use:
            self.backend.validate(slot.span)

    def _release(self, unit: Unit) -> None:
        if unit.in_use or unit.slot is None:
            return
        slot = unit.slot
        slot.free = self.backend.compute.record()
        if unit.versions != unit.current_versions() and slot.holder is unit:
            # A forward that writes its own weights wrote to the slot: keep what it wrote.
            ticket = store(self.backend, [(unit.working, self._slot_span(unit))], unit.working.nbytes, slot.free)
            ticket.wait(self.backend.compute)
            unit.versions = unit.current_versions()
        unit.show_host()
        if slot.holder is unit:
            self.backend.invalidate(slot.span, RELEASED)

    # Loads ----------------------------------------------------------------------------

    def _slot_span(self, unit: Unit) -> Span:
        assert unit.slot is not None
        return Span(unit.slot.buffer, unit.slot.span.offset, unit.working.nbytes)

    def _load(self, unit: Unit, *, recompute: bool = False) -> None:
        slot = unit.slot
        assert slot is not None
        old = slot.holder
        if old is not None:
            if old.in_use:
                if old.forward_depth or not recompute:
                    raise SlotConflict(
                        f"unit '{unit.name}' needs the slot that unit '{old.name}' is using; make one of them "
                        "resident or dha in policy.placement, or raise policy.slots"
                    )
                self._displaced.append(old)
                slot.free = self.backend.compute.record()
            if old.state is UnitState.LOADING and slot.ready is not None:
                slot.ready.wait(self.backend.compute)  # never used: order its bytes before the new load
                slot.free = self.backend.compute.record()
            old.move(UnitState.HOST)
        self.backend.validate(slot.span)
        # Before the copy: a host copy written by kernels (the user's write) is ordered by the compute stream.
        if slot.free is None or unit.versions != unit.current_versions():
            slot.free = self.backend.compute.record()
        slot.holder = unit
        slot.ready = load(
            self.backend, [(self._slot_span(unit), unit.working)], unit.working.nbytes, after=slot.free
        )
        unit.versions = unit.current_versions()
        unit.move(UnitState.LOADING)

    def _prefetch_from(self, unit: Unit, direction: int) -> None:
        at = self._position.get(unit.index)
        if at is None:
            return
        for distance in range(1, self._prefetch + 1):
            i = at + direction * distance
            if not 0 <= i < len(self._streamed):
                return
            ahead = self._streamed[i]
            slot = ahead.slot
            assert slot is not None
            if ahead.state is not UnitState.HOST or (slot.holder is not None and slot.holder.in_use):
                continue
            if ahead.updated.is_set():
                ahead.updated.wait()
                self._load(ahead)

    # Updates --------------------------------------------------------------------------

    def _drop(self, unit: Unit) -> Arrival | None:
        """The device copy is out of date. Returns a load that may still be reading the host copy."""
        slot = unit.slot
        if slot is None or unit.state is UnitState.HOST:
            return None
        pending = slot.ready if unit.state is UnitState.LOADING else None
        if pending is not None:
            pending.wait(self.backend.compute)
            slot.free = self.backend.compute.record()
        unit.move(UnitState.HOST)
        slot.holder = None
        return pending

    def begin_update(self) -> list[Arrival]:
        """Units with trainable weights wait for their update from now on; their slots' contents are
        out of date. Returns loads that may still read the old weights."""
        pending = []
        for unit in self.store.units:
            if any(shadow.trainable for shadow in unit.params):
                unit.updated.clear()
                ticket = self._drop(unit)
                if ticket is not None:
                    pending.append(ticket)
        return pending

    def refresh(self) -> None:
        """Host weights were changed between steps: make every device copy anew."""
        for unit in self.store.units:
            self._drop(unit)
            self.upload_resident(unit)
        self.wait_uploads()

    def upload_resident(self, unit: Unit) -> None:
        """Host working copy to device memory, after all kernels that are enqueued now."""
        if unit.resident is not None:
            unit.ready = load(
                self.backend, [(unit.resident, unit.working)], unit.working.nbytes, self.backend.compute.record()
            )

    def wait_updated(self, unit: Unit) -> None:
        """The unit's last update (and upload) is done for what is enqueued from now on."""
        unit.updated.wait()
        if unit.ready is not None:
            unit.ready.wait(self.backend.compute)
            unit.ready = None

    def wait_uploads(self) -> None:
        """All units are current. The optimizer has completed the step, so nothing blocks."""
        for unit in self.store.units:
            self.wait_updated(unit)

    def start(self) -> None:
        """First upload of resident units; they show device memory from now on."""
        for unit in self.store.units:
            if unit.resident is not None:
                self.upload_resident(unit)
                with self.backend.internal(), torch.no_grad():
                    unit.show_device()
        self.wait_uploads()
