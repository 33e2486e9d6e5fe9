"""What the user asks of an offloaded run, as one frozen value.

Owns: `OffloadPolicy`. Must not import torch: the
YAML loader and the planner read this module on machines without a device.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..schedule.plan import GradientPath, Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadPolicy:
    """How `memferry_npu.offload` places a model. The defaults are a working run.

    Rules (`placement`, `gradient`) are mappings from an `fnmatch` pattern over
    unit names ("blocks.*", "wte") to a value; the first pattern that matches
    wins and "default" applies where none does.
    """

    placement: dict[str, Placement] = field(default_factory=dict)
    """Rules over unit names; without a match a unit is STREAM."""
    gradient: dict[str, GradientPath] = field(default_factory=dict)
    """Rules over unit names; without a match a unit's gradients go by COPY."""
    units: tuple[str, ...] = ()
    """Module names that are units. Empty: found from the model's structure."""
    slots: int = field(default=2, metadata={"min": 2, "max": 64})
    """Device slots that streamed units share in turn; slots - 1 is the prefetch distance."""
    device_memory_bytes: int | None = field(
        default=None, metadata={"min": 1, "unit": "bytes", "yaml": "device_memory"}
    )
    """Most device memory the run may use. None: all of the device."""
    host_memory_bytes: int | None = field(
        default=None, metadata={"min": 1, "unit": "bytes", "yaml": "host_memory"}
    )
    """Most pinned host memory the run may use. None: no limit of ours."""
    max_grad_norm: float | None = field(default=None, metadata={"min": 0.0, "exclusive_min": True})
    """Clip the global gradient norm to this inside the update. None: no clipping."""
    accumulation_steps: int = field(default=1, metadata={"min": 1})
    """Backward passes per step. Above 1, fp32 accumulation buffers are reserved at start."""
    split_master: bool = False
    """Keep the fp32 master as working weight (bf16) + int16 low half: 2 bytes less per parameter."""
    compute_dtype: str | None = field(default=None, metadata={"choices": ("bfloat16", "float32")})
    """Convert floating-point parameters to this dtype; the master keeps the fp32 values."""
    step_returns: str = field(default="enqueued", metadata={"choices": ("enqueued", "complete")})
    """"enqueued": step() returns at once and the update hides behind the next forward."""
    host_threads: int | None = field(default=None, metadata={"min": 1, "max": 1024})
    """Threads of the host optimizer. None: one per available core."""
