"""The node as a value: devices, host memory, switches, resources and links, with a source for every rate.

Owns the frozen dataclasses of schema `memferry.node/1`, their validation, hash and text forms, and the methods that
turn a node into constraints and routes (the search itself is in `routes`). Must not import torch or memferry_npu.

Units: bandwidth GB/s (1e9 bytes/s), memory bytes, latency microseconds. In `{ab, ba, both}` bytes go from a to b, from
b to a, and both is the sum of the two while both run. For DRAM ab is read, ba write, both any mix.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import TYPE_CHECKING, Any

from .codec import Table, TopologyError, Where, canonical_json, check_text, did_you_mean, dump_yaml, from_tree, to_tree

if TYPE_CHECKING:
    from .routes import MaxFlow, Path, Route, Router

SCHEMA = "memferry.node/1"


class DeviceKind(str, Enum):
    NPU = "npu"
    CUDA = "cuda"
    SIM = "sim"


class LinkKind(str, Enum):
    """One enum for both vendors; SOCKET joins the processors of a host (UPI, xGMI, Kunpeng HCCS)."""

    PCIE = "PCIE"
    HCCS = "HCCS"
    HCCS_SW = "HCCS_SW"
    SIO = "SIO"
    UB = "UB"
    NVLINK = "NVLINK"
    NVLINK_C2C = "NVLINK_C2C"
    SOCKET = "SOCKET"


class Distance(str, Enum):
    """How far two ends are apart over PCIe: one switch, several, a host bridge, one NUMA node, across sockets."""

    PIX = "PIX"
    PXB = "PXB"
    PHB = "PHB"
    NODE = "NODE"
    SYS = "SYS"


class SwitchKind(str, Enum):
    PCIE_SWITCH = "pcie_switch"
    PCIE_ROOT = "pcie_root"
    FABRIC = "fabric"


class Source(str, Enum):
    """Where a number comes from."""

    MEASURED = "measured"
    VENDOR = "vendor"
    ESTIMATE = "estimate"
    SIMULATED = "simulated"


class Method(str, Enum):
    """How bytes move: a copy engine from pinned memory, a kernel's loads and stores, a copy from pageable memory."""

    COPY = "copy"
    KERNEL = "kernel"
    PAGEABLE = "pageable"


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    """A positive number and where it comes from."""

    value: float
    source: Source
    note: str | None = None

    def __post_init__(self) -> None:
        if not 0.0 < self.value < math.inf:
            raise TopologyError(f"{self.value!r} must be positive", where=("value",))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """GB/s per direction; `both` limits the sum of the two directions (None = no limit beyond ab and ba)."""

    ab: Quantity | None = None
    ba: Quantity | None = None
    both: Quantity | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One accelerator (one die where a package has two)."""

    id: int
    """Index that the framework uses; the vertex of the graph is `dev{id}`."""
    name: str
    kind: DeviceKind
    memory_bytes: int
    source: Source
    """Source of the plain facts (memory size, identity)."""
    numa_node: int | None = None
    pci_id: str | None = None
    physical_id: int | None = None
    """Id in the vendor's tool where it differs (containers)."""
    architecture: str | None = None
    """SoC name or compute capability, for example Ascend910B1 or sm_90."""

    def __post_init__(self) -> None:
        _at_least(0, id=self.id)
        _at_least(1, memory_bytes=self.memory_bytes)

    @property
    def vertex(self) -> str:
        return f"dev{self.id}"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemory:
    """Memory of one NUMA node with its cores."""

    id: str
    cores: int
    memory_bytes: int
    dram: str
    """Resource of this memory: ab read, ba write, both any mix."""
    source: Source
    numa_node: int | None = None
    cpus: str | None = None
    """CPU list, for example 0-23,96-119."""
    thread: Rates | None = None
    """What one thread reads, writes and mixes."""
    peer_transit: bool = False
    """Whether devices reach each other through this processor without touching its memory (PCIe peer to peer)."""

    def __post_init__(self) -> None:
        _at_least(1, cores=self.cores, memory_bytes=self.memory_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Switch:
    """A vertex without memory: PCIe switch, root complex, or a fabric such as NVSwitch or the HCCS/UB switch plane."""

    id: str
    kind: SwitchKind
    name: str | None = None
    peer_transit: bool = True
    """Whether devices reach each other through it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resource:
    """Something that transfers share: a lane set, a root complex, a port, a DRAM domain."""

    id: str
    ab: Quantity
    ba: Quantity
    both: Quantity | None = None
    name: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """An edge between two vertices. Bytes from a to b load ab of each resource."""

    id: str
    a: str
    b: str
    kind: LinkKind
    resources: tuple[str, ...] = ()
    copy: Rates | None = None
    """What one copy engine reaches. At a device a method that is not given is not possible; elsewhere not limited."""
    kernel: Rates | None = None
    """What one kernel reaches; `both` while it reads and writes."""
    pageable: Rates | None = None
    latency_us: Quantity | None = None
    """Fixed cost of one transfer over this link."""
    distance: Distance | None = None
    detail: str | None = None
    """For people, for example gen5 x16 or 18 links."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One measured cell: what, where, how much; `value` None with a `reason` where it cannot be."""

    test: str
    at: Table = ()
    """Coordinates, for example src, dst, method, load_bytes."""
    value: float | None = None
    unit: str = "GB/s"
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeResult:
    """How a measured node was measured. Not part of the hash."""

    environment: Table = ()
    records: tuple[Record, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Node:
    """A scale-up node. Frozen; without slots, because derived graphs are cached in the instance."""

    name: str
    description: str | None = None
    simulated: bool = False
    """True where the rates come from a simulation."""
    devices: tuple[Device, ...] = ()
    hosts: tuple[HostMemory, ...]
    switches: tuple[Switch, ...] = ()
    resources: tuple[Resource, ...] = ()
    links: tuple[Link, ...] = ()
    notes: tuple[str, ...] = ()
    """What discovery or the probe could not find out."""
    probe: ProbeResult | None = None

    def __post_init__(self) -> None:
        check_text(self)
        if not self.hosts:
            raise TopologyError("a node needs at least one host memory", where=("hosts",))
        vertices: set[str] = set()
        groups: dict[str, tuple[Device, ...] | tuple[HostMemory | Switch, ...]]
        groups = {"devices": self.devices, "hosts": self.hosts, "switches": self.switches}
        for group, items in groups.items():
            for i, item in enumerate(items):
                vertex = item.vertex if isinstance(item, Device) else item.id
                if not isinstance(item, Device) and re.fullmatch(r"dev\d+", vertex):
                    raise TopologyError(f"{vertex!r} is a device's name", where=(group, i, "id"))
                if vertex in vertices:
                    raise TopologyError(f"{vertex!r} appears twice", where=(group, i, "id"))
                vertices.add(vertex)
        resources = _unique_ids("resources", (resource.id for resource in self.resources))
        _unique_ids("links", (link.id for link in self.links))
        for i, host in enumerate(self.hosts):
            _known(host.dram, resources, ("hosts", i, "dram"))
        for i, link in enumerate(self.links):
            _known(link.a, vertices, ("links", i, "a"))
            _known(link.b, vertices, ("links", i, "b"))
            if link.a == link.b:
                raise TopologyError(f"both ends are {link.a!r}", where=("links", i, "b"))
            for j, resource in enumerate(link.resources):
                _known(resource, resources, ("links", i, "resources", j))
            if not link.resources and link.copy is None:
                raise TopologyError(f"link {link.id!r} needs resources or copy rates", where=("links", i))

    # --- text -----------------------------------------------------------------------------------------------------

    def to_tree(self) -> dict[str, Any]:
        """Plain tree, `schema` first; the same for YAML and JSON."""
        return {"schema": SCHEMA, **to_tree(self)}

    def to_json(self) -> str:
        return json.dumps(self.to_tree(), indent=1, allow_nan=False) + "\n"

    def to_yaml(self) -> str:
        return dump_yaml(self.to_tree())

    @classmethod
    def from_tree(cls, tree: Any) -> Node:
        """The node of a tree; TopologyError names unknown keys, versions and values with their place."""
        if not isinstance(tree, dict):
            raise TopologyError("a node is a mapping with the first key `schema: memferry.node/1`")
        schema = tree.get("schema")
        if schema is None:
            raise TopologyError(f"key 'schema' is missing; the first key is `schema: {SCHEMA}`")
        match = re.fullmatch(r"memferry\.node/(\d{1,9})(\.\d{1,9})?", schema) if isinstance(schema, str) else None
        if match is None:
            raise TopologyError(f"schema {schema!r} is not a node; expected {SCHEMA!r}", where=("schema",))
        if match[1] != "1":
            raise TopologyError(f"schema version {schema!r} is not known; this reads {SCHEMA!r}", where=("schema",))
        return from_tree(cls, {key: value for key, value in tree.items() if key != "schema"})

    @cached_property
    def hash(self) -> str:
        """Hex SHA-256 over canonical JSON of everything but `probe` (which holds times and host names)."""
        tree = self.to_tree()
        tree.pop("probe", None)
        return hashlib.sha256(canonical_json(tree).encode()).hexdigest()

    # --- look-up --------------------------------------------------------------------------------------------------

    def device(self, device: int | Device) -> Device:
        """The device with this id. TopologyError if there is none."""
        wanted = device.id if isinstance(device, Device) else device
        for item in self.devices:
            if item.id == wanted:
                return item
        ids = ", ".join(str(item.id) for item in self.devices)
        raise TopologyError(f"node {self.name!r} has no device {wanted!r}; it has {ids or 'none'}")

    def host(self, host: str | HostMemory) -> HostMemory:
        """The host memory with this id. TopologyError if there is none."""
        wanted = host.id if isinstance(host, HostMemory) else host
        for item in self.hosts:
            if item.id == wanted:
                return item
        known = did_you_mean(wanted, [item.id for item in self.hosts])
        raise TopologyError(f"node {self.name!r} has no host {wanted!r}{known}")

    def home(self, device: int | Device) -> HostMemory:
        """The host memory nearest to a device: its NUMA node, else the one with the fastest path."""
        return self.router.home(self.device(device))

    # --- flow -----------------------------------------------------------------------------------------------------

    @cached_property
    def router(self) -> Router:
        """The search over this node's graph, with its caches."""
        from .routes import Router

        return Router(self)

    def capacities(self) -> dict[str, float]:
        """GB/s by constraint (`{resource}:ab`, `:ba`, and `:both` where given), for `flow`."""
        return dict(self.router.capacities)

    def paths(self, src: str | int, dst: str | int, *, method: Method = Method.COPY) -> tuple[Path, ...]:
        """All ways from a host to a device or back, direct first, then through each peer; see `Path`.

        Ends are a host id or a device id (`paths("host0", 3)`, `paths(3, "host0")`); empty where nothing leads.
        Device to device gives the one best path without a relay.
        """
        return self.router.paths(src, dst, method)

    def max_flow(self, host: str, device: int, *, to_host: bool = False) -> MaxFlow:
        """The most that all paths together can carry from a host to a device (or back), and each path's part."""
        return self.router.max_flow(host, device, to_host)

    def transfer(
        self, kind: str, device: int, *, peer: int | None = None, host: str | None = None, method: Method = Method.COPY
    ) -> Route:
        """Constraints, cap and latency of one transfer, ready to become a `flow.Task`.

        kind "h2d" or "d2h" between `host` (None = the device's home) and `device`; "p2p" from `device` to `peer`.
        Method COPY is a copy engine, KERNEL a kernel's own loads or stores, PAGEABLE a copy from pageable memory.
        TopologyError where the node has no such path.
        """
        return self.router.transfer(kind, device, peer, host, method)

    def kernel_mix(self, device: int, read_bytes: float, write_bytes: float, *, host: str | None = None) -> Route:
        """One kernel on `device` that reads and writes mapped host memory at once (AdamW on mapped state).

        The task moves read_bytes + write_bytes.
        """
        return self.router.kernel_mix(device, read_bytes, write_bytes, host)

    def host_work(self, host: str, read_bytes: float, write_bytes: float, threads: int) -> Route:
        """Host threads that read and write memory of `host` (an optimizer); the task moves read + write bytes."""
        return self.router.host_work(host, read_bytes, write_bytes, threads)

    def distance(self, a: int, b: int) -> Distance | None:
        """How far two devices are apart over PCIe; None where PCIe does not join them."""
        return self.router.distance(a, b)


def _at_least(least: int, **values: int) -> None:
    for name, value in values.items():
        if value < least:
            raise TopologyError(f"{value} is too small; at least {least}", where=(name,))


def _unique_ids(group: str, ids: Iterable[str]) -> set[str]:
    seen: set[str] = set()
    for i, item in enumerate(ids):
        if item in seen:
            raise TopologyError(f"{item!r} appears twice", where=(group, i, "id"))
        seen.add(item)
    return seen


def _known(name: str, known: set[str], where: Where) -> None:
    if name not in known:
        raise TopologyError(f"{name!r} is not defined{did_you_mean(name, known)}", where=where)
