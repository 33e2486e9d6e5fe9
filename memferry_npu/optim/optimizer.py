"""`OffloadOptimizer`: the `torch.optim.Optimizer` that `offload()` returns.

Owns: the user's view of the update: groups, state, step, checkpoints. Must not import
runtime; what it needs of the executor is the `Training` protocol.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from ..backend.base import Backend, Counters, Window
from ..backend.hostops import HostOps
from ..memory.shadow import Arrival
from ..memory.store import Store
from .groups import check_groups, check_optimizer, snapshot
from .state import logical_state, restore_state
from .update import Collected, ParamUpdate, StepResult, UpdateJob
from .worker import HostWorker


class Training(Protocol):
    """What the optimizer asks of the executor that runs forward and backward."""

    def finish_backward(self) -> None:
        """Put every gradient that has arrived into `p.grad`; clean up after an exception."""

    def import_written(self) -> None:
        """Take over weights that the user wrote in place."""

    def collect(self, params: list[nn.Parameter]) -> Collected:
        """The gradients in `p.grad`, in host memory or on their way there."""

    def begin_update(self) -> list[Arrival]:
        """Device copies of weights are out of date from now on; returns loads that still read them."""

    def refresh(self) -> None:
        """Host weights were changed: device copies are made anew."""

    def zero_grad(self, set_to_none: bool) -> None: ...

    def wait_uploads(self) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStats:
    """Figures of the last finished step. With the sim backend times are simulated."""

    window: Window
    counters: Counters

    @property
    def device_used_bytes(self) -> int:
        return self.counters.device_used_bytes

    @property
    def device_peak_bytes(self) -> int:
        return self.counters.device_peak_bytes

    @property
    def device_cap_bytes(self) -> int:
        return self.counters.device_cap_bytes

    @property
    def pinned_host_bytes(self) -> int:
        return self.counters.host_used_bytes

    @property
    def h2d_bytes(self) -> int:
        return self.window.h2d_bytes

    @property
    def d2h_bytes(self) -> int:
        return self.window.d2h_bytes

    @property
    def sim_seconds(self) -> float:
        return self.window.seconds

    @property
    def h2d_gbps(self) -> float:
        return self.window.h2d_bytes / self.window.seconds / 1e9 if self.window.seconds else 0.0

    @property
    def d2h_gbps(self) -> float:
        return self.window.d2h_bytes / self.window.seconds / 1e9 if self.window.seconds else 0.0

    @property
    def stall_fraction(self) -> float:
        return self.window.stall_fraction


class OffloadOptimizer(torch.optim.Optimizer):
    """AdamW with its state and masters in host memory, exact (docs/arithmetic.md).

    `step()` enqueues the update and returns; the next forward waits unit by unit.
    `grad_norm` and `step_applied` wait for the step's decision, `synchronize()` for all
    of it. Reads of `p` between steps need `synchronize()` first, or the policy
    `step_returns="complete"`; state_dict() and forwards do it by themselves.

    `param_groups` is the list of the optimizer that was passed to `offload()`, so LR
    schedulers made before or after see the same groups.
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        *,
        backend: Backend,
        ops: HostOps,
        store: Store,
        max_grad_norm: float | None,
        threads: int | None,
        complete: bool,
        on_close: Callable[[], None],
    ) -> None:
        check_optimizer(inner)
        self._ready = False
        super().__init__(inner.param_groups, inner.defaults)
        self._ready = True
        self.param_groups = inner.param_groups
        self.max_grad_norm = max_grad_norm
        self._decoupled = type(inner) is torch.optim.AdamW
        self._backend, self._ops, self._store = backend, ops, store
        self._threads, self._complete = threads, complete
        self._training: Training | None = None
        self._worker = HostWorker()
        self._on_close = on_close
        self._last: UpdateJob | None = None
        self._reported: StepResult | None = None
        self._window: Window | None = None
        self._closed = False
        for group in self.param_groups:
            for param in group["params"]:
                if param in store.grads:
                    shadow = store.shadows[param]
                    self.state[param] = {
                        "step": torch.zeros((), dtype=torch.float32),
                        "exp_avg": shadow.shape_fp32(shadow.exp_avg),
                        "exp_avg_sq": shadow.shape_fp32(shadow.exp_avg_sq),
                    }
                    if shadow.master is not None:
                        self.state[param]["master"] = shadow.shape_fp32(shadow.master)

    def attach(self, training: Training) -> None:
        self._training = training

    @property
    def worker(self) -> HostWorker:
        """Runs this optimizer's host work, in order."""
        return self._worker

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self._ready:
            raise RuntimeError(
                "parameters cannot be added to an offloaded optimizer; close() it and call offload() again"
            )
        super().add_param_group(param_group)

    # The step -------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Enqueue the update with the gradients in `p.grad`; returns the closure's loss.

        Parameters without a gradient do not move. A step with a non-finite gradient (or
        norm, when clipping) changes nothing: `step_applied` is False and a warning says why.

        Raises:
            RuntimeError: the host worker failed in an earlier step.
            ValueError: an option that offload does not support was set since.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        training = self._open()
        self.synchronize()
        check_groups(self.param_groups, decoupled=self._decoupled)
        training.finish_backward()
        training.import_written()
        owned = [p for g in self.param_groups for p in g["params"] if p in self._store.grads]
        collected = training.collect(owned)
        tickets = collected.tickets + training.begin_update()
        job = UpdateJob(
            backend=self._backend,
            ops=self._ops,
            units=self._store.units,
            updates=self._updates(collected),
            max_grad_norm=self.max_grad_norm,
            threads=self._threads,
            ready=self._backend.compute.record(),
            tickets=tickets,
            result=StepResult(self._backend.host_flag()),
            done=self._backend.host_flag(),
            left=collected.left,
        )
        self._window = self._backend.mark()
        self._last = job
        self._worker.submit(job.run, job.fail)
        if self._complete:
            self.synchronize()
        return loss

    def _updates(self, collected: Collected) -> list[ParamUpdate]:
        """In parameter order, with the options of this moment."""
        updates = []
        for group in self.param_groups:
            options = snapshot(group)
            for param in group["params"]:
                if param in collected.grads:
                    grad, span = collected.grads[param]
                    updates.append(
                        ParamUpdate(
                            shadow=self._store.shadows[param],
                            slot=self._store.grads[param],
                            grad=grad,
                            grad_span=span,
                            options=options,
                            step=self.state[param]["step"],
                        )
                    )
        return updates

    def synchronize(self) -> None:
        """Complete the last step: host state, working weights and uploads."""
        training = self._open()
        self._worker.check()
        if self._last is not None:
            self._last.done.wait()
            self._worker.check()
            self._report(self._last.result)
            training.wait_uploads()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch; with `set_to_none=False` it first completes the last step."""
        if not set_to_none:
            self.synchronize()
        self._open().zero_grad(set_to_none)

    def _decision(self) -> StepResult:
        self._open()
        if self._last is None:
            raise RuntimeError("no step has been taken yet")
        self._last.result.decided.wait()
        self._report(self._last.result)
        return self._last.result

    @property
    def grad_norm(self) -> float:
        """Global gradient norm of the last step before clipping. Waits for it."""
        return self._decision().grad_norm

    @property
    def step_applied(self) -> bool:
        """Did the last step change the weights? Waits for the decision."""
        return self._decision().applied

    def _report(self, result: StepResult) -> None:
        if result is not self._reported:
            self._reported = result
            if result.skip_reason is not None:
                warnings.warn(
                    f"step skipped: {result.skip_reason}; weights, moments and step counts are unchanged",
                    RuntimeWarning,
                    stacklevel=3,
                )

    def stats(self) -> StepStats:
        """Figures of the last step: the time from the `step()` before it to its own."""
        if self._window is None:
            raise RuntimeError("no step has been taken yet")
        return StepStats(window=self._window, counters=self._backend.counters())

    # State ----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """torch's layout; `exp_avg`, `exp_avg_sq` and `master` are in the parameter's shape.

        `master` (fp32) is there for bf16 weights, whether it is split or not.
        """
        self.synchronize()
        self._open().import_written()
        packed = super().state_dict()
        index = 0
        for group in self.param_groups:
            for param in group["params"]:
                if index in packed["state"]:
                    packed["state"][index] = logical_state(self._store, param, self.state[param])
                index += 1
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copy a state into the slabs, in place. Accepts torch's own AdamW states (no `master`).

        Raises:
            ValueError: groups, parameters or shapes differ; then nothing was changed.
        """
        self.synchronize()
        training = self._open()
        training.import_written()
        restore_state(self, self._store, state_dict)
        training.refresh()

    # End ------------------------------------------------------------------------------

    def _open(self) -> Training:
        if self._closed:
            raise RuntimeError("this optimizer is closed; the model holds plain weights now")
        assert self._training is not None
        return self._training

    def close(self) -> None:
        """Complete the last step, give the model plain parameters, release all memory."""
        if self._closed:
            return
        training = self._open()
        try:
            if self._last is not None and self._worker.error is None:
                self._last.done.wait()
                training.import_written()
        finally:
            self._worker.close()
            training.close()
            self._closed = True
            self._on_close()

    def __enter__(self) -> OffloadOptimizer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
