"""The scale-up node as a value: model, presets, discovery, probe, and the fluid model of shared links (`flow`).

Imports only the standard library, numpy and yaml; torch only inside functions of `probe`. Never memferry_npu.
"""

from __future__ import annotations

from .codec import TopologyError
from .load import list_presets, load_node, parse_node, replace_memory, save_node
from .model import (
    SCHEMA,
    Device,
    DeviceKind,
    Distance,
    HostMemory,
    Link,
    LinkKind,
    Method,
    Node,
    ProbeResult,
    Quantity,
    Rates,
    Record,
    Resource,
    Source,
    Switch,
    SwitchKind,
)
from .routes import Hop, MaxFlow, Path, Route

__all__ = [
    "SCHEMA",
    "Device",
    "DeviceKind",
    "Distance",
    "Hop",
    "HostMemory",
    "Link",
    "LinkKind",
    "MaxFlow",
    "Method",
    "Node",
    "Path",
    "ProbeResult",
    "Quantity",
    "Rates",
    "Record",
    "Resource",
    "Route",
    "Source",
    "Switch",
    "SwitchKind",
    "TopologyError",
    "list_presets",
    "load_node",
    "parse_node",
    "replace_memory",
    "save_node",
]
