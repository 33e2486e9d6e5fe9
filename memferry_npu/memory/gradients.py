"""Where a parameter's gradient of the current step lies, on its way to the optimizer.

Owns: `GradSlot` (landing place, fp32 accumulator, statistics) and what they hold.
Must not import runtime or optim.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch

from ..backend.base import HostFlag, Span


class Where(enum.Enum):
    """Which storage holds the gradient of this step."""

    NOWHERE = "nowhere"
    LANDING = "landing"
    """Host memory, in the parameter's dtype: one arrival."""
    ACCUM = "accum"
    """Host memory, fp32: the sum of the arrivals."""
    KEPT = "kept"
    """A device tensor that autograd made: one arrival."""
    KEPT_ACCUM = "kept_accum"
    """Device memory, fp32: the sum of the arrivals."""


@dataclass(slots=True, kw_only=True, eq=False)
class GradSlot:
    """Storages for one parameter's gradient. Views are 1-D in the parameter's memory order
    but `*_shaped`, which have its shape and strides."""

    landing: torch.Tensor
    landing_span: Span
    landing_mapped: torch.Tensor
    landing_shaped: torch.Tensor
    chunk_sums: torch.Tensor
    """fp32 [chunks] on the CPU."""
    chunk_sums_mapped: torch.Tensor
    nonfinite: torch.Tensor
    """int32 [1] on the CPU: 1 where the gradient has a NaN or an infinity."""
    nonfinite_mapped: torch.Tensor
    stats_spans: tuple[Span, Span]
    accum: torch.Tensor | None = None
    accum_span: Span | None = None
    accum_mapped: torch.Tensor | None = None
    accum_shaped: torch.Tensor | None = None
    keep_accum: torch.Tensor | None = None
    keep_accum_shaped: torch.Tensor | None = None
    keep_accum_span: Span | None = None
    # State of the current step -----------------------------------------------------
    where: Where = Where.NOWHERE
    kept: torch.Tensor | None = None
    exposed: torch.Tensor | None = None
    """The tensor that was put into `p.grad`; None while arrivals are in flight."""
    exposed_version: int = 0
    stats_valid: bool = False
    free: HostFlag | None = None
    """Cleared while the host worker adds the landing place into the accumulator."""

    def forget(self) -> None:
        """No gradient in this step (so far)."""
        self.where, self.kept, self.exposed, self.stats_valid = Where.NOWHERE, None, None, False

    @property
    def host_span(self) -> Span:
        """Where the optimizer reads it once `settle`d: LANDING or ACCUM."""
        if self.where is Where.ACCUM:
            assert self.accum_span is not None
            return self.accum_span
        assert self.where is Where.LANDING
        return self.landing_span

    @property
    def host_values(self) -> torch.Tensor:
        if self.where is Where.ACCUM:
            assert self.accum is not None
            return self.accum
        return self.landing
