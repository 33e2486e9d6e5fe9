"""Paths and flows over a node's graph: direct and relay paths, the multi-path limit, and routes for the simulator.

Owns the search and the translation of transfers into constraints. Pure; reached through the methods of `Node`.
Must import nothing but the standard library and this package's `model`, `codec` and `flow`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from .codec import TopologyError
from .flow import Flow, Task, TaskId, Uses, max_total_rates
from .model import Device, Distance, HostMemory, Link, LinkKind, Method, Node, Rates, SwitchKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Hop:
    """One link of a path and the way it is taken."""

    link: str
    forward: bool
    """True from the link's a to its b."""
    to: str
    """Vertex at the far end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Path:
    """A chain of links."""

    src: str
    dst: str
    hops: tuple[Hop, ...]
    relays: tuple[int, ...] = ()
    """Devices in the middle; empty for a direct path."""
    rate_gbps: float
    """What one transfer alone gets."""
    bottleneck: str
    """The constraint or link that sets `rate_gbps`."""
    uses: Uses
    """Constraints that a byte on this path loads, DRAM included."""
    rate_cap_gbps: float | None
    """Largest rate of one transfer by its method, whatever the constraints allow."""
    latency_s: float

    @property
    def name(self) -> str:
        """`direct` or `via dev1`."""
        return "via " + ", ".join(f"dev{i}" for i in self.relays) if self.relays else "direct"

    def shares_with(self, other: Path) -> tuple[str, ...]:
        """Constraints that both paths load."""
        theirs = {name for name, _ in other.uses}
        return tuple(name for name, _ in self.uses if name in theirs)


@dataclass(frozen=True, slots=True, kw_only=True)
class MaxFlow:
    """The limit of multi-path."""

    total_gbps: float
    rates: tuple[tuple[Path, float], ...]
    """Every path with its part in GB/s; 0 where it adds nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """What the bytes of one transfer load, ready for `flow`."""

    uses: Uses
    rate_cap_gbps: float | None = None
    latency_s: float = 0.0

    def task(
        self,
        task_id: TaskId,
        nbytes: float,
        *,
        deps: tuple[TaskId, ...] = (),
        queue: str | None = None,
        latency: bool = True,
    ) -> Task:
        """A `flow.Task` that moves `nbytes`; `latency=False` for a piece that follows another without a gap."""
        return Task(
            id=task_id,
            deps=deps,
            seconds=self.latency_s if latency else 0.0,
            nbytes=nbytes,
            uses=self.uses,
            rate_cap_gbps=self.rate_cap_gbps,
            queue=queue,
        )


@dataclass(frozen=True, slots=True)
class _Edge:
    link: Link
    forward: bool
    src: str
    dst: str


class Router:
    """Search over one node, with caches; made once per node."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.capacities: dict[str, float] = {}
        for resource in node.resources:
            self.capacities[f"{resource.id}:ab"] = resource.ab.value
            self.capacities[f"{resource.id}:ba"] = resource.ba.value
            if resource.both is not None:
                self.capacities[f"{resource.id}:both"] = resource.both.value
        self._devices = {device.vertex: device for device in node.devices}
        self._hosts = {host.id: host for host in node.hosts}
        self._switches = {switch.id: switch for switch in node.switches}
        self._edges: dict[str, list[_Edge]] = {v: [] for v in (*self._devices, *self._hosts, *self._switches)}
        for link in node.links:
            self._edges[link.a].append(_Edge(link, True, link.a, link.b))
            self._edges[link.b].append(_Edge(link, False, link.b, link.a))
        self._paths: dict[tuple[str, str, Method], Path | None] = {}
        self._routes: dict[tuple[str, int, int | None, str | None, Method], Route] = {}
        self._homes: dict[int, HostMemory] = {}

    def home(self, device: Device) -> HostMemory:
        if device.id not in self._homes:
            self._homes[device.id] = self._find_home(device)
        return self._homes[device.id]

    def paths(self, src: str | int, dst: str | int, method: Method) -> tuple[Path, ...]:
        start, end = self._vertex(src), self._vertex(dst)
        if start == end:
            raise TopologyError(f"a path needs two ends, both are {start!r}")
        direct = self.best(start, end, method)
        found = [] if direct is None else [direct]
        if start in self._devices and end in self._devices:
            return tuple(found)
        own = {hop.link for hop in direct.hops if self._at_device(hop)} if direct is not None else set()
        for vertex, device in self._devices.items():
            if vertex in (start, end):
                continue
            first, second = self.best(start, vertex, method), self.best(vertex, end, method)
            if first is None or second is None:
                continue
            hops = (*first.hops, *second.hops)
            if own.isdisjoint(hop.link for hop in hops):
                found.append(self._path(start, end, hops, method, (device.id,)))
        return tuple(found)

    def max_flow(self, host: str, device: int, to_host: bool) -> MaxFlow:
        ends: tuple[str | int, str | int] = (device, host) if to_host else (host, device)
        paths = self.paths(*ends, Method.COPY)
        flows: dict[TaskId, Flow] = {
            i: Flow(uses=path.uses, rate_cap_gbps=path.rate_cap_gbps) for i, path in enumerate(paths)
        }
        rates = max_total_rates(flows, self.capacities)
        return MaxFlow(
            total_gbps=math.fsum(rates.values()), rates=tuple((path, rates[i]) for i, path in enumerate(paths))
        )

    def transfer(self, kind: str, device: int, peer: int | None, host: str | None, method: Method) -> Route:
        key = (kind, device, peer, host, method)
        if key not in self._routes:
            self._routes[key] = self._transfer(*key)
        return self._routes[key]

    def kernel_mix(self, device: int, read_bytes: float, write_bytes: float, host: str | None) -> Route:
        read, write = _parts(read_bytes, write_bytes)
        down = self._ends("h2d", device, None, host, Method.KERNEL)
        up = self._ends("d2h", device, None, host, Method.KERNEL)
        cap = math.inf
        for path, part in ((down, read), (up, write)):
            if part > 0.0 and path.rate_cap_gbps is not None:
                cap = min(cap, path.rate_cap_gbps / part)
        if read > 0.0 and write > 0.0:
            for hop in down.hops:
                kernel = self._link(hop).kernel
                if kernel is not None and kernel.both is not None:
                    cap = min(cap, kernel.both.value)
        uses = _sum_uses(
            [(name, weight * part) for path, part in ((down, read), (up, write)) for name, weight in path.uses]
        )
        return Route(uses=uses, rate_cap_gbps=cap if cap < math.inf else None, latency_s=down.latency_s)

    def host_work(self, host: str, read_bytes: float, write_bytes: float, threads: int) -> Route:
        memory = self.node.host(host)
        read, write = _parts(read_bytes, write_bytes)
        if threads < 1:
            raise TopologyError(f"host work needs at least one thread, got {threads}")
        uses = _sum_uses([(f"{memory.dram}:ab", read), (f"{memory.dram}:ba", write)])
        if f"{memory.dram}:both" in self.capacities:
            uses = (*uses, (f"{memory.dram}:both", 1.0))
        cap = _thread_rate(memory.thread, read, write) * min(threads, memory.cores)
        return Route(uses=uses, rate_cap_gbps=cap if cap < math.inf else None)

    def distance(self, a: int, b: int) -> Distance | None:
        starts, ends = self.node.device(a).vertex, self.node.device(b).vertex
        wires = (LinkKind.PCIE, LinkKind.SOCKET)
        trail = self._search(
            starts, ends, lambda edge: edge.link.kind in wires, lambda vertex: vertex not in self._devices
        )
        if trail is None or a == b:
            return None
        stops = [edge.dst for edge in trail[:-1]]
        if not stops:
            return trail[0].link.distance
        if sum(stop in self._hosts for stop in stops) > 1:
            return Distance.SYS
        kinds = [self._switches[stop].kind for stop in stops if stop in self._switches]
        if any(stop in self._hosts for stop in stops):
            return Distance.NODE if SwitchKind.PCIE_ROOT in kinds else Distance.PHB
        if SwitchKind.PCIE_ROOT in kinds:
            return Distance.PHB
        return Distance.PIX if len(kinds) == 1 else Distance.PXB

    def best(self, src: str, dst: str, method: Method) -> Path | None:
        """The path without a device in the middle with the largest rate, of those the one with the fewest links."""
        key = (src, dst, method)
        if key not in self._paths:
            self._paths[key] = self._best(src, dst, method)
        return self._paths[key]

    # --- inside ---------------------------------------------------------------------------------------------------

    def _find_home(self, device: Device) -> HostMemory:
        for host in self.node.hosts:
            if device.numa_node is not None and host.numa_node == device.numa_node:
                return host
        found = []
        for i, host in enumerate(self.node.hosts):
            path = self.best(host.id, device.vertex, Method.COPY)
            if path is not None:
                found.append((-path.rate_gbps, len(path.hops), i))
        if not found:
            raise TopologyError(f"no path joins device {device.id} with any host memory of node {self.node.name!r}")
        return self.node.hosts[min(found)[2]]

    def _vertex(self, end: str | int) -> str:
        if isinstance(end, int):
            return self.node.device(end).vertex
        return end if end in self._devices else self.node.host(end).id

    def _transfer(self, kind: str, device: int, peer: int | None, host: str | None, method: Method) -> Route:
        path = self._ends(kind, device, peer, host, method)
        return Route(uses=path.uses, rate_cap_gbps=path.rate_cap_gbps, latency_s=path.latency_s)

    def _ends(self, kind: str, device: int, peer: int | None, host: str | None, method: Method) -> Path:
        if kind not in ("h2d", "d2h", "p2p"):
            raise TopologyError(f"transfer kind {kind!r}; known: 'h2d', 'd2h', 'p2p'")
        if (kind == "p2p") != (peer is not None):
            raise TopologyError(f"transfer kind {kind!r} {'needs' if kind == 'p2p' else 'takes no'} peer")
        own = self.node.device(device)
        other = (
            self.node.device(peer).vertex
            if peer is not None
            else self.node.host(host).id
            if host
            else self.home(own).id
        )
        src, dst = (other, own.vertex) if kind == "h2d" else (own.vertex, other)
        if src == dst:
            raise TopologyError(f"device {device} is not its own peer")
        path = self.best(src, dst, method)
        if path is None:
            raise TopologyError(f"node {self.node.name!r} has no path {src} to {dst} by {method.value}")
        return path

    def _link(self, hop: Hop) -> Link:
        return next(edge.link for edge in self._edges[hop.to] if edge.link.id == hop.link)

    def _at_device(self, hop: Hop) -> bool:
        link = self._link(hop)
        return link.a in self._devices or link.b in self._devices

    def _cap(self, edge: _Edge, method: Method) -> float:
        """GB/s of one transfer over a link by its method; 0 where impossible, inf where only resources limit it."""
        rates: Rates | None = getattr(edge.link, method.value)
        touches = edge.src in self._devices or edge.dst in self._devices
        if rates is None:
            return 0.0 if touches else math.inf
        rate = rates.ab if edge.forward else rates.ba
        if rate is None:
            return 0.0 if touches else math.inf
        return rate.value

    def _uses(self, edge: _Edge) -> list[tuple[str, float]]:
        uses = []
        for resource in edge.link.resources:
            uses.append((f"{resource}:{'ab' if edge.forward else 'ba'}", 1.0))
            if f"{resource}:both" in self.capacities:
                uses.append((f"{resource}:both", 1.0))
        return uses

    def _width(self, edge: _Edge, method: Method) -> float:
        return min([self._cap(edge, method), *(self.capacities[name] for name, _ in self._uses(edge))])

    def _best(self, src: str, dst: str, method: Method) -> Path | None:
        peers = src in self._devices and dst in self._devices
        if peers and method is Method.PAGEABLE:
            return None

        def passes(vertex: str) -> bool:
            if vertex in self._devices:
                return False
            return not peers or (self._switches.get(vertex) or self._hosts[vertex]).peer_transit

        widths = {id(edge): self._width(edge, method) for edges in self._edges.values() for edge in edges}
        for level in sorted(set(widths.values()) - {0.0}, reverse=True):
            trail = self._search(src, dst, lambda edge, level=level: widths[id(edge)] >= level, passes)  # type: ignore[misc]
            if trail is not None:
                hops = tuple(Hop(link=edge.link.id, forward=edge.forward, to=edge.dst) for edge in trail)
                return self._path(src, dst, hops, method, ())
        return None

    def _search(
        self, src: str, dst: str, allowed: Callable[[_Edge], bool], passes: Callable[[str], bool]
    ) -> list[_Edge] | None:
        """Fewest links from src to dst, breadth first in the order of the node's links."""
        came: dict[str, _Edge] = {}
        queue = deque([src])
        while queue:
            here = queue.popleft()
            if here == dst:
                trail = []
                while here != src:
                    trail.append(came[here])
                    here = came[here].src
                return trail[::-1]
            if here != src and not passes(here):
                continue
            for edge in self._edges[here]:
                if edge.dst != src and edge.dst not in came and allowed(edge):
                    came[edge.dst] = edge
                    queue.append(edge.dst)
        return None

    def _path(self, src: str, dst: str, hops: tuple[Hop, ...], method: Method, relays: tuple[int, ...]) -> Path:
        uses: list[tuple[str, float]] = []
        limits: list[tuple[float, str]] = []
        latency_us = 0.0
        for vertex, way in ((src, "ab"), (dst, "ba")):
            if vertex in self._hosts:
                dram = self._hosts[vertex].dram
                uses += [(name, 1.0) for name in (f"{dram}:{way}", f"{dram}:both") if name in self.capacities]
        for hop in hops:
            link = self._link(hop)
            ends = (link.a, link.b) if hop.forward else (link.b, link.a)
            edge = _Edge(link, hop.forward, *ends)
            uses += self._uses(edge)
            limits.append((self._cap(edge, method), link.id))
            latency_us += link.latency_us.value if link.latency_us is not None else 0.0
        cap = min(limits)[0]
        total = _sum_uses(uses)
        limits += [(self.capacities[name] / weight, name) for name, weight in total]
        rate, bottleneck = min(limits)
        return Path(
            src=src,
            dst=dst,
            hops=hops,
            relays=relays,
            rate_gbps=rate,
            bottleneck=bottleneck,
            uses=total,
            rate_cap_gbps=cap if cap < math.inf else None,
            latency_s=latency_us * 1e-6,
        )


def _parts(read_bytes: float, write_bytes: float) -> tuple[float, float]:
    total = read_bytes + write_bytes
    if not (read_bytes >= 0.0 and write_bytes >= 0.0 and 0.0 < total < math.inf):
        raise TopologyError(f"bytes to read and write: {read_bytes!r} and {write_bytes!r}; need some, not negative")
    return read_bytes / total, write_bytes / total


def _sum_uses(uses: list[tuple[str, float]]) -> Uses:
    total: dict[str, float] = {}
    for name, weight in uses:
        if weight > 0.0:
            total[name] = total.get(name, 0.0) + weight
    return tuple(total.items())


def _thread_rate(thread: Rates | None, read: float, write: float) -> float:
    """GB/s that one thread moves at this mix: its mixed rate where given, else the sum of read time and write time."""
    if thread is None:
        return math.inf
    if read > 0.0 and write > 0.0 and thread.both is not None:
        return thread.both.value
    seconds = 0.0
    for part, rate in ((read, thread.ab), (write, thread.ba)):
        if part > 0.0:
            rate = rate or thread.both
            seconds += part / rate.value if rate is not None else 0.0
    return 1.0 / seconds if seconds > 0.0 else math.inf
