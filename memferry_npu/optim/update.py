"""One optimizer step on the host: statistics, the decision, and the update unit by unit.

Owns: `UpdateJob`, which the host worker runs while the training thread goes on with the
next forward. Must not import runtime.

[Note: order] Units are updated in forward order. Unit i's flag is set as soon as its
working weights are written (and, if it is resident, its upload is enqueued), so forward
waits for unit i alone. Everything the job reads was ordered before `ready`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import nn

from ..backend.arithmetic import clip_coef, global_norm, skips_step
from ..backend.base import Backend, Event, HostFlag, Span
from ..backend.hostops import AdamwBuffers, HostOps
from ..memory.gradients import GradSlot
from ..memory.shadow import Arrival, ShadowParam, Unit
from ..transfer.direct import load
from .groups import GroupOptions


@dataclass(slots=True, kw_only=True)
class ParamUpdate:
    """One parameter's part in a step. `grad` is 1-D on the CPU, fp32 or bf16, memory order."""

    shadow: ShadowParam
    slot: GradSlot
    grad: torch.Tensor
    grad_span: Span
    options: GroupOptions
    step: torch.Tensor
    """fp32 scalar of the optimizer state: updates so far."""


@dataclass(slots=True, eq=False)
class StepResult:
    """What a step decided. Valid once `decided` is set."""

    decided: HostFlag
    grad_norm: float = math.nan
    """Global 2-norm before clipping; 0 when no parameter had a gradient."""
    applied: bool = False
    skip_reason: str | None = None


@dataclass(slots=True, kw_only=True)
class Collected:
    """The gradients of a step, as the executor hands them over."""

    left: HostFlag
    """To be set when the tickets are done: the device gradients may be freed then."""
    grads: dict[nn.Parameter, tuple[torch.Tensor, Span]] = field(default_factory=dict)
    """Per parameter with a gradient: 1-D CPU values in memory order (fp32 or bf16), and their span."""
    tickets: list[Arrival] = field(default_factory=list)
    """Gradients that leave the device now."""


@dataclass(slots=True, kw_only=True, eq=False)
class UpdateJob:
    """Everything a step needs, snapshotted by `step()`."""

    backend: Backend
    ops: HostOps
    units: list[Unit]
    updates: list[ParamUpdate]
    """In parameter order (the order of the norm)."""
    max_grad_norm: float | None
    threads: int | None
    """Threads of the host optimizer; None: all cores."""
    ready: Event
    """After all gradients and statistics are in host memory and all kernels of the step are done."""
    tickets: list[Arrival]
    """Gradients that leave the device now, and loads that still read the old weights."""
    result: StepResult
    done: HostFlag
    left: HostFlag
    """Set when the tickets are done."""

    def run(self) -> None:
        self.ready.synchronize()
        for ticket in self.tickets:
            ticket.synchronize()
        self.left.set()
        coef = self._decide()
        self.result.decided.set()
        if coef is not None:
            by_unit: dict[int, list[ParamUpdate]] = {}
            owner = {id(shadow): unit.index for unit in self.units for shadow in unit.params}
            for update in self.updates:
                by_unit.setdefault(owner[id(update.shadow)], []).append(update)
            for unit in self.units:
                if not unit.updated.is_set():
                    self._update(unit, by_unit.get(unit.index, []), coef)
                    unit.updated.set()
        else:
            for unit in self.units:
                unit.updated.set()
        self.done.set()

    def fail(self, error: BaseException) -> None:
        """Wake everyone who waits for this job, with its error."""
        for flag in (self.left, self.result.decided, self.done, *(unit.updated for unit in self.units)):
            if not flag.is_set():
                flag.fail(error)

    def _decide(self) -> float | None:
        """The clip coefficient, or None to skip the step."""
        for update in self.updates:
            if not update.slot.stats_valid:
                self.backend.host_access("grad_stats", reads=(update.grad_span,), writes=update.slot.stats_spans)
                update.slot.nonfinite.fill_(int(self.ops.grad_stats(update.grad, update.slot.chunk_sums)))
                update.slot.stats_valid = True
        self.backend.host_access("read norm", reads=[s for u in self.updates for s in u.slot.stats_spans])
        bad = [u.shadow.name for u in self.updates if int(u.slot.nonfinite)]
        norm = global_norm([u.slot.chunk_sums.numpy() for u in self.updates])
        self.result.grad_norm = norm
        if skips_step(bool(bad), norm if self.max_grad_norm is not None else None):
            more = " and others" if len(bad) > 3 else ""
            where = f"the gradient of {', '.join(bad[:3])}{more} has NaN or Inf"
            self.result.skip_reason = where if bad else f"the gradient norm is {norm}"
            return None
        self.result.applied = True
        return 1.0 if self.max_grad_norm is None else float(clip_coef(norm, self.max_grad_norm))

    def _update(self, unit: Unit, updates: list[ParamUpdate], coef: float) -> None:
        if not updates:
            return
        spans = [s for u in updates for s in (*u.shadow.state_spans, u.shadow.working)]
        self.backend.host_access(
            f"adamw {unit.name}",
            reads=[u.grad_span for u in updates] + spans,
            writes=spans,
            threads=self.threads,
        )
        for update in updates:
            shadow = update.shadow
            assert shadow.exp_avg is not None and shadow.exp_avg_sq is not None
            fp32 = shadow.shape.dtype is torch.float32
            step = int(update.step) + 1
            self.ops.adamw(
                AdamwBuffers(
                    grad=update.grad,
                    exp_avg=shadow.exp_avg,
                    exp_avg_sq=shadow.exp_avg_sq,
                    master=shadow.working_cpu if fp32 else shadow.master,
                    working=None if fp32 else shadow.working_cpu,
                    low=shadow.low,
                ),
                update.options.scalars(step),
                coef,
            )
            update.step.fill_(float(step))
        if unit.resident is not None:
            unit.ready = load(self.backend, [(unit.resident, unit.working)], unit.working.nbytes, after=self.ready)
