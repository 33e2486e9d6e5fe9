"""The simulated node: runs everything, with real bytes, on any machine."""

from .backend import SimBackend
from .clock import KernelModel

__all__ = ["KernelModel", "SimBackend"]
