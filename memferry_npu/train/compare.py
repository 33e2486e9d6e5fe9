"""Is a run's result exactly that of training without offload?

Owns: the fingerprint of a set of weights, the first difference between two sets,
and the stock `torch.optim.AdamW` run that shows how far its rounding lies from ours.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn

Weights = Mapping[str, Tensor]

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def copy_weights(model: nn.Module) -> dict[str, Tensor]:
    """Every entry of `model.state_dict()`, copied to memory of its own."""
    return {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}


def fingerprint(weights: Weights) -> str:
    """sha256, in hex, over name, dtype, shape and raw bytes of every tensor, in order of names."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        value = weights[name]
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        digest.update(_bits(value).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def first_difference(ours: Weights, theirs: Weights) -> str | None:
    """`name[index] a vs b` where the first bit differs, in order of names; None where nothing does."""
    for name in sorted(set(ours) | set(theirs)):
        if name not in ours or name not in theirs:
            return f"{name} is missing in {'the reference' if name in ours else 'the offloaded run'}"
        a, b = ours[name], theirs[name]
        if a.dtype != b.dtype or a.shape != b.shape:
            return f"{name}: {a.dtype} {tuple(a.shape)} vs {b.dtype} {tuple(b.shape)}"
        unequal = (_bits(a) != _bits(b)).nonzero()
        if len(unequal):
            flat = int(unequal[0])
            return f"{_element(name, a, flat)} {a.reshape(-1)[flat].item()!r} vs {b.reshape(-1)[flat].item()!r}"
    return None


def largest_difference(ours: Weights, theirs: Weights) -> tuple[float, str]:
    """The largest |a - b| over all elements, and `name[index]` of it; the first element where all are equal.

    A NaN on one side counts as infinity.
    """
    largest, where = -1.0, "no weights"
    for name, value in ours.items():
        if value.numel():
            a, b = value.double(), theirs[name].double()
            gap = torch.where(a == b, 0.0, (a - b).abs()).nan_to_num(nan=float("inf"), posinf=float("inf"))
            flat = int(gap.reshape(-1).argmax())
            if float(gap.reshape(-1)[flat]) > largest:
                largest, where = float(gap.reshape(-1)[flat]), _element(name, value, flat)
    return max(largest, 0.0), where


def _bits(value: Tensor) -> Tensor:
    """The tensor's elements in logical order as integers: NaN equals itself, and 0.0 differs from -0.0."""
    return value.detach().contiguous().reshape(-1).view(_BITS[value.element_size()])


def _element(name: str, value: Tensor, flat: int) -> str:
    index = []
    for size in reversed(value.shape):
        index.append(flat % size)
        flat //= size
    return f"{name}[{', '.join(str(i) for i in reversed(index))}]"


class TorchMasterAdamW:
    """Stock `torch.optim.AdamW` over fp32 copies of a plain model's parameters.

    The usual recipe for bf16 weights: gradients are added up in fp32 over the micro-batches, clipped by
    `clip_grad_norm_`, applied to fp32 masters by torch, and the masters are rounded back to the weights.
    """

    def __init__(
        self,
        optimizer: torch.optim.AdamW,
        *,
        max_grad_norm: float | None = None,
        compute_dtype: torch.dtype | None = None,
    ) -> None:
        self._max_grad_norm = max_grad_norm
        self._pairs: list[tuple[nn.Parameter, nn.Parameter]] = []
        groups = []
        for group in optimizer.param_groups:
            masters = [nn.Parameter(p.detach().float().clone()) for p in group["params"]]
            self._pairs += zip(group["params"], masters, strict=True)
            groups.append({**group, "params": masters})
        self._torch = torch.optim.AdamW(groups, foreach=False)
        for parameter, master in self._pairs:
            if compute_dtype is not None:
                parameter.data = parameter.data.to(compute_dtype)
            parameter.register_post_accumulate_grad_hook(_add_to(master))

    @property
    def param_groups(self) -> list[dict[str, object]]:
        return self._torch.param_groups

    def step(self) -> None:
        masters = [master for _, master in self._pairs]
        if self._max_grad_norm is not None:
            nn.utils.clip_grad_norm_(masters, self._max_grad_norm)
        self._torch.step()
        with torch.no_grad():
            for parameter, master in self._pairs:
                parameter.copy_(master)

    def zero_grad(self) -> None:
        self._torch.zero_grad()


def _add_to(master: nn.Parameter) -> Callable[[Tensor], None]:
    def move(parameter: Tensor) -> None:
        assert parameter.grad is not None
        gradient = parameter.grad.float()
        master.grad = gradient if master.grad is None else master.grad + gradient
        parameter.grad = None

    return move


def parameter_groups(model: nn.Module, weight_decay: float) -> Iterable[dict[str, object]]:
    """Two groups: matrices decay, norms and biases do not."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
