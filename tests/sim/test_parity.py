"""Offloaded training against the serial reference, bitwise, under the happens-before checker."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memferry_npu.api import OffloadPolicy
from memferry_npu.schedule.plan import GradientPath, Placement

from .models import Run, Tower, assert_same_bits, compare, run_reference

CLIPS = {"off": None, "on": 1e6, "firing": 0.05}
MATRIX = list(itertools.product(Placement, GradientPath, (1, 4), CLIPS, ("fp32", "bf16"), (False, True)))


def model(dtype: str, **options: object) -> Tower:
    torch.manual_seed(7)
    tower = Tower(**options)  # type: ignore[arg-type]
    return tower.to(torch.bfloat16) if dtype == "bf16" else tower


@functools.cache
def reference(accumulation: int, clip: str, dtype: str) -> Run:
    """Placement, gradient path and split master do not exist for the reference."""
    policy = OffloadPolicy(accumulation_steps=accumulation, max_grad_norm=CLIPS[clip])
    return run_reference(model(dtype, blocks=3), policy, steps=20)


@pytest.mark.parametrize(
    ("placement", "gradient", "accumulation", "clip", "dtype", "split"),
    MATRIX,
    ids=lambda v: getattr(v, "value", None) or str(v),
)
def test_every_combination(
    placement: Placement, gradient: GradientPath, accumulation: int, clip: str, dtype: str, split: bool
) -> None:
    policy = OffloadPolicy(
        placement={"default": placement},
        gradient={"default": gradient},
        accumulation_steps=accumulation,
        max_grad_norm=CLIPS[clip],
        split_master=split,
    )
    compare(model(dtype, blocks=3), policy, steps=20, run=reference(accumulation, clip, dtype))


_UNITS = ["embed", "blocks.0", "blocks.1", "blocks.2", "blocks.3", "norm", "head"]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    placements=st.lists(st.sampled_from(Placement), min_size=7, max_size=7),
    gradients=st.lists(st.sampled_from(GradientPath), min_size=7, max_size=7),
    accumulation=st.sampled_from((1, 2)),
    clip=st.sampled_from(list(CLIPS)),
    dtype=st.sampled_from(("fp32", "bf16")),
    split=st.booleans(),
    slots=st.integers(2, 4),
    tied=st.booleans(),
)
def test_random_mixtures(
    placements: list[Placement],
    gradients: list[GradientPath],
    accumulation: int,
    clip: str,
    dtype: str,
    split: bool,
    slots: int,
    tied: bool,
) -> None:
    policy = OffloadPolicy(
        placement=dict(zip(_UNITS, placements, strict=True)),
        gradient=dict(zip(_UNITS, gradients, strict=True)),
        accumulation_steps=accumulation,
        max_grad_norm=CLIPS[clip],
        split_master=split,
        slots=slots,
    )
    compare(model(dtype, tied=tied), policy, steps=4)


def test_compute_dtype_keeps_fp32_masters() -> None:
    compare(model("fp32"), OffloadPolicy(compute_dtype="bfloat16", split_master=True), steps=10)


def test_the_comparison_can_fail() -> None:
    """A reference that differs in one bit of one weight is noticed."""
    first, second = model("fp32"), model("fp32")
    with torch.no_grad():
        second.blocks[1].up.weight[3, 5] = torch.nextafter(second.blocks[1].up.weight[3, 5], torch.tensor(9.0))
    with pytest.raises(AssertionError, match=r"1 of 512 differ"):
        assert_same_bits("w", first.blocks[1].up.weight, second.blocks[1].up.weight)
