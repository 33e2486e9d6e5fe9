"""The public verb: `offload(model, optimizer, policy=...)`.

Owns: checking what comes in, putting store, executor, hooks and optimizer together, and
taking it apart again. When it raises, the model and the optimizer are as they were.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from .backend.base import Backend, OutOfMemoryError
from .backend.hostops import load_host_ops
from .memory.shadow import Arrival
from .memory.store import SUPPORTED, Store
from .optim.groups import check_optimizer
from .optim.optimizer import OffloadOptimizer
from .optim.update import Collected
from .runtime.executor import Executor
from .runtime.gradients import GradientFlow
from .runtime.hooks import Hooks
from .runtime.policy import OffloadPolicy
from .runtime.units import UnitModule, find_units, plan_by_hand, store_options, unit_specs
from .runtime.written import LoadedWeights, import_written
from .schedule.plan import Plan

_ATTRIBUTE = "_memferry_optimizer"


class _Training:
    """What `OffloadOptimizer` asks for, spread over executor, hooks and gradient flow."""

    def __init__(
        self, model: nn.Module, backend: Backend, store: Store, executor: Executor, flow: GradientFlow, hooks: Hooks
    ) -> None:
        self._model, self._backend, self._store = model, backend, store
        self._executor, self._flow, self._hooks = executor, flow, hooks
        self._handles: list[Any] = []

    def finish_backward(self) -> None:
        self._hooks.finish_backward()

    def import_written(self) -> None:
        import_written(self._backend, self._store)

    def collect(self, params: list[nn.Parameter]) -> Collected:
        return self._flow.collect(params)

    def begin_update(self) -> list[Arrival]:
        return self._executor.begin_update()

    def refresh(self) -> None:
        self._executor.refresh()

    def zero_grad(self, set_to_none: bool) -> None:
        self._hooks.finish_backward()
        self._flow.zero_grad(set_to_none)

    def wait_uploads(self) -> None:
        self._executor.wait_uploads()
        self._flow.free_left()

    def watch_state_dicts(self, optimizer: OffloadOptimizer) -> None:
        """The model's own state_dict() and load_state_dict() see complete, current weights."""
        loaded = LoadedWeights(self._backend, self._store)

        def saving(*_: Any) -> None:
            optimizer.synchronize()

        def loading(_: nn.Module, state_dict: dict[str, Any], prefix: str, *__: Any) -> None:
            optimizer.synchronize()
            import_written(self._backend, self._store)
            loaded.before(state_dict, prefix)

        def has_loaded(*_: Any) -> None:
            loaded.after()
            self._executor.refresh()

        self._handles += [
            self._model.register_state_dict_pre_hook(saving),
            self._model.register_load_state_dict_pre_hook(loading),
            self._model.register_load_state_dict_post_hook(has_loaded),
        ]

    def close(self) -> None:
        """The model holds ordinary tensors again; gradients are gone."""
        self._hooks.finish_backward()
        self._hooks.detach()
        for handle in self._handles:
            handle.remove()
        self._flow.zero_grad(True)
        self._backend.synchronize()
        self._store.restore()
        self._store.close()


def offload(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    policy: OffloadPolicy | None = None,
    backend: Backend | None = None,
    plan: Plan | None = None,
) -> OffloadOptimizer:
    """Train `model` with its state in host memory, with exactly the result of plain training.

    In place: the parameters stay the same objects, the training loop does not change. Use
    the returned optimizer instead of `optimizer`; `close()` it (or use it in a `with`) to
    get an ordinary model back.

    Args:
        model: on the CPU or the backend's device; fp32 and bf16 parameters.
        optimizer: `torch.optim.AdamW` (or `Adam` without weight decay) over its parameters. State it
            already has is taken over.
        policy: placement rules, budgets, clipping. The default streams everything.
        backend: the device. None: the simulated node.
        plan: decisions per unit instead of the policy's rules.

    Raises:
        TypeError, ValueError: a model, optimizer, policy or plan that is not supported; says which part.
        OutOfMemoryError: a tier cannot hold what the plan reserves at start.
    """
    policy = policy or OffloadPolicy()
    check_optimizer(optimizer)
    _check_model(model, optimizer)
    if backend is None:
        from .backend.sim import SimBackend

        backend = SimBackend()
    owned = {p for group in optimizer.param_groups for p in group["params"]}
    trainable = {p for p in model.parameters() if p in owned and p.requires_grad}
    units = find_units(model, policy.units)
    plan = plan or plan_by_hand(units, trainable, policy)
    _check_budget(plan, policy, backend)
    by_name = {u.name: u for u in units}
    ops = load_host_ops(policy.host_threads)
    backend.limit_memory(policy.device_memory_bytes, policy.host_memory_bytes)
    store = Store(backend, ops, unit_specs(units, plan), trainable, store_options(policy))
    session = contextlib.ExitStack()

    def closed() -> None:
        session.close()
        backend.limit_memory(None, None)
        delattr(model, _ATTRIBUTE)

    wrapped = OffloadOptimizer(
        optimizer,
        backend=backend,
        ops=ops,
        store=store,
        max_grad_norm=policy.max_grad_norm,
        threads=policy.host_threads,
        complete=policy.step_returns == "complete",
        on_close=closed,
    )
    for unit in store.units:
        unit.borrows = [store.units[i] for i, u in enumerate(plan.units) if u.name in by_name[unit.name].borrows]
    executor = Executor(backend, store, policy.slots - 1)
    largest = max((sum(s.shape.nbytes for s in u.params) for u in store.units), default=0)
    flow = GradientFlow(backend, ops, store, wrapped.worker, 2 * largest)
    hooks = Hooks(model, executor, flow, store)
    for unit in store.units:
        hooks.attach_unit(unit, by_name[unit.name].module)
    for param in store.grads:
        hooks.attach_parameter(param)
    training = _Training(model, backend, store, executor, flow, hooks)
    wrapped.attach(training)
    training.watch_state_dicts(wrapped)
    with torch.no_grad():
        executor.start()
    for name, buffer in model.named_buffers():
        backend.adopt(buffer, name)
    session.enter_context(backend.session())
    setattr(model, _ATTRIBUTE, wrapped)
    if optimizer.state:
        wrapped.load_state_dict(optimizer.state_dict())
    return wrapped


@contextlib.contextmanager
def place_plain(model: nn.Module, backend: Backend) -> Iterator[None]:
    """Plain training on the backend's device: parameters, gradients and optimizer state all count.

    Raises:
        OutOfMemoryError: here or inside, where it does not fit.
    """
    with contextlib.ExitStack() as stack:
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            backend.adopt(tensor.detach(), name)
        stack.enter_context(backend.session())
        backend.label("plain training")
        yield


def _check_model(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if hasattr(model, _ATTRIBUTE):
        raise ValueError("this model is offloaded already; close() its optimizer first")
    if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        raise TypeError(f"offload() takes the bare model, not {type(model).__name__}")
    params = dict(model.named_parameters())
    for name, param in params.items():
        if param.is_meta:
            raise ValueError(f"parameter '{name}' is on the meta device; materialise the model first")
        if type(param.data) is not torch.Tensor:
            raise TypeError(f"parameter '{name}' is a {type(param.data).__name__}; plain tensors are supported")
        if param.dtype not in SUPPORTED and param.dtype.is_floating_point:
            raise ValueError(
                f"parameter '{name}' is {param.dtype}; fp32 and bf16 are supported (model.to(torch.bfloat16), or "
                "fp32 with policy.compute_dtype='bfloat16')"
            )
        if not param.dtype.is_floating_point:
            raise ValueError(f"parameter '{name}' is {param.dtype}; register integer tensors as buffers")
        if param.grad is not None:
            raise ValueError(f"parameter '{name}' has a gradient; call zero_grad() before offload()")
    ids = {id(p) for p in params.values()}
    for index, group in enumerate(optimizer.param_groups):
        for at, param in enumerate(group["params"]):
            if id(param) not in ids:
                where = f"param_groups[{index}]['params'][{at}] (shape {tuple(param.shape)})"
                raise ValueError(f"{where} is not a parameter of the model")


def _check_budget(plan: Plan, policy: OffloadPolicy, backend: Backend) -> None:
    """The policy's own limits, before anything is reserved."""
    for tier, asked, cap, hint in (
        (
            "the device budget",
            plan.device_static_bytes,
            policy.device_memory_bytes,
            "make units dha, lower policy.slots, or raise device_memory",
        ),
        ("the host budget", plan.host_bytes, policy.host_memory_bytes, "turn split_master on, or raise host_memory"),
    ):
        if cap is not None and asked > cap:
            raise OutOfMemoryError(
                tier=tier, unit="the plan", asked_bytes=asked, free_bytes=cap, cap_bytes=cap, hint=hint
            )


__all__ = ["OffloadOptimizer", "OffloadPolicy", "UnitModule", "offload", "place_plain"]
