"""A Node from the facts that the tools gave; pure.

Owns the rates assumed until the probe has measured them, and the shape: which links lead into a switch, which devices
share a PCIe switch. Must import nothing but the standard library and this package's `model`, `codec` and `texts`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from . import texts
from .model import (
    Device,
    DeviceKind,
    Distance,
    HostMemory,
    Link,
    LinkKind,
    Node,
    Quantity,
    Rates,
    Resource,
    Source,
    Switch,
    SwitchKind,
)
from .texts import Cell, DeviceFacts, Facts, Topo

_PCIE_GBPS = {1: 3.0, 2: 6.0, 3: 12.5, 4: 25.0, 5: 55.0, 6: 105.0}
"""What pinned copies reach over 16 lanes, by generation."""
_FABRIC = {
    LinkKind.HCCS: (28.0, 24.0),
    LinkKind.HCCS_SW: (196.0, 165.0),
    LinkKind.SIO: (270.0, 180.0),
    LinkKind.UB: (196.0, 165.0),
}
"""GB/s each way: (of the link, of one copy). NVLink comes by the lane: 25 GB/s, a copy reaches 87 %."""
_NPU_MEMORY_GIB = {"Ascend910B4": 32}
_MAX_NVLINKS = 18
"""Links of one GPU (Hopper); more in its row means that the links lead into a switch."""


def _estimate(value: float, note: str | None = None) -> Quantity:
    return Quantity(value=value, source=Source.ESTIMATE, note=note)


def _both_ways(gbps: float) -> Rates:
    return Rates(ab=_estimate(gbps), ba=_estimate(gbps))


@dataclass
class _Draft:
    """A node under construction."""

    devices: list[Device] = field(default_factory=list)
    hosts: list[HostMemory] = field(default_factory=list)
    switches: list[Switch] = field(default_factory=list)
    resources: list[Resource] = field(default_factory=list)
    links: list[Link] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def assemble(
    kind: DeviceKind,
    topo: Topo | None,
    facts: Facts | None,
    *,
    hosts: Iterable[HostMemory],
    numa: Mapping[int, int] | None = None,
    notes: Iterable[str] = (),
) -> Node:
    """A node from facts; pure. `numa` (from sysfs) wins over the affinity that a topology table prints."""
    draft = _Draft(hosts=list(hosts), notes=list(notes))
    draft.notes += [*(topo.messages if topo else ()), *(facts.messages if facts else ())]
    if topo is None and facts is None:
        draft.notes.append("no accelerator found: the node has host memory only")
    for host in draft.hosts:
        draft.resources.append(_dram(host))
    first = draft.hosts[0].id
    for host in draft.hosts[1:]:
        name = f"{first}-{host.id}"
        draft.resources.append(Resource(id=name, ab=_estimate(60.0), ba=_estimate(60.0)))
        draft.links.append(Link(id=name, a=first, b=host.id, kind=LinkKind.SOCKET, resources=(name,)))
    places = _add_devices(draft, kind, topo, facts, numa or {})
    cells = [
        replace(cell, a=places[cell.a], b=places[cell.b])
        for cell in (topo.cells if topo else ())
        if cell.a in places and cell.b in places
    ]
    fabric = {cell.kind for cell in cells}
    behind = _pcie_groups(draft, cells)
    by_id = {fact.id: fact for fact in (facts.devices if facts else ())}
    ub = bool(fabric & {LinkKind.HCCS_SW, LinkKind.SIO, LinkKind.UB})
    for device in draft.devices:
        _add_host_link(draft, device, by_id.get(device.id), ub, behind.get(device.id))
    _add_fabric(draft, cells)
    return Node(
        name="discovered",
        description="Found by discovery; rates are vendor figures and estimates until the probe has measured them.",
        devices=tuple(draft.devices),
        hosts=tuple(draft.hosts),
        switches=tuple(draft.switches),
        resources=tuple(draft.resources),
        links=tuple(draft.links),
        notes=tuple(dict.fromkeys(draft.notes)),
    )


def _dram(host: HostMemory) -> Resource:
    gbps = min(200.0, max(20.0, 5.0 * host.cores))
    note = "5 GB/s per core, 20 to 200"
    return Resource(id=host.dram, ab=_estimate(gbps, note), ba=_estimate(0.8 * gbps), both=_estimate(gbps))


def _add_devices(
    draft: _Draft, kind: DeviceKind, topo: Topo | None, facts: Facts | None, numa: Mapping[int, int]
) -> dict[int, int]:
    """Adds the devices; returns device id by the id of the topology table."""
    known = (
        facts.devices if facts is not None else tuple(DeviceFacts(id=i) for i in range(len(topo.ids) if topo else 0))
    )
    places = {fact.id: fact.id for fact in known}
    if topo is not None:
        by_physical = {fact.physical_id: fact.id for fact in known if fact.physical_id is not None}
        if topo.physical and all(i in by_physical for i in topo.ids):
            places = {i: by_physical[i] for i in topo.ids}
        elif topo.physical or any(i not in places for i in topo.ids):
            places = dict(zip(topo.ids, (fact.id for fact in known), strict=False))
    if topo is not None and len(topo.ids) != len(known):
        draft.notes.append(f"the topology table has {len(topo.ids)} devices, the device list {len(known)}")
    tables = {place: i for i, place in places.items()}
    host_of = {host.numa_node for host in draft.hosts}
    by_table_numa = dict(topo.numa) if topo else {}
    by_table_cpus = dict(topo.cpus) if topo else {}
    for fact in known:
        table = tables.get(fact.id, fact.id)
        node = numa.get(fact.id, by_table_numa.get(table))
        if node is None and table in by_table_cpus:
            node = _node_of_cpus(draft.hosts, by_table_cpus[table])
        if node is not None and node not in host_of:
            draft.notes.append(f"device {fact.id}: NUMA node {node} is not one of the host's; ignored")
            node = None
        if node is None and len(draft.hosts) > 1:
            node = draft.hosts[fact.id * len(draft.hosts) // max(1, len(known)) % len(draft.hosts)].numa_node
            draft.notes.append(f"device {fact.id}: NUMA affinity is not known; node {node} by even slices")
        memory = fact.memory_bytes
        if memory is None:
            gib = _NPU_MEMORY_GIB.get(fact.architecture or "", 64) if kind is DeviceKind.NPU else 16
            memory = gib << 30
            draft.notes.append(f"device {fact.id}: memory size is not known; {gib} GiB assumed")
        physical = fact.physical_id if fact.physical_id is not None else (table if table != fact.id else None)
        draft.devices.append(
            Device(
                id=fact.id,
                name=fact.name or kind.value,
                kind=kind,
                memory_bytes=memory,
                source=Source.VENDOR if fact.memory_bytes is None else Source.MEASURED,
                numa_node=node if node is not None else draft.hosts[0].numa_node,
                pci_id=fact.pci_id,
                physical_id=physical,
                architecture=fact.architecture,
            )
        )
    return places


def _node_of_cpus(hosts: Iterable[HostMemory], cpus: str) -> int | None:
    wanted = set(texts.parse_cpu_list(cpus))
    best, most = None, 0
    for host in hosts:
        shared = len(wanted & set(texts.parse_cpu_list(host.cpus))) if host.cpus else 0
        if shared > most:
            best, most = host.numa_node, shared
    return best


def _pcie_groups(draft: _Draft, cells: Iterable[Cell]) -> dict[int, str]:
    """Switch by device, for devices that a table puts behind one PCIe switch (PIX, PXB)."""
    group = {device.id: device.id for device in draft.devices}
    for cell in cells:
        if cell.distance in (Distance.PIX, Distance.PXB) and group[cell.a] != group[cell.b]:
            old, new = max(group[cell.a], group[cell.b]), min(group[cell.a], group[cell.b])
            group = {i: new if g == old else g for i, g in group.items()}
    numa = {device.id: device.numa_node for device in draft.devices}
    behind = {}
    for leader in sorted(set(group.values())):
        members = [i for i, g in group.items() if g == leader]
        if len(members) > 1:
            name = f"pciesw{leader}"
            host = next(host for host in draft.hosts if host.numa_node == numa[leader])
            draft.switches.append(Switch(id=name, kind=SwitchKind.PCIE_SWITCH))
            note = "one x16 uplink assumed"
            draft.resources.append(Resource(id=f"up-{name}", ab=_estimate(25.0, note), ba=_estimate(25.0, note)))
            draft.links.append(
                Link(id=f"{host.id}-{name}", a=host.id, b=name, kind=LinkKind.PCIE, resources=(f"up-{name}",))
            )
            behind.update(dict.fromkeys(members, name))
    return behind


def _add_host_link(draft: _Draft, device: Device, fact: DeviceFacts | None, ub: bool, switch: str | None) -> None:
    host = next(host for host in draft.hosts if host.numa_node == device.numa_node)
    lanes = f"hostlink{device.id}"
    if ub:
        up, down, both, kind, detail = 100.0, 54.0, 130.0, LinkKind.UB, None
    else:
        gen = fact.pcie_gen if fact and fact.pcie_gen else 4
        width = fact.pcie_width if fact and fact.pcie_width else 16
        if not (fact and fact.pcie_gen and fact.pcie_width):
            draft.notes.append(f"device {device.id}: PCIe link is not known; gen{gen} x{width} assumed where not said")
        up = down = _PCIE_GBPS.get(gen, 105.0) * width / 16
        both, kind, detail = 1.7 * up, LinkKind.PCIE, f"gen{gen} x{width}"
    draft.resources.append(Resource(id=lanes, ab=_estimate(up), ba=_estimate(down), both=_estimate(both)))
    start = switch or host.id
    draft.links.append(
        Link(
            id=f"{start}-{device.vertex}",
            a=start,
            b=device.vertex,
            kind=kind,
            resources=(lanes,),
            copy=Rates(ab=_estimate(up), ba=_estimate(down)),
            kernel=Rates(ab=_estimate(0.9 * up), ba=_estimate(0.9 * down)),
            pageable=_both_ways(min(9.0, 0.5 * up)),
            latency_us=_estimate(15.0),
            detail=detail,
        )
    )


def _add_fabric(draft: _Draft, cells: Iterable[Cell]) -> None:
    links = [cell for cell in cells if cell.kind is not None]
    lanes: dict[int, int] = {}
    for cell in links:
        for end in (cell.a, cell.b):
            lanes[end] = lanes.get(end, 0) + (cell.lanes or 0)
    switched = any(count > _MAX_NVLINKS for count in lanes.values())
    planes: dict[str, dict[int, float]] = {}
    for cell in links:
        assert cell.kind is not None
        if cell.kind is LinkKind.NVLINK and switched:
            for end in (cell.a, cell.b):
                port = 25.0 * (cell.lanes or 1)
                planes.setdefault("nvswitch", {})[end] = max(port, planes.get("nvswitch", {}).get(end, 0.0))
        elif cell.kind in (LinkKind.HCCS_SW, LinkKind.UB):
            for end in (cell.a, cell.b):
                planes.setdefault(cell.kind.value.lower(), {})[end] = _FABRIC[cell.kind][0]
        else:
            wire, copy = _FABRIC.get(cell.kind, (25.0 * (cell.lanes or 1), 25.0 * 0.87 * (cell.lanes or 1)))
            name = f"{cell.kind.value.lower()}-{cell.a}-{cell.b}"
            detail = f"{cell.lanes} links" if cell.lanes else None
            _wire(draft, name, f"dev{cell.a}", f"dev{cell.b}", cell.kind, wire, copy, detail)
    for plane, ports in planes.items():
        kind = LinkKind.NVLINK if plane == "nvswitch" else LinkKind(plane.upper())
        draft.switches.append(Switch(id=plane, kind=SwitchKind.FABRIC))
        for device, wire in sorted(ports.items()):
            copy = 0.87 * wire if kind is LinkKind.NVLINK else _FABRIC[kind][1]
            _wire(draft, f"{plane}-{device}", plane, f"dev{device}", kind, wire, copy, None)


def _wire(
    draft: _Draft, name: str, a: str, b: str, kind: LinkKind, wire: float, copy: float, detail: str | None
) -> None:
    rate = Quantity(value=wire, source=Source.VENDOR)
    draft.resources.append(Resource(id=name, ab=rate, ba=rate))
    draft.links.append(
        Link(
            id=f"link-{name}",
            a=a,
            b=b,
            kind=kind,
            resources=(name,),
            copy=_both_ways(copy),
            kernel=_both_ways(0.9 * copy),
            latency_us=_estimate(10.0),
            detail=detail,
        )
    )
