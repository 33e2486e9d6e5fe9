"""Gradients on their way from autograd to the optimizer.

Owns: what happens when a gradient arrives (KEEP, COPY, DHA_WRITE; one arrival or a sum
of several), what `p.grad` shows, and handing gradients to a step. Must not know modules.

[Note: arrivals] Autograd delivers a gradient by putting it into `p.grad`. A hook before
that takes what is in `p.grad` away (`before`), one after it takes the new gradient
(`after`), so autograd never adds by itself: a second arrival, from another micro-batch or
from a second use under reentrant checkpointing, is added in fp32, in arrival order. At
the end of backward `p.grad` is a view of where the gradient lies (`expose`).
"""

from __future__ import annotations

import warnings
from collections import deque

import torch
from torch import nn

from ..backend.base import Backend, HostFlag, Span
from ..backend.hostops import HostOps
from ..memory.gradients import GradSlot, Where
from ..memory.layout import is_dense
from ..memory.shadow import ShadowParam
from ..memory.store import Store
from ..optim.update import Collected
from ..optim.worker import HostWorker
from ..transfer.direct import Ticket, store


class GradientFlow:
    """State over time: gradients in flight.

    Args:
        hold_bytes: most bytes of device gradients that wait for their copy at once.
    """

    def __init__(
        self,
        backend: Backend,
        ops: HostOps,
        store_: Store,
        worker: HostWorker,
        hold_bytes: int,
    ) -> None:
        self.backend, self.ops, self.store, self.worker = backend, ops, store_, worker
        self._hold_bytes = hold_bytes
        self._units = {shadow.param: unit for unit in store_.units for shadow in unit.params}
        self._held: deque[tuple[Ticket, torch.Tensor]] = deque()
        self._held_bytes = 0
        self._in_flight: dict[nn.Parameter, None] = {}
        self._adding: list[GradSlot] = []
        self._leaving: list[tuple[HostFlag, list[torch.Tensor]]] = []
        self._warned = False

    # Arrival --------------------------------------------------------------------------

    def before(self, param: nn.Parameter) -> None:
        """A gradient is about to be put into `p.grad`; decide what it adds to."""
        self.free_left(block=True)
        self._units[param].updated.wait()  # the last update has read the landing place
        slot, current = self.store.grads[param], param.grad
        if current is None:
            if param not in self._in_flight:
                slot.forget()
        elif current is not slot.exposed:
            self._import(param, current)
        slot.exposed = None
        param.grad = None
        self._in_flight[param] = None

    def after(self, param: nn.Parameter) -> None:
        """A gradient was put into `p.grad`: send it on its way."""
        shadow, slot = self.store.shadows[param], self.store.grads[param]
        grad, param.grad = param.grad, None
        assert grad is not None
        self._in_flight[param] = None
        values = self._memory_order(shadow, grad)
        path = self._units[param].gradient
        if slot.where is Where.NOWHERE and not self.store.options.accumulate:
            self._first(slot, values, path)
        else:
            self._add(shadow, slot, values, path)
        slot.stats_valid = True

    def _memory_order(self, shadow: ShadowParam, grad: torch.Tensor) -> torch.Tensor:
        """1-D device tensor with the gradient's elements in the parameter's memory order."""
        if grad.layout is not torch.strided:
            raise RuntimeError(f"the gradient of '{shadow.name}' is sparse; use a dense one (sparse=False)")
        shape = shadow.shape
        if tuple(grad.stride()) != shape.stride and not (_same_order(grad, shape.stride)):
            dense = torch.empty_strided(shape.size, shape.stride, dtype=grad.dtype, device=grad.device)
            with torch.no_grad():
                dense.copy_(grad)
            grad = dense
        return grad.detach().as_strided((shape.numel,), (1,))

    def _first(self, slot: GradSlot, values: torch.Tensor, path: str) -> None:
        if path == "dha_write":
            self._write(slot, values, slot.landing_mapped, accumulate=False)
            slot.where = Where.LANDING
            return
        self._stats(slot, values)
        if path == "keep":
            slot.kept, slot.where = values, Where.KEPT
        else:
            self._send(slot, values)
            slot.where = Where.LANDING

    def _add(self, shadow: ShadowParam, slot: GradSlot, values: torch.Tensor, path: str) -> None:
        """Sum in fp32. `where` says what is there already."""
        late = slot.accum is None
        self.store.add_accumulator(shadow, on_device=path == "keep")
        if late and not self._warned:
            self._warned = True
            warnings.warn(
                f"a second gradient arrived for '{shadow.name}' before step(); reserve its fp32 sum at start with "
                "policy.accumulation_steps",
                RuntimeWarning,
                stacklevel=2,
            )
        accum, keep = slot.accum_mapped, slot.keep_accum
        assert accum is not None
        if path == "keep":
            assert keep is not None
            if slot.where is Where.KEPT:
                assert slot.kept is not None
                self._write(slot, slot.kept, keep, accumulate=False)
                slot.kept = None
            elif slot.where in (Where.LANDING, Where.ACCUM):  # imported from the user's own p.grad
                source = slot.landing_mapped if slot.where is Where.LANDING else accum
                self._write(slot, source, keep, accumulate=False)
            self._write(slot, values, keep, accumulate=slot.where is not Where.NOWHERE)
            slot.where = Where.KEPT_ACCUM
        elif path == "dha_write":
            if slot.where is Where.LANDING:
                self._write(slot, slot.landing_mapped, accum, accumulate=False)
            self._write(slot, values, accum, accumulate=slot.where is not Where.NOWHERE)
            slot.where = Where.ACCUM
        else:
            if slot.where is Where.LANDING:
                self._add_on_host(slot, None, accumulate=False)
            if slot.free is not None:
                slot.free.wait()  # the host has read what was in the landing place
            ticket = self._send(slot, values)
            self._add_on_host(slot, ticket, accumulate=slot.where is not Where.NOWHERE)
            slot.where = Where.ACCUM

    # The three ways out -----------------------------------------------------------------

    def _write(self, slot: GradSlot, values: torch.Tensor, target: torch.Tensor, *, accumulate: bool) -> None:
        """Kernel: write (or add) to `target`, with the statistics of what it then holds."""
        self.backend.grad_write(values, target, accumulate, slot.chunk_sums_mapped, slot.nonfinite_mapped)

    def _stats(self, slot: GradSlot, values: torch.Tensor) -> None:
        self.backend.grad_stats(values, slot.chunk_sums_mapped, slot.nonfinite_mapped)

    def _send(self, slot: GradSlot, values: torch.Tensor) -> Ticket:
        """Copy engine to the landing place; the source is held until the copy is done."""
        nbytes = values.numel() * values.element_size()
        after = self.backend.compute.record()
        ticket = store(self.backend, [(slot.landing_span, values)] if nbytes else [], nbytes, after)
        self._held.append((ticket, values))
        self._held_bytes += nbytes
        while self._held_bytes > self._hold_bytes and len(self._held) > 1:
            self._let_go()
        return ticket

    def _let_go(self) -> None:
        """Free the oldest held gradient, in stream order: kernels that reuse it run after the copy."""
        ticket, values = self._held.popleft()
        ticket.wait(self.backend.compute)
        self._held_bytes -= values.numel() * values.element_size()

    def _add_on_host(self, slot: GradSlot, ticket: Ticket | None, *, accumulate: bool) -> None:
        """The host worker adds the landing place into the accumulator."""
        if slot.free is None:
            slot.free = self.backend.host_flag()
            slot.free.set()
        slot.free.wait()
        slot.free.clear()
        flag, after = slot.free, self.backend.compute.record()
        accum, span = slot.accum, slot.accum_span
        assert accum is not None and span is not None

        def job() -> None:
            after.synchronize()
            if ticket is not None:
                ticket.synchronize()
            self.backend.host_access(
                "accumulate gradient",
                reads=(slot.landing_span, span) if accumulate else (slot.landing_span,),
                writes=(span, *slot.stats_spans),
            )
            slot.nonfinite.fill_(int(self.ops.grad_write(slot.landing, accum, accumulate, slot.chunk_sums)))
            flag.set()

        self._adding.append(slot)
        self.worker.submit(job, flag.fail)

    # p.grad ---------------------------------------------------------------------------

    def expose(self) -> None:
        """End of backward: `p.grad` shows every gradient that has arrived."""
        while self._held:
            self._let_go()
        for slot in self._adding:
            assert slot.free is not None
            slot.free.wait()
        self._adding.clear()
        for param in self._in_flight:
            self._show(param)
        self._in_flight.clear()

    def _show(self, param: nn.Parameter) -> None:
        slot, shadow = self.store.grads[param], self.store.shadows[param]
        view: torch.Tensor | None
        if slot.where is Where.KEPT:
            assert slot.kept is not None
            view = slot.kept.as_strided(shadow.shape.size, shadow.shape.stride)
        else:
            view = {
                Where.NOWHERE: None,
                Where.LANDING: slot.landing_shaped,
                Where.ACCUM: slot.accum_shaped,
                Where.KEPT_ACCUM: slot.keep_accum_shaped,
            }[slot.where]
        param.grad = slot.exposed = view
        slot.exposed_version = 0 if view is None else view._version

    def zero_grad(self, set_to_none: bool) -> None:
        self.free_left()
        for param, slot in self.store.grads.items():
            if set_to_none:
                param.grad = None
                slot.forget()
            elif param.grad is not None:
                param.grad.requires_grad_(False)
                param.grad.zero_()

    def _import(self, param: nn.Parameter, grad: torch.Tensor) -> None:
        """The user put an own tensor into `p.grad`: it is the gradient now."""
        shadow, slot = self.store.shadows[param], self.store.grads[param]
        slot.forget()
        # A copy on the device: the user's tensor may lie anywhere and change later.
        values = self._memory_order(shadow, grad.detach().clone().to(self.backend.device))
        if values.dtype is shadow.shape.dtype:
            self._send(slot, values).wait(self.backend.compute)
            slot.where = Where.LANDING
        else:
            self.store.add_accumulator(shadow, on_device=False)
            assert slot.accum_mapped is not None
            self._write(slot, values.to(torch.float32), slot.accum_mapped, accumulate=False)
            slot.where = Where.ACCUM
        slot.stats_valid = False

    # The step -------------------------------------------------------------------------

    def collect(self, params: list[nn.Parameter]) -> Collected:
        """Gradients as `p.grad` shows them now, in host memory or on their way there."""
        out = Collected(left=self.backend.host_flag())
        leaving: list[torch.Tensor] = []
        for param in params:
            slot, grad = self.store.grads[param], param.grad
            if grad is None:
                slot.forget()
                continue
            if grad is not slot.exposed:
                self._import(param, grad)
            elif grad._version != slot.exposed_version:
                slot.stats_valid = False
                slot.exposed_version = grad._version
            if slot.where is Where.KEPT:
                assert slot.kept is not None
                out.tickets.append(self._leave(slot.landing_span, slot.kept))
                leaving.append(slot.kept)
                out.grads[param] = (slot.landing, slot.landing_span)
            elif slot.where is Where.KEPT_ACCUM:
                assert slot.accum is not None and slot.accum_span is not None and slot.keep_accum_span is not None
                after = self.backend.compute.record()
                pair = [(slot.accum_span, slot.keep_accum_span)]
                out.tickets.append(store(self.backend, pair, slot.accum_span.nbytes, after))
                out.grads[param] = (slot.accum, slot.accum_span)
            else:
                out.grads[param] = (slot.host_values, slot.host_span)
        while self._held:
            self._let_go()
        if leaving:
            self._leaving.append((out.left, leaving))
        return out

    def free_left(self, *, block: bool = False) -> None:
        """Free kept gradients of the last step whose copies the host has seen complete."""
        if self._leaving and (block or self._leaving[0][0].is_set()):
            flag, tensors = self._leaving.pop()
            flag.wait()
            tensors.clear()

    def _leave(self, span: Span, values: torch.Tensor) -> Ticket:
        after = self.backend.compute.record()
        return store(self.backend, [(span, values)] if values.numel() else [], span.nbytes, after)


def _same_order(grad: torch.Tensor, stride: tuple[int, ...]) -> bool:
    """Equal but for the strides of dimensions of size 1, which say nothing."""
    if not is_dense(grad.shape, grad.stride()):
        return False
    return all(n == 1 or a == b for n, a, b in zip(grad.shape, grad.stride(), stride, strict=True))
