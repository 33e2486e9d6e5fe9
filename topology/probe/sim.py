"""The simulated meter: measures a node through the fluid model, as the real one measures a machine.

Owns nothing but the translation of jobs into flow tasks. Must not import torch.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..codec import Table, TopologyError
from ..flow import Task, run
from ..model import Node
from ..routes import Path, Route
from .suite import MIB, Job

_SAMPLE = 16 * 512 * MIB
_OUTLAST = 1000


class SimMeter:
    """Measures `node` in simulated time. Never fails to deliver the data, so `failures` is empty."""

    name = "sim"
    simulated = True
    method = "simulated: 16 x 512 MiB, the other transfers outlast the measured one"

    def __init__(self, node: Node) -> None:
        self._node = node
        self._capacities = node.capacities()

    def environment(self) -> Table:
        return (("backend", "sim"), ("simulated_node", self._node.name), ("simulated_hash", self._node.hash[:16]))

    def why_not(self, job: Job) -> str | None:
        try:
            job.route(self._node)
        except TopologyError:
            return "no path"
        return None

    def rates(self, jobs: Sequence[Job]) -> list[float]:
        routes = [job.route(self._node) for job in jobs]
        found: dict[Job, float] = {}
        for i, job in enumerate(jobs):
            if job not in found:  # equal jobs get equal rates
                tasks = [route.task(k, _SAMPLE * (1 if k == i else _OUTLAST)) for k, route in enumerate(routes)]
                found[job] = _SAMPLE / self._seconds(tasks, i) / 1e9
        return [found[job] for job in jobs]

    def latency_s(self, job: Job) -> float:
        route = job.route(self._node)
        small, double = (self._seconds([route.task(0, nbytes)], 0) for nbytes in (4096, 8192))
        return 2 * small - double

    def load_gbps(self, device: int, nbytes: int, parts: Sequence[tuple[Path, float]]) -> float:
        tasks = []
        for i, (known, part) in enumerate(parts):
            # The caller's path carries the caller's idea of its rates; the simulated node has its own.
            path = next(p for p in self._node.paths(known.src, known.dst) if p.relays == known.relays)
            route = Route(uses=path.uses, rate_cap_gbps=path.rate_cap_gbps, latency_s=path.latency_s)
            tasks.append(route.task(i, part * nbytes))
        return nbytes / max(span.end_s for span in run(tasks, self._capacities).values()) / 1e9

    def failures(self) -> tuple[str, ...]:
        return ()

    def _seconds(self, tasks: list[Task], which: int) -> float:
        return run(tasks, self._capacities)[which].seconds
