"""Small models and the comparison that every parity test uses."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from memferry_npu.api import OffloadOptimizer, OffloadPolicy, offload
from memferry_npu.backend.sim import SimBackend
from memferry_npu.optim.reference import SerialAdamW

VOCAB = 37


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Tower(nn.Module):
    """Embedding, blocks, norm, head: the shape of the models that people train."""

    def __init__(self, width: int = 16, blocks: int = 4, *, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def tokens(step: int, micro: int = 0, rows: int = 2, length: int = 6) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + micro)
    return torch.randint(0, VOCAB, (rows, length), generator=generator)


def tower_loss(model: nn.Module, step: int, micro: int) -> torch.Tensor:
    batch = tokens(step, micro)
    return F.cross_entropy(model(batch).float().flatten(0, 1), batch.flatten())


def adamw(model: nn.Module, **options: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), **{"lr": 1e-2, "weight_decay": 0.1, **options})


Loss = Callable[[nn.Module, int, int], torch.Tensor]


def train(
    model: nn.Module,
    optimizer: Any,
    steps: int,
    *,
    accumulation: int = 1,
    loss: Loss = tower_loss,
    first: int = 0,
    between: Callable[[nn.Module, Any, int], None] | None = None,
) -> list[float]:
    """The user's loop; `between` runs after backward, before step."""
    losses = []
    for step in range(first, first + steps):
        for micro in range(accumulation):
            value = loss(model, step, micro) / accumulation
            value.backward()
            losses.append(value.item())
        if between is not None:
            between(model, optimizer, step)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def bits(values: Any) -> np.ndarray:
    """The raw bits of a tensor or array, flat, so that -0 and NaN payloads count."""
    if isinstance(values, torch.Tensor):
        values = values.detach().contiguous().view(-1)
        values = values.view(torch.int16 if values.element_size() == 2 else torch.int32).numpy()
    else:
        values = np.ascontiguousarray(values).reshape(-1).view(np.int32)
    return values.copy()


def assert_same_bits(name: str, got: Any, expected: Any) -> None:
    """Bitwise equality; the first difference is printed."""
    a, b = bits(got), bits(expected)
    assert a.shape == b.shape, f"{name}: {a.shape} elements against {b.shape}"
    different = np.flatnonzero(a != b)
    if different.size:
        i = int(different[0])
        left = got.detach().contiguous().view(-1)[i] if isinstance(got, torch.Tensor) else np.ravel(got)[i]
        theirs = expected.detach().contiguous().view(-1) if isinstance(expected, torch.Tensor) else np.ravel(expected)
        right = theirs[i]
        raise AssertionError(
            f"{name}[{i}]: {left} ({a[i]:#x}) against {right} ({b[i]:#x}); {different.size} of {a.size} differ"
        )


def in_memory_order(param: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """1-D copy of `values` in the memory order that `param` has."""
    out = torch.empty_strided(tuple(values.shape), tuple(param.stride()), dtype=values.dtype)
    out.copy_(values)
    return out.as_strided((values.numel(),), (1,))


def assert_equal_training(
    offloaded: nn.Module, optimizer: OffloadOptimizer, plain: nn.Module, reference: SerialAdamW
) -> None:
    """Weights, moments, masters and step counts of both runs, bitwise."""
    optimizer.synchronize()
    state = optimizer.state_dict()["state"]
    index = {p: i for i, p in enumerate(p for g in optimizer.param_groups for p in g["params"])}
    pairs = zip(offloaded.named_parameters(), plain.named_parameters(), strict=True)
    for (name, ours), (_, theirs) in pairs:
        assert_same_bits(name, ours.detach().clone(), theirs)
        if theirs not in reference.state:
            assert index.get(ours) not in state, f"{name}: frozen, but it has state"
            continue
        mine, expected = state[index[ours]], reference.state[theirs]
        assert int(mine["step"]) == expected["step"], f"{name}: step {mine['step']} against {expected['step']}"
        for key in ("exp_avg", "exp_avg_sq"):
            assert_same_bits(f"{name}.{key}", in_memory_order(theirs, mine[key]), expected[key])
        if "master" in mine:
            assert_same_bits(f"{name}.master", in_memory_order(theirs, mine["master"]), expected["master"])
        else:
            assert_same_bits(f"{name}.master", in_memory_order(theirs, theirs.detach()), expected["master"])


@contextlib.contextmanager
def offloaded(
    model: nn.Module,
    policy: OffloadPolicy | None = None,
    *,
    backend: SimBackend | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    **options: Any,
) -> Iterator[tuple[OffloadOptimizer, SimBackend]]:
    backend = backend or SimBackend()
    wrapped = offload(model, optimizer or adamw(model, **options), policy=policy, backend=backend)
    try:
        yield wrapped, backend
        wrapped.close()  # only here: after an error the first cause is what counts
    finally:
        with contextlib.suppress(Exception):
            wrapped.close()
        backend.close()


Run = tuple[nn.Module, SerialAdamW, list[float]]


def run_reference(
    model: nn.Module,
    policy: OffloadPolicy,
    steps: int = 20,
    *,
    loss: Loss = tower_loss,
    between: Callable[[nn.Module, Any, int], None] | None = None,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw,
) -> Run:
    """Train a copy of `model` plainly; returns it with its optimizer and losses."""
    plain = copy.deepcopy(model)
    reference = SerialAdamW(
        optimizer(plain),
        max_grad_norm=policy.max_grad_norm,
        accumulation_steps=policy.accumulation_steps,
        compute_dtype=None if policy.compute_dtype is None else getattr(torch, policy.compute_dtype),
    )
    losses = train(plain, reference, steps, accumulation=policy.accumulation_steps, loss=loss, between=between)
    return plain, reference, losses


def compare(
    model: nn.Module,
    policy: OffloadPolicy,
    steps: int = 20,
    *,
    loss: Loss = tower_loss,
    between: Callable[[nn.Module, Any, int], None] | None = None,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw,
    run: Run | None = None,
) -> None:
    """Train `model` offloaded and a copy of it plainly; everything must be bitwise equal.

    `run` is what `run_reference` gave for the same model, loss and policy arithmetic.
    """
    # One after the other: side by side they would hide races by keeping each other slow.
    plain, reference, expected = run or run_reference(
        model, policy, steps, loss=loss, between=between, optimizer=optimizer
    )
    with offloaded(model, policy, optimizer=optimizer(model)) as (wrapped, _):
        got = train(model, wrapped, steps, accumulation=policy.accumulation_steps, loss=loss, between=between)
        assert_equal_training(model, wrapped, plain, reference)
    assert got == expected, (
        f"losses differ first at {next(i for i, (a, b) in enumerate(zip(got, expected, strict=True)) if a != b)}"
    )
    for (name, ours), (_, theirs) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert_same_bits(f"{name} after close()", ours, theirs)
