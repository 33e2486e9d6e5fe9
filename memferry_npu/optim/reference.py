"""The serial reference: the same training with nothing offloaded, overlapped or vectorised by us.

Owns: `SerialAdamW`, which every plan and backend is compared with bitwise. It uses torch for
forward and backward and `backend.arithmetic` (numpy) for the rest; it shares no code with the
offloaded optimizer but that definition. Must not import runtime.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch
from torch import nn

from ..backend import arithmetic as arith
from ..memory.layout import is_dense
from .groups import check_optimizer, snapshot

_BLOCK = 1 << 16


class SerialAdamW:
    """AdamW by docs/arithmetic.md on an ordinary model, step by step.

    Args:
        optimizer: `torch.optim.AdamW` over the model's parameters; its groups are read at each step.
        max_grad_norm: clip the global norm to this.
        accumulation_steps: above 1, the first gradient is widened to fp32 too, as offload does.
        compute_dtype: convert the parameters to this dtype; masters keep the fp32 values.

    `state[p]` has `step` (int), `exp_avg`, `exp_avg_sq` and `master` (fp32 arrays in the
    parameter's memory order).
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        max_grad_norm: float | None = None,
        accumulation_steps: int = 1,
        compute_dtype: torch.dtype | None = None,
    ) -> None:
        check_optimizer(optimizer)
        self.param_groups = optimizer.param_groups
        self.max_grad_norm = max_grad_norm
        self._widen = accumulation_steps > 1
        self.grad_norm = 0.0
        self.step_applied = False
        self.state: dict[nn.Parameter, dict[str, Any]] = {}
        self._prior: dict[nn.Parameter, torch.Tensor | None] = {}
        self._handles: list[Any] = []
        for param in self._params():
            if not param.requires_grad:
                continue
            master = _flat(param).astype(np.float32)
            self.state[param] = {
                "step": 0,
                "exp_avg": np.zeros_like(master),
                "exp_avg_sq": np.zeros_like(master),
                "master": arith.canonical_nan(master),
            }
            if compute_dtype is not None:
                param.data = param.data.to(compute_dtype)
            param.grad_dtype = None
            self._handles.append(param.register_hook(lambda _, p=param: self._before(p)))
            self._handles.append(param.register_post_accumulate_grad_hook(self._after))
            self.state[param]["version"] = param._version

    def _params(self) -> list[nn.Parameter]:
        return [p for group in self.param_groups for p in group["params"]]

    def _before(self, param: nn.Parameter) -> None:
        if not self._prior:
            torch.autograd.Variable._execution_engine.queue_callback(self._restore)
        self._prior[param] = param.grad
        param.grad = None

    def _restore(self) -> None:
        """`autograd.grad` runs the hook before, but delivers nothing: put back what was there."""
        for param, prior in self._prior.items():
            param.grad = prior
        self._prior.clear()

    def _after(self, param: nn.Parameter) -> None:
        """A gradient arrived: the first stays as it is, later ones are added in fp32."""
        prior, grad = self._prior.pop(param), param.grad
        assert grad is not None
        if prior is None:
            param.grad = grad.float() if self._widen else grad
        else:
            param.grad = prior.float() + grad.float()

    @torch.no_grad()
    def step(self) -> None:
        """One update of every parameter that has a gradient, or none if one is not finite."""
        updates = []
        for group in self.param_groups:
            options = snapshot(group)
            for param in group["params"]:
                if param in self.state:
                    self._follow_writes(param)
                    if param.grad is not None:
                        updates.append((param, options, _flat(param.grad, param).astype(np.float32)))
        norm = arith.global_norm([arith.chunk_sums(grad) for _, _, grad in updates])
        bad = any(arith.has_nonfinite(grad) for _, _, grad in updates)
        self.grad_norm = norm
        self.step_applied = not arith.skips_step(bad, norm if self.max_grad_norm is not None else None)
        if not self.step_applied:
            warnings.warn("step skipped: a gradient or the norm is not finite", RuntimeWarning, stacklevel=2)
            return
        coef = np.float32(1.0) if self.max_grad_norm is None else arith.clip_coef(norm, self.max_grad_norm)
        for param, options, grad in updates:
            state = self.state[param]
            state["step"] += 1
            scalars = options.scalars(state["step"])
            p, m, v = state["master"], state["exp_avg"], state["exp_avg_sq"]
            for at in range(0, p.size, _BLOCK):  # in blocks, so that temporaries stay small
                part = slice(at, at + _BLOCK)
                p[part], m[part], v[part] = arith.adamw(p[part], m[part], v[part], grad[part], scalars, coef)
            self._publish(param)

    def _publish(self, param: nn.Parameter) -> None:
        """Working weights from the master."""
        master = self.state[param]["master"]
        if param.dtype is torch.bfloat16:
            values = torch.from_numpy(arith.round_bf16(master).view(np.int16)).view(torch.bfloat16)
        else:
            values = torch.from_numpy(master)
        _order(param.data, param).copy_(values)

    def _follow_writes(self, param: nn.Parameter) -> None:
        """Weights that the user wrote in place are the master from now on."""
        state = self.state[param]
        if param._version != state["version"]:
            state["master"] = arith.canonical_nan(_flat(param).astype(np.float32))
            state["version"] = param._version

    def zero_grad(self, set_to_none: bool = True) -> None:
        for param in self._params():
            if set_to_none:
                param.grad = None
            elif param.grad is not None:
                param.grad.zero_()

    def detach(self) -> None:
        """Remove the hooks from the parameters."""
        for handle in self._handles:
            handle.remove()


def _order(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """1-D view of `tensor` in the memory order of `like`; both have the same strides."""
    if not is_dense(like.shape, like.stride()):
        return tensor.view(-1)
    return tensor.as_strided((tensor.numel(),), (1,))


def _flat(tensor: torch.Tensor, like: torch.Tensor | None = None) -> Any:
    """fp32 array of the elements in the memory order of `like` (itself by default); a copy."""
    like = tensor if like is None else like
    stride = like.stride() if is_dense(like.shape, like.stride()) else torch.empty(like.shape).stride()
    staged = torch.empty_strided(tuple(like.shape), tuple(stride), dtype=torch.float32)
    staged.copy_(tensor.detach())
    return staged.as_strided((tensor.numel(),), (1,)).numpy().copy()
