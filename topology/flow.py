"""The fluid model of shared resources: who gets which rate, and when everything ends.

Owns max-min fair rates, the largest total rate, and an event-driven simulation of transfers and fixed-time work over
named constraints. The simulator, the virtual clock and the transfer planner all use it, so they agree on sharing.

A constraint is a name with a capacity in GB/s (1 GB = 1e9 bytes). A flow moving r GB/s loads each constraint that it
uses with weight * r. A duplex resource is three constraints: `pcie0:ab`, `pcie0:ba` and `pcie0:both`.

Pure: no I/O, no clock, no randomness. Must import nothing but the standard library.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

TaskId = str | int
Uses = tuple[tuple[str, float], ...]
Observer = Callable[[float, float, Mapping[TaskId, float]], None]

_GB = 1e9
_TIE = 1e-12
"""Relative width within which two fill levels, or two completion times, count as the same."""


class FlowError(ValueError):
    """Tasks or capacities that cannot be simulated; the message names the task and the remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """Bytes that want to move now."""

    uses: Uses = ()
    """(constraint, weight) pairs; weight = bytes loaded on the constraint per byte of the flow."""
    rate_cap_gbps: float | None = None
    """Largest rate of this flow alone, GB/s; None = only the constraints limit it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One piece of work: wait for `deps` and the queue, spend `seconds`, then move `nbytes`."""

    id: TaskId
    deps: tuple[TaskId, ...] = ()
    """Tasks that must have ended first."""
    seconds: float = 0.0
    """Fixed time before bytes flow: a latency, or the whole length of a compute task."""
    nbytes: float = 0.0
    uses: Uses = ()
    """(constraint, weight) pairs, as in `Flow`."""
    rate_cap_gbps: float | None = None
    queue: str | None = None
    """Tasks of one queue run one at a time in the order given (a stream, a copy engine); None = no queue."""


@dataclass(frozen=True, slots=True)
class Span:
    """When a task ran, in seconds of simulated time."""

    start_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


def max_min_rates(flows: Mapping[TaskId, Flow], capacities: Mapping[str, float]) -> dict[TaskId, float]:
    """Max-min fair rates in GB/s by progressive filling.

    All rates grow together; a flow stops when its own cap or one of its constraints is full. So no rate can be raised
    without lowering one that is not larger. Deterministic, independent of the order of `flows` up to rounding.

    Raises FlowError for an unknown constraint, a capacity or cap that is not positive, a negative weight, or a flow
    that nothing limits.
    """
    names, rows = _rows(flows, capacities)
    members: dict[str, list[int]] = {}
    for i, (uses, _) in enumerate(rows):
        for constraint in uses:
            members.setdefault(constraint, []).append(i)
    rates = [0.0] * len(rows)
    active = dict.fromkeys(range(len(rows)))
    taken = dict.fromkeys(members, 0.0)
    level = 0.0
    while active:
        levels = []
        for constraint, users in members.items():
            weight = math.fsum(rows[i][0][constraint] for i in users if i in active)
            if weight > 0.0:
                levels.append((max(level, (capacities[constraint] - taken[constraint]) / weight), constraint))
        caps = [rows[i][1] for i in active]
        level = min(min((at for at, _ in levels), default=math.inf), min(caps, default=math.inf))
        edge = level * (1.0 + _TIE)
        full = {i for i in active if rows[i][1] <= edge}
        for at, constraint in levels:
            if at <= edge:
                full.update(i for i in members[constraint] if i in active)
        for i in sorted(full):
            rates[i] = level
            del active[i]
            for constraint, weight in rows[i][0].items():
                taken[constraint] += weight * level
    return dict(zip(names, rates, strict=True))


def max_total_rates(flows: Mapping[TaskId, Flow], capacities: Mapping[str, float]) -> dict[TaskId, float]:
    """Rates in GB/s with the largest sum that the constraints allow (fair or not): the limit of a multi-path load.

    Primal simplex on the dense tableau with Bland's rule; meant for some dozens of flows. Raises as `max_min_rates`.
    """
    names, rows = _rows(flows, capacities)
    limits: dict[tuple[str, int], float] = {}
    for i, (uses, cap) in enumerate(rows):
        if cap < math.inf:
            limits["cap", i] = cap
        for constraint in uses:
            limits.setdefault((constraint, -1), capacities[constraint])
    n, m = len(rows), len(limits)
    table: list[list[float]] = []
    for k, ((constraint, own), limit) in enumerate(limits.items()):
        if own >= 0:
            left = [1.0 if i == own else 0.0 for i in range(n)]
        else:
            left = [uses.get(constraint, 0.0) for uses, _ in rows]
        table.append(left + [1.0 if j == k else 0.0 for j in range(m)] + [limit])
    cost = [1.0] * n + [0.0] * (m + 1)
    basis = list(range(n, n + m))
    while True:
        column = next((j for j in range(n + m) if cost[j] > 1e-12), None)
        if column is None:
            break
        ratios = [(row[-1] / row[column], basis[k], k) for k, row in enumerate(table) if row[column] > 1e-12]
        if not ratios:
            raise FlowError("no constraint limits the total rate")
        _, _, k = min(ratios)
        pivot = table[k][column]
        table[k] = [value / pivot for value in table[k]]
        for other, row in enumerate(table):
            if other != k and row[column] != 0.0:
                factor = row[column]
                table[other] = [value - factor * base for value, base in zip(row, table[k], strict=True)]
        factor = cost[column]
        cost = [value - factor * base for value, base in zip(cost, table[k], strict=True)]
        basis[k] = column
    rates = dict.fromkeys(names, 0.0)
    for k, variable in enumerate(basis):
        if variable < n:
            rates[names[variable]] = max(0.0, table[k][-1])
    return rates


def run(
    tasks: Iterable[Task], capacities_gbps: Mapping[str, float], *, observe: Observer | None = None
) -> dict[TaskId, Span]:
    """Simulate all tasks from time 0; the span of each, in the order given.

    `observe(t0, t1, rates)` is told the constant rates (GB/s by task) of every interval in which bytes flow.
    Raises FlowError for duplicate ids, unknown dependencies, cycles (through dependencies or queue order), or
    impossible numbers; it never hangs.
    """
    tasks = list(tasks)
    fluid = Fluid(capacities_gbps, observe=observe)
    for task in _in_order(tasks):
        fluid.submit(task)
    fluid.run()
    return {task.id: fluid.spans[task.id] for task in tasks}


class Fluid:
    """The simulation as it grows: submit tasks while time passes, ask when one ends.

    `run` is this with everything submitted at time 0. Not thread-safe; a caller with threads holds its own lock.
    """

    def __init__(self, capacities_gbps: Mapping[str, float], *, observe: Observer | None = None) -> None:
        for name, capacity in capacities_gbps.items():
            if not capacity > 0.0:
                raise FlowError(f"constraint {name!r}: capacity {capacity!r} GB/s; it must be positive")
        self.now_s = 0.0
        self.spans: dict[TaskId, Span] = {}
        """Finished tasks."""
        self._capacities = dict(capacities_gbps)
        self._observe = observe
        self._tasks: dict[TaskId, Task] = {}
        self._order: dict[TaskId, int] = {}
        self._waiting: dict[TaskId, int] = {}
        self._followers: dict[TaskId, list[TaskId]] = {}
        self._tails: dict[str, TaskId] = {}
        self._not_before: dict[TaskId, float] = {}
        self._starts: dict[TaskId, float] = {}
        self._timers: list[tuple[float, int, TaskId, bool]] = []
        self._left: dict[TaskId, float] = {}
        self._rates: dict[TaskId, float] | None = None
        self._shapes: dict[TaskId, int] = {}
        self._shape_ids: dict[tuple[Uses, float | None], int] = {}
        self._memo: dict[tuple[int, ...], dict[int, float]] = {}
        self._count = 0

    def submit(self, task: Task, *, at_s: float = 0.0) -> None:
        """Add a task that starts when its deps and its queue allow, and not before max(now, `at_s`).

        Its deps must have been submitted already (finished ones are fine). Raises FlowError as `run` does.
        """
        _check(task, self._capacities)
        if not 0.0 <= at_s < math.inf:
            raise FlowError(f"task {task.id!r}: at_s {at_s!r}; it must be finite and not negative")
        if task.id in self._tasks or task.id in self.spans:
            raise FlowError(f"task {task.id!r} is submitted twice")
        before = set()
        for dep in task.deps:
            if dep in self._tasks:
                before.add(dep)
            elif dep not in self.spans:
                raise FlowError(f"task {task.id!r} depends on {dep!r}, which is not known")
        if task.queue is not None:
            tail = self._tails.get(task.queue)
            if tail is not None and tail in self._tasks:
                before.add(tail)
            self._tails[task.queue] = task.id
        self._tasks[task.id] = task
        self._order[task.id] = self._count
        self._count += 1
        self._not_before[task.id] = max(at_s, self.now_s)
        self._waiting[task.id] = len(before)
        for dep in before:
            self._followers.setdefault(dep, []).append(task.id)
        if not before:
            self._ready(task.id)

    def run(self, until: TaskId | None = None, *, until_s: float = math.inf) -> float:
        """Let time pass until task `until` has ended (None = all tasks), at most to `until_s`; returns the time."""
        if until is not None and until not in self._tasks and until not in self.spans:
            raise FlowError(f"task {until!r} is not known")
        while self._tasks and (until is None or until not in self.spans):
            if not self._step(until_s):
                break
        if until is None and until_s < math.inf:
            self.now_s = max(self.now_s, until_s)
        return self.now_s

    def forget(self, ids: Iterable[TaskId]) -> None:
        """Drop the spans of finished tasks, so that a long simulation does not grow; later deps must not name them."""
        for task_id in ids:
            self.spans.pop(task_id, None)

    def _ready(self, task_id: TaskId) -> None:
        heapq.heappush(self._timers, (max(self.now_s, self._not_before[task_id]), self._order[task_id], task_id, False))

    def _step(self, until_s: float) -> bool:
        """Advance to the next event and handle everything that happens then; False if it lies beyond `until_s`."""
        if self._rates is None:
            self._rates = self._current_rates()
        gaps = {task_id: self._left[task_id] / (rate * _GB) for task_id, rate in self._rates.items()}
        flow_gap = min(gaps.values(), default=math.inf)
        timer_gap = self._timers[0][0] - self.now_s if self._timers else math.inf
        gap = min(flow_gap, timer_gap)
        if gap == math.inf:
            raise FlowError(f"{len(self._tasks)} tasks can never end; this is a defect of the fluid model")
        beyond = self.now_s + gap > until_s
        if beyond:
            gap = max(0.0, until_s - self.now_s)
        then = self._timers[0][0] if not beyond and gap == timer_gap else self.now_s + gap
        if gap > 0.0:
            for task_id, rate in self._rates.items():
                self._left[task_id] = max(0.0, self._left[task_id] - rate * _GB * gap)
            if self._observe is not None and self._rates and then > self.now_s:
                self._observe(self.now_s, then, dict(self._rates))
        self.now_s = max(self.now_s, then)
        if beyond:
            return False
        edge = gap * (1.0 + _TIE) + self.now_s * 1e-15
        for task_id in [task_id for task_id, at in gaps.items() if at <= edge]:
            del self._left[task_id]
            self._rates = None
            self._finish(task_id)
        while self._timers and self._timers[0][0] <= self.now_s:
            _, _, task_id, waited = heapq.heappop(self._timers)
            self._fire(task_id, waited)
        return True

    def _fire(self, task_id: TaskId, waited: bool) -> None:
        task = self._tasks[task_id]
        if not waited:
            self._starts[task_id] = self.now_s
            if task.seconds > 0.0:
                heapq.heappush(self._timers, (self.now_s + task.seconds, self._order[task_id], task_id, True))
                return
        if task.nbytes > 0.0:
            shape = (task.uses, task.rate_cap_gbps)
            self._shapes[task_id] = self._shape_ids.setdefault(shape, len(self._shape_ids))
            self._left[task_id] = float(task.nbytes)
            self._rates = None
        else:
            self._finish(task_id)

    def _finish(self, task_id: TaskId) -> None:
        self.spans[task_id] = Span(self._starts.pop(task_id), self.now_s)
        for table in (self._tasks, self._order, self._waiting, self._not_before, self._shapes):
            table.pop(task_id, None)
        for follower in self._followers.pop(task_id, ()):
            self._waiting[follower] -= 1
            if self._waiting[follower] == 0:
                self._ready(follower)

    def _current_rates(self) -> dict[TaskId, float]:
        """Rates of the flows now under way; equal mixes of shapes are computed once (flows of one shape are equal)."""
        key = tuple(sorted(self._shapes[task_id] for task_id in self._left))
        by_shape = self._memo.get(key)
        if by_shape is None:
            flows: dict[TaskId, Flow] = {}
            for task_id in self._left:
                task = self._tasks[task_id]
                flows[task_id] = Flow(uses=task.uses, rate_cap_gbps=task.rate_cap_gbps)
            rates = max_min_rates(flows, self._capacities)
            by_shape = {self._shapes[task_id]: rate for task_id, rate in rates.items()}
            if len(self._memo) >= 4096:
                self._memo.clear()
            self._memo[key] = by_shape
        return {task_id: by_shape[self._shapes[task_id]] for task_id in self._left}


def _rows(
    flows: Mapping[TaskId, Flow], capacities: Mapping[str, float]
) -> tuple[list[TaskId], list[tuple[dict[str, float], float]]]:
    """Checked flows as (summed positive finite weights by constraint, cap or inf)."""
    rows = []
    for name, flow in flows.items():
        _check_flow(f"flow {name!r}", flow.uses, flow.rate_cap_gbps, capacities)
        weights: dict[str, float] = {}
        for constraint, weight in flow.uses:
            if weight > 0.0 and capacities[constraint] < math.inf:
                weights[constraint] = weights.get(constraint, 0.0) + weight
        rows.append((weights, math.inf if flow.rate_cap_gbps is None else flow.rate_cap_gbps))
    return list(flows), rows


def _check_flow(what: str, uses: Uses, cap: float | None, capacities: Mapping[str, float]) -> None:
    limited = cap is not None and cap < math.inf
    if cap is not None and not cap > 0.0:
        raise FlowError(f"{what}: rate cap {cap!r} GB/s; it must be positive")
    for constraint, weight in uses:
        if constraint not in capacities:
            raise FlowError(f"{what} uses constraint {constraint!r}, which has no capacity")
        if not 0.0 <= weight < math.inf:
            raise FlowError(f"{what}: weight {weight!r} on {constraint!r}; it must be finite and not negative")
        if not capacities[constraint] > 0.0:
            raise FlowError(f"{what} uses {constraint!r}, whose capacity is {capacities[constraint]!r} GB/s")
        limited = limited or (weight > 0.0 and capacities[constraint] < math.inf)
    if not limited:
        raise FlowError(f"{what}: nothing limits its rate; give it a constraint or a rate cap")


def _check(task: Task, capacities: Mapping[str, float]) -> None:
    what = f"task {task.id!r}"
    if not 0.0 <= task.seconds < math.inf:
        raise FlowError(f"{what}: seconds {task.seconds!r}; it must be finite and not negative")
    if not 0.0 <= task.nbytes < math.inf:
        raise FlowError(f"{what}: nbytes {task.nbytes!r}; it must be finite and not negative")
    if task.nbytes > 0.0:
        _check_flow(what, task.uses, task.rate_cap_gbps, capacities)


def _in_order(tasks: Sequence[Task]) -> list[Task]:
    """Tasks sorted so that deps and queue predecessors come first, else in the given order; FlowError on a cycle."""
    index: dict[TaskId, int] = {}
    for i, task in enumerate(tasks):
        if task.id in index:
            raise FlowError(f"task {task.id!r} is given twice")
        index[task.id] = i
    before: list[set[int]] = []
    after: list[list[int]] = [[] for _ in tasks]
    tails: dict[str, int] = {}
    for i, task in enumerate(tasks):
        needs = set()
        for dep in task.deps:
            if dep not in index:
                raise FlowError(f"task {task.id!r} depends on {dep!r}, which is not known")
            needs.add(index[dep])
        if task.queue is not None:
            if task.queue in tails:
                needs.add(tails[task.queue])
            tails[task.queue] = i
        before.append(needs)
        for need in needs:
            after[need].append(i)
    counts = [len(needs) for needs in before]
    ready = [i for i, count in enumerate(counts) if count == 0]
    heapq.heapify(ready)
    order = []
    while ready:
        i = heapq.heappop(ready)
        order.append(tasks[i])
        for follower in after[i]:
            counts[follower] -= 1
            if counts[follower] == 0:
                heapq.heappush(ready, follower)
    if len(order) < len(tasks):
        raise FlowError("cycle of dependencies or queue order: " + _cycle(tasks, before, counts))
    return order


def _cycle(tasks: Sequence[Task], before: Sequence[set[int]], counts: Sequence[int]) -> str:
    here = next(i for i, count in enumerate(counts) if count > 0)
    seen: dict[int, int] = {}
    trail: list[int] = []
    while here not in seen:
        seen[here] = len(trail)
        trail.append(here)
        here = min(need for need in before[here] if counts[need] > 0)
    loop = [*trail[seen[here] :], here]
    return " after ".join(repr(tasks[i].id) for i in loop)
