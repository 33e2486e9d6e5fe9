"""Hooks on the user's model: when units are used, when backward begins and ends.

Owns: the connection between autograd and the executor. No module is changed but for its
hooks; `detach` removes them all.

[Note: backward of a unit] A call's backward begins when a gradient reaches one of its
outputs (a tensor hook on the outputs) and is over when the gradients of all its inputs
are complete (tensor hooks on the inputs): autograd runs nodes made later first, so by then
every node of the call has run. Where no input takes part in autograd, it is over when all
of the unit's parameters have their gradients, or at the end of backward. Inputs that are
leaves do not count: their hooks run as soon as they can, not in order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ..memory.shadow import Unit
from ..memory.store import Store
from .executor import Executor
from .gradients import GradientFlow

_SCALARS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
_EDGE = "_memferry_edge"


class _Call:
    """One forward call of a unit, until its backward is over."""

    __slots__ = ("active", "inputs_due", "inputs_left", "unit")

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self.inputs_due = 0
        self.inputs_left = 0
        self.active = False


class _Edge:
    """A unit's output tensor: the call that made it, and calls that took it as input.

    One hook serves both, because the order matters: the consumer lets its slot go before the
    producer, which may share it, asks for its own.
    """

    __slots__ = ("consumers", "producer")

    def __init__(self, producer: _Call) -> None:
        self.producer = producer
        self.consumers: list[_Call] = []


class Hooks:
    """State over time: open backward calls per run of the autograd engine."""

    def __init__(self, model: nn.Module, executor: Executor, flow: GradientFlow, store: Store) -> None:
        self._executor, self._flow, self._store = executor, flow, store
        self._device_type = executor.backend.device.type
        self._handles: list[RemovableHandle] = []
        self._runs: dict[int, list[_Call]] = {}
        """Engine run -> calls whose backward has begun in it."""
        self._stack: list[_Call] = []
        self._entered: set[int] = set()
        self._missing: dict[int, int] = {}
        """Unit index -> parameters that have no gradient yet in this backward."""
        self._unit_of = {shadow.param: unit for unit in store.units for shadow in unit.params}
        self._handles.append(model.register_forward_pre_hook(self._root_forward, prepend=True))

    def attach_unit(self, unit: Unit, module: nn.Module) -> None:
        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._forward_begins(unit, (args, kwargs))

        def after(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            self._forward_ends(unit, output)

        self._handles.append(module.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
        self._handles.append(module.register_forward_hook(after, with_kwargs=True, always_call=True))

    def attach_parameter(self, param: nn.Parameter) -> None:
        """Take over where autograd puts the parameter's gradient."""
        param.grad_dtype = None  # sums are fp32, whatever the parameter's dtype is

        def before(_: torch.Tensor) -> None:
            self._backward_runs()
            self._flow.before(param)

        def after(_: nn.Parameter) -> None:
            self._flow.after(param)
            self._arrived(param)

        self._handles.append(param.register_hook(before))
        self._handles.append(param.register_post_accumulate_grad_hook(after))

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    # Forward --------------------------------------------------------------------------

    def _root_forward(self, _: nn.Module, __: Any) -> None:
        if not self._stack and not self._inside_engine():
            self.finish_backward()
        for unit in self._store.units:
            if unit.index not in self._entered:
                self._executor.wait_updated(unit)  # used from outside its module, if at all: no later chance to wait

    def _forward_begins(self, unit: Unit, inputs: Any) -> None:
        if not self._stack and not self._inside_engine():
            self.finish_backward()
        self._refuse_autocast(unit)
        self._entered.add(unit.index)
        call = _Call(unit)
        self._executor.enter_forward(unit)
        self._flow.free_left(block=True)
        self._stack.append(call)
        if torch.is_grad_enabled():
            for tensor in _tensors(inputs, unit, strict=False):
                if tensor.requires_grad and not tensor.is_leaf:
                    call.inputs_due += 1
                    edge = getattr(tensor, _EDGE, None)
                    if edge is not None:
                        edge.consumers.append(call)
                    else:
                        tensor.register_hook(lambda _, call=call: self._input_done(call))

    def _forward_ends(self, unit: Unit, output: Any) -> None:
        if not self._stack or self._stack[-1].unit is not unit:
            return  # another pre-hook raised before ours ran
        call = self._stack.pop()
        self._executor.leave_forward(unit)
        if torch.is_grad_enabled():
            for tensor in _tensors(output, unit, strict=unit.slot is not None):
                if tensor.requires_grad:
                    edge = _Edge(call)
                    setattr(tensor, _EDGE, edge)
                    tensor.register_hook(lambda _, edge=edge: self._edge_reached(edge))

    def _refuse_autocast(self, unit: Unit) -> None:
        if unit.slot is None or not torch.is_autocast_enabled(self._device_type):
            return
        if any(s.shape.dtype is torch.float32 and s.shape.numel for s in unit.params):
            raise RuntimeError(
                f"autocast over streamed fp32 parameters (unit '{unit.name}') keeps a second copy of every weight on "
                "the device; set policy.compute_dtype='bfloat16' (the master stays fp32) and leave autocast off"
            )

    # Backward -------------------------------------------------------------------------

    def _inside_engine(self) -> bool:
        return torch._C._current_graph_task_id() != -1

    def _backward_runs(self) -> list[_Call]:
        """The open calls of the engine run that is going on; the first time, its end is hooked."""
        run = torch._C._current_graph_task_id()
        calls = self._runs.get(run)
        if calls is None:
            if torch.is_grad_enabled():
                raise RuntimeError("backward with create_graph=True (double backward) is not supported under offload")
            if not self._runs:
                self._missing = {
                    u.index: sum(s.trainable for s in u.params) for u in self._store.units
                }
            calls = self._runs[run] = []
            self._executor.in_backward = True
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self._backward_ends(run))
        return calls

    def _edge_reached(self, edge: _Edge) -> None:
        for consumer in edge.consumers:
            self._input_done(consumer)
        self._backward_begins(edge.producer)

    def _backward_begins(self, call: _Call) -> None:
        calls = self._backward_runs()
        if not call.active:
            self._executor.enter_backward(call.unit)
            call.active, call.inputs_left = True, call.inputs_due
            calls.append(call)

    def _input_done(self, call: _Call) -> None:
        if call.active:
            call.inputs_left -= 1
            if call.inputs_left == 0:
                self._call_done(call)

    def _call_done(self, call: _Call) -> None:
        if call.active:
            call.active = False
            for calls in self._runs.values():
                if call in calls:
                    calls.remove(call)
            self._executor.leave_backward(call.unit)

    def _arrived(self, param: nn.Parameter) -> None:
        unit = self._unit_of[param]
        self._missing[unit.index] -= 1
        if self._missing[unit.index] == 0:
            for calls in list(self._runs.values()):
                for call in [c for c in calls if c.unit is unit and c.inputs_due == 0]:
                    self._call_done(call)

    def _backward_ends(self, run: int) -> None:
        for call in list(self._runs.get(run, ())):
            self._call_done(call)
        self._runs.pop(run, None)
        if not self._runs:
            self._executor.in_backward = False
            self._flow.expose()

    def finish_backward(self) -> None:
        """Clean up what an exception in forward or backward left behind. Harmless otherwise."""
        if self._runs or (self._stack and not self._inside_engine()):
            for calls in self._runs.values():
                for call in calls:
                    call.active = False
            self._runs.clear()
            self._stack.clear()
            self._executor.in_backward = False
            self._executor.reset()
            self._flow.expose()


def _tensors(value: Any, unit: Unit, *, strict: bool) -> Iterator[torch.Tensor]:
    """Tensors in nested containers and dataclasses.

    Raises:
        TypeError: with `strict`, an object that may hide tensors.
    """
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item, unit, strict=strict)
    elif isinstance(value, list | tuple | set | frozenset):
        for item in value:
            yield from _tensors(item, unit, strict=strict)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _tensors(getattr(value, field.name), unit, strict=strict)
    elif strict and not isinstance(value, _SCALARS):
        raise TypeError(
            f"unit '{unit.name}' returned a {type(value).__name__}, which may hide tensors that backward starts "
            "from; return tensors, tuples, dicts or dataclasses, or make the unit resident"
        )
