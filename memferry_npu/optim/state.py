"""Optimizer state as logical tensors: out to a state_dict and back in, in place.

Owns: the mapping between storages (slabs, split masters) and `step, exp_avg, exp_avg_sq,
master`. torch's own `load_state_dict` casts state to the parameter's dtype and allocates
anew, which would lose fp32 state and the pinned slabs; hence this module.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..memory.store import Store, memory_order

if TYPE_CHECKING:
    from .optimizer import OffloadOptimizer

_KEYS = ("exp_avg", "exp_avg_sq")


def logical_state(store: Store, param: nn.Parameter, state: dict[str, Any]) -> dict[str, Any]:
    """The state of one parameter; a split master is joined into a new tensor."""
    shadow = store.shadows[param]
    out = dict(state)
    if shadow.low is not None:
        store.backend.host_access("join master", reads=(*shadow.state_spans, shadow.working))
        out["master"] = shadow.shape_fp32(store.master_values(shadow))
    return out


def restore_state(optimizer: OffloadOptimizer, store: Store, state_dict: dict[str, Any]) -> None:
    """See `OffloadOptimizer.load_state_dict`."""
    saved_groups, groups = state_dict["param_groups"], optimizer.param_groups
    if len(saved_groups) != len(groups):
        raise ValueError(f"the state has {len(saved_groups)} parameter groups, the optimizer {len(groups)}")
    pairs: list[tuple[nn.Parameter, dict[str, Any]]] = []
    for index, (saved, group) in enumerate(zip(saved_groups, groups, strict=True)):
        if len(saved["params"]) != len(group["params"]):
            raise ValueError(
                f"param_groups[{index}]: the state has {len(saved['params'])} parameters, "
                f"the optimizer {len(group['params'])}"
            )
        for key, param in zip(saved["params"], group["params"], strict=True):
            if key in state_dict["state"] and param in store.shadows:
                _check(store, param, state_dict["state"][key])
                pairs.append((param, state_dict["state"][key]))
    present = {id(param) for param, _ in pairs}
    for saved, group in zip(saved_groups, groups, strict=True):
        group.update({k: v for k, v in saved.items() if k != "params"})
        for param in group["params"]:
            if param in optimizer.state and id(param) not in present:
                _reset(store, param, optimizer.state[param])
    for param, saved_state in pairs:
        _copy_in(store, param, optimizer.state[param], saved_state)


def _check(store: Store, param: nn.Parameter, saved: dict[str, Any]) -> None:
    shadow = store.shadows[param]
    if param not in store.grads:
        raise ValueError(f"the state has moments for '{shadow.name}', which was frozen when offload() was called")
    for key in ("step", *_KEYS):
        if key not in saved:
            raise ValueError(f"the state of '{shadow.name}' has no '{key}'")
    for key in (*_KEYS, "master"):
        if key in saved and tuple(saved[key].shape) != shadow.shape.size:
            raise ValueError(
                f"'{key}' of '{shadow.name}' has shape {tuple(saved[key].shape)}, the parameter {shadow.shape.size}"
            )


def _access(store: Store, param: nn.Parameter, name: str) -> None:
    shadow = store.shadows[param]
    store.backend.host_access(name, writes=(*shadow.state_spans, shadow.working))


def _reset(store: Store, param: nn.Parameter, state: dict[str, Any]) -> None:
    """A parameter that the saved run had not stepped yet: as at the start."""
    _access(store, param, "reset state")
    shadow = store.shadows[param]
    assert shadow.exp_avg is not None and shadow.exp_avg_sq is not None
    state["step"].zero_()
    shadow.exp_avg.zero_()
    shadow.exp_avg_sq.zero_()


def _copy_in(store: Store, param: nn.Parameter, state: dict[str, Any], saved: dict[str, Any]) -> None:
    _access(store, param, "load state")
    shadow = store.shadows[param]
    with store.backend.internal(), torch.no_grad():
        state["step"].fill_(float(saved["step"]))
        for key, target in (("exp_avg", shadow.exp_avg), ("exp_avg_sq", shadow.exp_avg_sq)):
            assert target is not None
            target.copy_(memory_order(saved[key].detach().to(torch.float32), shadow.shape))
        if "master" in saved and shadow.shape.dtype is torch.bfloat16:
            store.seed(shadow, memory_order(saved["master"].detach(), shadow.shape))
