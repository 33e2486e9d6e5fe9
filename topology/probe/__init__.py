"""The probe: measure a node (`memferry probe`) and say what changed.

`suite` is what is measured, `sim` and `cuda` measure, `fit` turns it into a Node, `report` into text. Only `cuda`
imports torch, inside its functions.
"""

from __future__ import annotations

from .cli import main, measure
from .diff import Change, diff
from .report import render
from .sim import SimMeter

__all__ = ["Change", "SimMeter", "diff", "main", "measure", "render"]
