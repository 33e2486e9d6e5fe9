"""What the probe measures and in which order, whatever measures it.

Owns `Job`, the `Meter` protocol that a backend implements, and the list of measurements. Must not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ..codec import Table, TopologyError
from ..flow import Flow, TaskId, max_min_rates
from ..model import Method, Node, Record
from ..routes import Path, Route

MIB = 1 << 20
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One stream of bytes."""

    kind: str
    """h2d, d2h, p2p (device to peer), mix (a kernel reads and writes host memory), host (threads on host memory)."""
    device: int = -1
    peer: int | None = None
    host: str | None = None
    """For kind host, and for h2d and d2h from or to a host memory that is not the device's home."""
    method: Method = Method.COPY
    read: float = 1.0
    write: float = 0.0
    """Parts read and written, for mix and host."""
    threads: int = 1

    def route(self, node: Node) -> Route:
        """The constraints of this job on a node. TopologyError where the node has no such path."""
        if self.kind == "host":
            assert self.host is not None
            return node.host_work(self.host, self.read, self.write, self.threads)
        if self.kind == "mix":
            return node.kernel_mix(self.device, self.read, self.write)
        return node.transfer(self.kind, self.device, peer=self.peer, host=self.host, method=self.method)

    @property
    def devices(self) -> frozenset[int]:
        return frozenset(i for i in (self.device, self.peer) if i is not None and i >= 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """Jobs that ran at the same time and the GB/s each got while all of them ran."""

    jobs: tuple[Job, ...]
    rates: tuple[float, ...]


class Meter(Protocol):
    """A backend of the probe."""

    name: str
    simulated: bool
    method: str
    """How it measures, for the captions."""

    def environment(self) -> Table: ...

    def why_not(self, job: Job) -> str | None:
        """Why this job cannot be measured here; None if it can."""
        ...

    def rates(self, jobs: Sequence[Job]) -> list[float]:
        """GB/s of each job while all of them run."""
        ...

    def latency_s(self, job: Job) -> float:
        """Time of a transfer so small that its bytes do not count."""
        ...

    def load_gbps(self, device: int, nbytes: int, parts: Sequence[tuple[Path, float]]) -> float:
        """GB/s of one load from the device's home split over paths in the given parts (which sum to 1)."""
        ...

    def failures(self) -> tuple[str, ...]:
        """Data that did not arrive as sent."""
        ...


@dataclass(slots=True)
class Findings:
    """Everything measured: records for people, observations for the fit."""

    records: list[Record] = field(default_factory=list)
    observations: list[Observation] = field(default_factory=list)
    latencies: dict[Job, float] = field(default_factory=dict)
    waived: list[str] = field(default_factory=list)


class Suite:
    """Runs all measurements of a node with a meter."""

    def __init__(self, node: Node, meter: Meter, *, sizes: Sequence[int], quick: bool, progress: Progress) -> None:
        self.node, self.meter, self.sizes, self.quick = node, meter, tuple(sizes), quick
        self.progress = progress
        self.found = Findings()
        self._ids = [device.id for device in node.devices]

    def run(self) -> Findings:
        """Everything but split loads."""
        for kind in ("h2d", "d2h"):
            self._host_links(kind)
        self._both_ways()
        self._far_memory()
        self._peers()
        self._host_memory()
        self._latencies()
        return self.found

    def run_loads(self, fitted: Node) -> None:
        """Loads to the first device over more and more paths, split by what `fitted` says the paths give."""
        if not self._ids:
            return
        device = self._ids[0]
        for parts in self._splits(fitted, device):
            name = " + ".join(f"{path.name} {part:.0%}" for path, part in parts)
            for nbytes in self.sizes:
                self.progress(f"load of {nbytes // MIB} MiB, {name}")
                at: Table = (("dst", device), ("paths", name), ("added", parts[-1][0].name), ("bytes", nbytes))
                self._record("load", at, self.meter.load_gbps(device, nbytes, parts))

    # --- tests ----------------------------------------------------------------------------------------------------

    def _host_links(self, kind: str) -> None:
        for method in (Method.COPY, Method.KERNEL, Method.PAGEABLE):
            for i in self._ids:
                self._cell(
                    kind,
                    [Job(kind=kind, device=i, method=method)],
                    (("device", i), ("method", method.value), ("mode", "alone")),
                )
        for i in self._ids:
            self._cell(
                kind, [Job(kind=kind, device=i)] * 2, (("device", i), ("method", "copy"), ("mode", "two copies"))
            )
        for group in self._groups():
            self._group(kind, [Job(kind=kind, device=i) for i in group], group)

    def _both_ways(self) -> None:
        for i in self._ids:
            jobs = [Job(kind="h2d", device=i), Job(kind="d2h", device=i)]
            self._cell("both", jobs, (("device", i), ("method", "copy"), ("mode", "alone")))
            mix = Job(kind="mix", device=i, method=Method.KERNEL, write=1.0)
            self._cell("both", [mix], (("device", i), ("method", "kernel"), ("mode", "alone")))
        for group in self._groups():
            jobs = [Job(kind=kind, device=i) for i in group for kind in ("h2d", "d2h")]
            self._group("both", jobs, group)

    def _far_memory(self) -> None:
        """Copies from memory of other NUMA nodes, alone and for all devices of a NUMA node at once."""
        if (self.quick and not self.meter.simulated) or len(self.node.hosts) < 2:
            return
        homes = {i: self.node.home(i).id for i in self._ids}
        for host in self.node.hosts:
            for kind in ("h2d", "d2h"):
                for i in self._ids:
                    if homes[i] != host.id:
                        at: Table = (("host", host.id), ("device", i), ("kind", kind))
                        self._cell("far", [Job(kind=kind, device=i, host=host.id)], at)
            for near in dict.fromkeys(homes.values()):
                ids = [i for i in self._ids if homes[i] == near != host.id]
                for kinds in (("h2d",), ("d2h",), ("h2d", "d2h")) if ids else ():
                    jobs = [Job(kind=kind, device=i, host=host.id) for i in ids for kind in kinds]
                    at = (("host", host.id), ("near", near), ("kind", "+".join(kinds)))
                    self._cell("far", jobs, at)

    def _peers(self) -> None:
        for method in (Method.COPY, Method.KERNEL):
            for a in self._ids:
                for b in self._ids:
                    if a != b:
                        at: Table = (("src", a), ("dst", b), ("method", method.value), ("mode", "alone"))
                        self._cell("p2p", [Job(kind="p2p", device=a, peer=b, method=method)], at)
        if self.quick and not self.meter.simulated:
            return
        for a in self._ids if len(self._ids) > 2 else ():
            peers = [b for b in self._ids if b != a]
            for mode, jobs in (
                ("to all", [Job(kind="p2p", device=a, peer=b) for b in peers]),
                ("from all", [Job(kind="p2p", device=b, peer=a) for b in peers]),
            ):
                jobs = [job for job in jobs if self._why_not([job]) is None]
                if len(jobs) > 1:
                    self._cell("p2p", jobs, (("device", a), ("method", "copy"), ("mode", mode)))
        for a in self._ids:
            for b in self._ids:
                there, back = Job(kind="p2p", device=a, peer=b), Job(kind="p2p", device=b, peer=a)
                if a != b:
                    self._cell("p2p", [there] * 2, (("src", a), ("dst", b), ("method", "copy"), ("mode", "two copies")))
                if a < b:
                    at = (("src", a), ("dst", b), ("method", "copy"), ("mode", "both ways"))
                    self._cell("p2p", [there, back, there, back], at)

    def _host_memory(self) -> None:
        mixes = (("read", 1.0, 0.0), ("write", 0.0, 1.0), ("copy", 1.0, 1.0))
        for host in self.node.hosts:
            counts = [1 << k for k in range(host.cores.bit_length()) if 1 << k < host.cores] + [host.cores]
            if self.quick:
                counts = sorted({1, counts[len(counts) // 2], host.cores})
            for name, read, write in mixes:
                for threads in counts:
                    job = Job(kind="host", host=host.id, read=read, write=write, threads=threads)
                    self._cell("dram", [job], (("host", host.id), ("what", name), ("threads", threads)))
            home = [i for i in self._ids if self.node.home(i).id == host.id]
            if not home:
                continue
            for (name, read, write), kinds in zip(mixes, (("h2d",), ("d2h",), ("h2d", "d2h")), strict=True):
                jobs = [Job(kind="host", host=host.id, read=read, write=write, threads=host.cores)]
                jobs += [Job(kind=kind, device=i) for i in home for kind in kinds]
                at = (("host", host.id), ("what", name), ("threads", host.cores), ("with", "+".join(kinds)))
                self._cell("dram", jobs, at)

    def _splits(self, node: Node, device: int) -> Iterator[list[tuple[Path, float]]]:
        """Direct, then with more and more relays, each the one that adds most, until none adds 2 %."""
        flow = node.max_flow(node.home(device).id, device)
        paths = [path for path, _ in sorted(flow.rates, key=lambda item: (bool(item[0].relays), -item[1]))]
        best = 0.0
        for count in range(1, min(len(paths), 5) + 1):
            chosen = paths[:count]
            flows: dict[TaskId, Flow] = {
                i: Flow(uses=path.uses, rate_cap_gbps=path.rate_cap_gbps) for i, path in enumerate(chosen)
            }
            rates = max_min_rates(flows, node.capacities())
            total = sum(rates.values())
            if total < 1.02 * best:
                return
            best = total
            yield [(path, rates[i] / total) for i, path in enumerate(chosen)]

    def _latencies(self) -> None:
        for kind in ("h2d", "d2h"):
            for i in self._ids:
                self._latency(Job(kind=kind, device=i), (("what", kind), ("device", i)))
        for a in self._ids:
            for b in self._ids:
                if a != b:
                    self._latency(Job(kind="p2p", device=a, peer=b), (("what", "p2p"), ("src", a), ("dst", b)))

    # --- one cell -------------------------------------------------------------------------------------------------

    def _groups(self) -> list[tuple[int, ...]]:
        """Sets of devices that share something on the way from their hosts, small sets first, all devices last."""
        users: dict[str, list[int]] = {}
        for i in self._ids:
            try:
                uses = self.node.transfer("h2d", i).uses
            except TopologyError:
                continue
            for name, _ in uses:
                users.setdefault(name, []).append(i)
        groups = {tuple(ids) for ids in users.values() if 1 < len(ids) < len(self._ids)}
        everyone = [tuple(self._ids)] if len(self._ids) > 1 else []
        return sorted(groups, key=lambda ids: (len(ids), ids)) + everyone

    def _group(self, test: str, jobs: list[Job], group: tuple[int, ...]) -> None:
        """Jobs of a group at once; cells by device and the sum."""
        mode = "together" if len(group) == len(self._ids) else "with " + ",".join(map(str, group))
        rates = self._measure(test, jobs, mode)
        if rates is None:
            return
        for i in group:
            value = sum(rate for job, rate in zip(jobs, rates, strict=True) if job.device == i)
            self._record(test, (("device", i), ("method", "copy"), ("mode", mode)), value)
        self._record(test, (("device", "sum"), ("method", "copy"), ("mode", mode)), sum(rates))

    def _cell(self, test: str, jobs: list[Job], at: Table) -> None:
        """Jobs at once; the cell is their sum, for host memory under load the host's own rate."""
        rates = self._measure(test, jobs, " ".join(str(value) for _, value in at))
        if rates is None:
            self._record(test, at, None, reason=self._why_not(jobs))
        else:
            self._record(test, at, rates[0] if test == "dram" else sum(rates))

    def _measure(self, test: str, jobs: list[Job], label: str) -> list[float] | None:
        if self._why_not(jobs) is not None:
            return None
        self.progress(f"{test} {label}")
        rates = self.meter.rates(jobs)
        self.found.observations.append(Observation(jobs=tuple(jobs), rates=tuple(rates)))
        return rates

    def _why_not(self, jobs: list[Job]) -> str | None:
        for job in jobs:
            try:
                job.route(self.node)
            except TopologyError:
                return "no path"
            reason = self.meter.why_not(job)
            if reason is not None:
                return reason
        return None

    def _latency(self, job: Job, at: Table) -> None:
        reason = self._why_not([job])
        if reason is not None:
            self._record("latency", at, None, unit="us", reason=reason)
            return
        self.progress("latency " + " ".join(str(value) for _, value in at))
        seconds = self.meter.latency_s(job)
        self.found.latencies[job] = seconds
        self._record("latency", at, seconds * 1e6, unit="us")

    def _record(
        self, test: str, at: Table, value: float | None, *, unit: str = "GB/s", reason: str | None = None
    ) -> None:
        self.found.records.append(Record(test=test, at=at, value=value, unit=unit, reason=reason))
        if value is None:
            what = f"{test} by {dict(at).get('method', 'copy')}" if test != "latency" else f"latency {dict(at)['what']}"
            text = f"{what} ({reason})"
            if text not in self.found.waived:
                self.found.waived.append(text)
