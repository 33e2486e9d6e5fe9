"""MemFerry-NPU: train what does not fit the accelerator, with exactly the same result.

Owns: the public names. They load on first use, so `import memferry_npu` is cheap
and has no side effects: no torch, no threads, no compiler.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memferry_npu.api import offload
    from memferry_npu.runtime.policy import GradientPath, OffloadPolicy, Placement

__version__ = "0.1.0"
__all__ = ["GradientPath", "OffloadPolicy", "Placement", "__version__", "offload"]

_LAZY = {
    "offload": "memferry_npu.api",
    "GradientPath": "memferry_npu.runtime.policy",
    "OffloadPolicy": "memferry_npu.runtime.policy",
    "Placement": "memferry_npu.runtime.policy",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
