"""From observations to a Node: which numbers of the base node were measured, and what they are.

Owns the attribution of limits. Pure. Must not import torch.

A job that got less than it gets alone (host threads: less than as many times one thread) met a full constraint. Of the
constraints it uses, those that carried more at another time were not full. Observations are read from few devices to
many, so that what is known to be full explains a later one; else those with the fewest users are the limit, DRAM last,
and the most they ever carried is their capacity. A constraint that was never found full keeps its base value unless it
carried more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from ..codec import TopologyError
from ..model import HostMemory, Link, Method, Node, Quantity, Rates, Resource, Source
from ..routes import Hop
from .suite import Findings, Job, Observation

_SLACK = 0.97
"""Less than this part of the rate alone counts as throttled, of the largest load as not full."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """A constraint that was found full."""

    constraint: str
    gbps: float
    devices: tuple[int, ...]
    """Devices whose bytes it carried when it was full."""


def fit(base: Node, found: Findings, *, simulated: bool) -> tuple[Node, tuple[Limit, ...]]:
    """The base node with every number that the findings show, marked measured (or simulated), and the limits."""
    source = Source.SIMULATED if simulated else Source.MEASURED

    def quantity(value: float, note: str | None = None) -> Quantity:
        return Quantity(value=value, source=source, note=note)

    alone = {o.jobs[0]: o.rates[0] for o in found.observations if len(o.jobs) == 1}
    limits, seen = _limits(base, found.observations, alone)
    by_name = {limit.constraint: limit for limit in limits}

    def capacity(name: str, old: Quantity | None) -> Quantity | None:
        if name in by_name:
            return quantity(by_name[name].gbps)
        if old is not None and seen.get(name, 0.0) > old.value:
            return quantity(seen[name], "at least")
        return old

    resources = []
    for resource in base.resources:
        ab, ba = capacity(f"{resource.id}:ab", resource.ab), capacity(f"{resource.id}:ba", resource.ba)
        assert ab is not None and ba is not None
        both = capacity(f"{resource.id}:both", resource.both)
        resources.append(Resource(id=resource.id, ab=ab, ba=ba, both=both, name=resource.name))
    best, latency = _by_link(base, alone, found.latencies)
    links = tuple(_link(link, best, latency.get(link.id), quantity) for link in base.links)
    hosts = tuple(_host(host, alone, quantity) for host in base.hosts)
    node = replace(base, resources=tuple(resources), links=links, hosts=hosts, simulated=simulated)
    return node, limits


def _limits(
    base: Node, observations: Iterable[Observation], alone: Mapping[Job, float]
) -> tuple[tuple[Limit, ...], dict[str, float]]:
    seen: dict[str, float] = {}
    users: dict[str, set[int]] = {}
    loaded = []
    for observation in observations:
        loads: dict[str, float] = {}
        for job, rate in zip(observation.jobs, observation.rates, strict=True):
            for name, weight in job.route(base).uses:
                loads[name] = loads.get(name, 0.0) + weight * rate
                users.setdefault(name, set()).update(job.devices)
        for name, load in loads.items():
            seen[name] = max(seen.get(name, 0.0), load)
        loaded.append((observation, loads))
    drams = {host.dram for host in base.hosts}
    found: dict[str, Limit] = {}
    loaded.sort(key=lambda item: len(frozenset().union(*(job.devices for job in item[0].jobs))))
    for observation, loads in loaded:
        for job, rate in zip(observation.jobs, observation.rates, strict=True):
            if rate >= _SLACK * _unhindered(job, alone):
                continue
            full = [name for name, _ in job.route(base).uses if loads[name] >= _SLACK * seen[name]]
            known = {name.rpartition(":")[0] for name in full if name in found}
            if known:
                full = [name for name in full if name.rpartition(":")[0] in known and name not in found]
            keys = {name: (name.rpartition(":")[0] in drams, len(users[name])) for name in full}
            for name in full:
                if keys[name] == min(keys.values()):
                    carried = {i for other in observation.jobs for i in other.devices if _carries(base, other, name)}
                    found[name] = Limit(constraint=name, gbps=seen[name], devices=tuple(sorted(carried)))
    return tuple(found[name] for name in base.capacities() if name in found), seen


def _unhindered(job: Job, alone: Mapping[Job, float]) -> float:
    """GB/s of a job that shares nothing; 0 if that is not known."""
    if job.kind == "host" and job.threads > 1:
        return job.threads * alone.get(replace(job, threads=1), 0.0)
    return alone.get(job, 0.0)


def _carries(base: Node, job: Job, constraint: str) -> bool:
    return any(name == constraint for name, _ in job.route(base).uses)


def _by_link(
    base: Node, alone: Mapping[Job, float], latencies: Mapping[Job, float]
) -> tuple[dict[tuple[str, Method, str], float], dict[str, float]]:
    """Best rate alone by (link, method, ab | ba | both), and latency by link, over all paths that use the link."""
    ends = {link.id for link in base.links if link.a.startswith("dev") or link.b.startswith("dev")}
    best: dict[tuple[str, Method, str], float] = {}
    waits: dict[str, list[float]] = {}
    for job in (*alone, *latencies):
        if job.kind == "host":
            continue
        if job.kind == "p2p":
            trail = base.paths(job.device, job.peer or 0, method=job.method)[0].hops
        else:
            trail = _host_hops(base, job)
        hops = [hop for hop in trail if hop.link in ends]
        for hop in hops:
            if job in alone:
                way = "both" if job.kind == "mix" else "ab" if hop.forward else "ba"
                key = (hop.link, job.method, way)
                best[key] = max(best.get(key, 0.0), alone[job])
            if job in latencies:
                waits.setdefault(hop.link, []).append(max(0.0, latencies[job]) * 1e6 / len(hops))
    return best, {link: sum(values) / len(values) for link, values in waits.items()}


def _host_hops(base: Node, job: Job) -> tuple[Hop, ...]:
    host = job.host or base.home(job.device).id
    ends = (job.device, host) if job.kind == "d2h" else (host, job.device)
    paths = base.paths(*ends, method=job.method)
    if not paths:
        raise TopologyError(f"no path for {job}")
    return paths[0].hops


def _link(
    link: Link,
    best: Mapping[tuple[str, Method, str], float],
    latency_us: float | None,
    quantity: Callable[[float], Quantity],
) -> Link:
    changes: dict[str, Rates] = {}
    for method in Method:
        old = getattr(link, method.value)
        new = {way: best.get((link.id, method, way)) for way in ("ab", "ba", "both")}
        if any(value is not None for value in new.values()):
            rates = old or Rates()
            fresh = {way: quantity(value) for way, value in new.items() if value is not None}
            changes[method.value] = Rates(**{"ab": rates.ab, "ba": rates.ba, "both": rates.both, **fresh})
    latency = quantity(latency_us) if latency_us else link.latency_us
    return replace(link, latency_us=latency, **changes)  # type: ignore[arg-type]


def _host(host: HostMemory, alone: Mapping[Job, float], quantity: Callable[[float], Quantity]) -> HostMemory:
    found = {}
    for way, read, write in (("ab", 1.0, 0.0), ("ba", 0.0, 1.0), ("both", 1.0, 1.0)):
        rate = alone.get(Job(kind="host", host=host.id, read=read, write=write, threads=1))
        if rate is not None:
            found[way] = quantity(rate)
    old = host.thread or Rates()
    return replace(host, thread=Rates(**{"ab": old.ab, "ba": old.ba, "both": old.both, **found})) if found else host
