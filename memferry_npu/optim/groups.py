"""Options of the parameter groups: which are supported, and a snapshot of them per step.

Owns: reading `torch.optim.AdamW`/`Adam` groups. Must not import runtime.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from ..backend.arithmetic import AdamwScalars, adamw_scalars


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupOptions:
    """What one group asked for when `step()` was called."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float

    def scalars(self, step: int) -> AdamwScalars:
        """The fp32 factors of AdamW for the `step`-th update (from 1) of a parameter."""
        return adamw_scalars(self.lr, self.beta1, self.beta2, self.eps, self.weight_decay, step)


def snapshot(group: dict[str, Any]) -> GroupOptions:
    """Read a group; tensors (a tensor lr) are read as floats."""
    beta1, beta2 = group["betas"]
    return GroupOptions(
        lr=float(group["lr"]),
        beta1=float(beta1),
        beta2=float(beta2),
        eps=float(group["eps"]),
        weight_decay=float(group["weight_decay"]),
    )


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Raise unless the update is one that docs/arithmetic.md defines.

    Raises:
        TypeError: not torch's Adam or AdamW (a subclass may override anything).
        ValueError: an option that changes the update: amsgrad, maximize, coupled weight decay, ...
    """
    kind = type(optimizer)
    if kind not in (torch.optim.AdamW, torch.optim.Adam):
        raise TypeError(f"offload() supports torch.optim.AdamW and Adam, not {kind.__module__}.{kind.__qualname__}")
    check_groups(optimizer.param_groups, decoupled=kind is torch.optim.AdamW)


def check_groups(groups: Iterable[dict[str, Any]], *, decoupled: bool) -> None:
    """See `check_optimizer`."""
    for index, group in enumerate(groups):
        for option in ("amsgrad", "maximize", "differentiable", "capturable"):
            if group.get(option):
                raise ValueError(f"param_groups[{index}]: {option}=True is not supported under offload; leave it off")
        if not decoupled and not group.get("decoupled_weight_decay") and float(group["weight_decay"]) != 0.0:
            raise ValueError(
                f"param_groups[{index}]: Adam with weight_decay={group['weight_decay']} couples decay and moments; "
                "use torch.optim.AdamW"
            )
