"""Budgets, real out-of-memory errors, and a step that allocates nothing."""

from __future__ import annotations

import copy
import gc
import threading
from typing import Any

import pytest
import torch
from torch import nn

from memferry_npu.api import OffloadPolicy, offload, place_plain
from memferry_npu.backend.base import OutOfMemoryError
from memferry_npu.backend.sim import SimBackend
from memferry_npu.schedule.plan import GradientPath, Placement

from .models import Tower, adamw, offloaded, tower_loss, train

KIB = 1024


def wide() -> Tower:
    torch.manual_seed(0)
    return Tower(width=64, blocks=6)


def test_plain_training_does_not_fit_where_offloaded_training_does() -> None:
    model = wide()
    weights = sum(p.numel() * 4 for p in model.parameters())
    cap = int(weights * 1.5)
    plain = copy.deepcopy(model)
    with pytest.raises(OutOfMemoryError) as caught, place_plain(plain, SimBackend(device_memory_bytes=cap)):
        train(plain, adamw(plain), 1)
    assert isinstance(caught.value, torch.OutOfMemoryError)
    for part in ("device 0", "asked for", "are free", "device_memory"):
        assert part in str(caught.value)
    assert caught.value.cap_bytes == cap and caught.value.asked_bytes > caught.value.free_bytes
    del plain
    with offloaded(model, OffloadPolicy(), backend=SimBackend(device_memory_bytes=cap)) as (optimizer, backend):
        train(model, optimizer, 3)
        assert backend.counters().device_peak_bytes <= cap


def test_an_out_of_memory_error_in_forward_names_the_unit() -> None:
    model = wide()
    backend = SimBackend(device_memory_bytes=512 * KIB)
    with offloaded(model, OffloadPolicy(), backend=backend) as (optimizer, _):
        with pytest.raises(OutOfMemoryError, match=r"device 0: (embed|blocks\.\d|norm|head) asked for"):
            model(torch.zeros(64, 64, dtype=torch.int64))
        gc.collect()
        train(model, optimizer, 1)  # a smaller batch goes on as if nothing had happened


@pytest.mark.parametrize(
    ("policy", "tier"),
    [
        (OffloadPolicy(device_memory_bytes=64 * KIB, placement={"default": Placement.RESIDENT}), "the device budget"),
        (OffloadPolicy(host_memory_bytes=64 * KIB), "the host budget"),
    ],
)
def test_a_plan_over_budget_is_refused_before_anything_changes(policy: OffloadPolicy, tier: str) -> None:
    model = wide()
    before = [(p, p.data_ptr()) for p in model.parameters()]
    with pytest.raises(OutOfMemoryError, match=tier):
        offload(model, adamw(model), policy=policy, backend=SimBackend())
    assert [(p, p.data_ptr()) for p in model.parameters()] == before
    train(model, adamw(model), 1)


def test_the_policy_limits_activations_too() -> None:
    model = wide()
    backend = SimBackend()
    with offloaded(model, OffloadPolicy(device_memory_bytes=512 * KIB), backend=backend) as (optimizer, _):
        with pytest.raises(OutOfMemoryError, match="of 512.00 KiB are free"):
            model(torch.zeros(64, 64, dtype=torch.int64))
        gc.collect()
        train(model, optimizer, 1)
    assert backend.counters().device_cap_bytes > 512 * KIB


@pytest.mark.parametrize("caps", [{"device_memory_bytes": 32 * KIB}, {"host_memory_bytes": 512 * KIB}])
def test_a_tier_that_is_too_small_leaves_the_model_as_it_was(caps: dict[str, int]) -> None:
    model = wide()
    backend = SimBackend(**caps)
    before = [(p, p.data_ptr()) for p in model.parameters()]
    threads = threading.active_count()
    with pytest.raises(OutOfMemoryError):
        offload(model, adamw(model), backend=backend)
    assert [(p, p.data_ptr()) for p in model.parameters()] == before
    assert backend.counters().device_used_bytes == 0 and backend.counters().host_used_bytes == 0
    assert threading.active_count() == threads
    train(model, adamw(model), 1)


def test_host_bytes_per_parameter() -> None:
    """14 with a split master, 16 with a separate one (docs/architecture.md), plus statistics and alignment."""
    for split, expected in ((True, 14), (False, 16)):
        model = Tower(width=256, blocks=2).to(torch.bfloat16)
        count = sum(p.numel() for p in model.parameters())
        with offloaded(model, OffloadPolicy(split_master=split)) as (_, backend):
            assert expected <= backend.counters().host_used_bytes / count < expected + 0.2


@pytest.mark.parametrize("path", list(GradientPath))
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_allocates_nothing_after_warm_up(path: GradientPath, accumulation: int, dtype: torch.dtype) -> None:
    """Buffers, streams, threads and static device bytes are the same from step 2 to step 22.

    What autograd allocates is freed again by the end of each step, but for kept gradients.
    """
    model = Tower().to(dtype)
    policy = OffloadPolicy(
        placement={"embed": Placement.DHA, "head": Placement.RESIDENT},
        gradient={"default": path},
        accumulation_steps=accumulation,
        max_grad_norm=0.1,
    )
    seen = []
    with offloaded(model, policy) as (optimizer, backend):
        train(model, optimizer, 2, accumulation=accumulation)
        for step in range(20):
            train(model, optimizer, 1, accumulation=accumulation, first=2 + step)
            optimizer.synchronize()
            gc.collect()
            counters = backend.counters()
            seen.append(
                (
                    counters.buffers_created,
                    counters.streams_created,
                    counters.device_static_bytes,
                    counters.device_used_bytes,
                    counters.device_peak_bytes,
                    counters.host_used_bytes,
                    threading.active_count(),
                    tuple(p.data_ptr() for p in model.parameters()),
                )
            )
    assert len(set(seen)) == 1, seen


def test_link_bytes_of_a_step() -> None:
    """Streaming: each weight crosses twice (forward and backward) but for what still lies in the slots."""
    model = Tower().to(torch.bfloat16)
    with offloaded(model, OffloadPolicy(slots=2)) as (optimizer, backend):
        train(model, optimizer, 2)
        before = backend.counters()
        train(model, optimizer, 1, first=2)
        optimizer.synchronize()
        after = backend.counters()
        working = [u.working.nbytes for u in optimizer._store.units]
        assert after.h2d_bytes - before.h2d_bytes == 2 * sum(working) - sum(working[-2:])
        grads = sum(p.numel() * 2 for p in model.parameters())
        assert after.d2h_bytes - before.d2h_bytes == grads


def test_create_and_close_many_times_leaves_nothing() -> None:
    backend = SimBackend()
    threads = threading.active_count()
    for _ in range(50):
        model = Tower(width=8, blocks=2)
        optimizer = offload(model, adamw(model), backend=backend)
        train(model, optimizer, 1)
        optimizer.close()
    del model, optimizer
    gc.collect()
    assert backend.counters().host_used_bytes == 0 and backend.counters().device_static_bytes == 0
    assert threading.active_count() == threads
    backend.close()


def test_module_buffers_count_as_device_memory() -> None:
    class WithBuffer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("table", torch.zeros(1000))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) + self.table[0]

    model = WithBuffer()
    with offloaded(model, OffloadPolicy()) as (_, backend):
        assert backend.counters().device_used_bytes >= 4000


def test_more_slots_prefetch_further_and_cost_what_they_say() -> None:
    used = []
    for slots in (2, 3, 4):
        model = Tower()
        with offloaded(model, OffloadPolicy(slots=slots)) as (optimizer, backend):
            train(model, optimizer, 2)
            used.append(backend.counters().device_static_bytes)
            assert used[-1] == sum(optimizer._store.sizes.slots)
    assert used == sorted(used) and used[0] < used[-1]


def test_the_figures_of_a_step() -> None:
    model = Tower()
    with offloaded(model, OffloadPolicy()) as (optimizer, _):
        with pytest.raises(RuntimeError, match="no step has been taken"):
            optimizer.stats()
        train(model, optimizer, 3)
        stats: Any = optimizer.stats()
        assert stats.window.simulated and stats.sim_seconds > 0
        assert 0 < stats.h2d_gbps < 25.1 and 0 < stats.d2h_gbps < 25.1
        assert 0 <= stats.stall_fraction < 1
        assert 0 < stats.device_used_bytes <= stats.device_peak_bytes <= stats.device_cap_bytes
        assert tower_loss(model, 9, 0).item() > 0
