"""Which links and memories each kind of work on the simulated node uses.

Owns: reading a `topology.Node` into `Lane`s. Must not import torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import topology
from topology.model import Method

from .clock import Lane


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLanes:
    """Lanes of one device, and what its tiers hold."""

    by_name: dict[str, Lane]
    """"h2d", "d2h": copy engines; "dha_read", "dha_write": kernels on mapped memory."""
    host: Callable[[int, int, int | None], Lane]
    """(bytes read, bytes written, threads; None: all cores) -> lane of work on host memory."""
    device_memory_bytes: int
    host_memory_bytes: int


def node_lanes(node: topology.Node, device: int) -> NodeLanes:
    """Raises ValueError when the node has no such device."""
    ids = [d.id for d in node.devices]
    if device not in ids:
        raise ValueError(f"node '{node.name}' has devices {ids}, not {device}")
    home = node.home(device)
    routes = {
        "h2d": node.transfer("h2d", device),
        "d2h": node.transfer("d2h", device),
        "dha_read": node.transfer("h2d", device, method=Method.KERNEL),
        "dha_write": node.transfer("d2h", device, method=Method.KERNEL),
    }

    def host(read_bytes: int, written_bytes: int, threads: int | None) -> Lane:
        return _lane(node.host_work(home.id, read_bytes, written_bytes, min(threads or home.cores, home.cores)))

    return NodeLanes(
        by_name={name: _lane(route) for name, route in routes.items()},
        host=host,
        device_memory_bytes=node.device(device).memory_bytes,
        host_memory_bytes=home.memory_bytes,
    )


def _lane(route: topology.Route) -> Lane:
    return Lane(uses=route.uses, rate_cap_gbps=route.rate_cap_gbps, latency_s=route.latency_s)
