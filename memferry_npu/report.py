"""Text for people: sizes, counts, step lines.

Owns: how figures look. Pure functions over plain values; must not import torch.
"1 GiB" is 2**30 bytes and "1 GB" 10**9 bytes: memory is shown in GiB, link rates in GB/s.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

STEP_LINE_KEY = (
    "# device: most bytes in use so far / capacity; sim: figures of the simulated node from the update before to this "
    "one; s and tok/s are this machine's"
)


class StepFigures(Protocol):
    """What a step line shows of a step's statistics."""

    @property
    def device_peak_bytes(self) -> int: ...
    @property
    def device_cap_bytes(self) -> int: ...
    @property
    def pinned_host_bytes(self) -> int: ...
    @property
    def h2d_gbps(self) -> float: ...
    @property
    def d2h_gbps(self) -> float: ...
    @property
    def stall_fraction(self) -> float: ...


def gib(num_bytes: int) -> str:
    """Bytes as GiB with three significant digits, at most three decimals: 0.021, 1.84, 139.8."""
    value = num_bytes / 2**30
    decimals = 3 if value < 1 else 2 if value < 100 else 1
    return f"{value:.{decimals}f}"


def count(value: float) -> str:
    """A number with one decimal and k, M or B above a thousand: 870, 8.9k, 10.9M."""
    for scale, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= scale * 0.99995:  # what rounds to 1000.0k is 1.0M
            return f"{value / scale:.1f}{letter}"
    return f"{value:.0f}"


def step_line(*, step: int, loss: float, seconds: float, tokens: int, stats: StepFigures | None) -> str:
    """One line for one optimizer step; `seconds` is wall time, `tokens` all its micro-batches."""
    rate = count(tokens / seconds) if seconds > 0 else "-"
    head = f"step {step}  loss {loss:.4f}  {seconds:.2f} s  {rate} tok/s"
    if stats is None:
        return head
    return (
        f"{head}  device {gib(stats.device_peak_bytes)}/{gib(stats.device_cap_bytes)} GiB"
        f"  host {gib(stats.pinned_host_bytes)} GiB pinned"
        f"  sim: H2D {stats.h2d_gbps:.1f} GB/s D2H {stats.d2h_gbps:.1f} GB/s stall {stats.stall_fraction:.1%}"
    )


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns aligned with spaces: the first to the left, the others to the right."""
    lines = [list(header), *[list(row) for row in rows]]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    return "\n".join(
        "  ".join(
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )
