"""The fluid model: fairness, limits, order, and the errors that replace hanging."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from topology.flow import Flow, FlowError, Fluid, Span, Task, max_min_rates, max_total_rates, run

GB = 1e9
PCIE = {"pcie0:ab": 55.5, "pcie0:ba": 55.2, "pcie0:both": 100.0}
UP = (("pcie0:ab", 1.0), ("pcie0:both", 1.0))
DOWN = (("pcie0:ba", 1.0), ("pcie0:both", 1.0))

NAMES = ("a", "b", "c", "d")
capacity = st.floats(0.5, 200.0)
capacities_st = st.fixed_dictionaries({name: capacity for name in NAMES})
uses_st = st.lists(
    st.tuples(st.sampled_from(NAMES), st.sampled_from((0.25, 0.5, 1.0, 2.0))),
    min_size=1,
    max_size=3,
    unique_by=lambda use: use[0],
).map(tuple)
cap_st = st.none() | st.floats(0.5, 100.0)
flows_st = st.dictionaries(
    st.integers(0, 9), st.builds(lambda u, c: Flow(uses=u, rate_cap_gbps=c), uses_st, cap_st), min_size=1, max_size=6
)


def loads(flows, rates):
    total = dict.fromkeys(NAMES, 0.0)
    for name, flow in flows.items():
        for constraint, weight in flow.uses:
            total[constraint] += weight * rates[name]
    return total


def linprog(*args, **kwargs):
    return pytest.importorskip("scipy.optimize", reason="the oracle is scipy's linprog").linprog(*args, **kwargs)


def linear_program(flows, capacities):
    """(A, b) of A r <= b for the flows in order, caps included."""
    rows, limits = [], []
    for constraint in NAMES:
        rows.append([dict(flow.uses).get(constraint, 0.0) for flow in flows.values()])
        limits.append(capacities[constraint])
    for i, flow in enumerate(flows.values()):
        if flow.rate_cap_gbps is not None:
            rows.append([float(i == j) for j in range(len(flows))])
            limits.append(flow.rate_cap_gbps)
    return np.array(rows), np.array(limits)


def max_min_oracle(flows, capacities):
    """Lexicographic max-min by repeated linear programs: raise the least, fix whoever cannot go higher."""
    a, b = linear_program(flows, capacities)
    n = len(flows)
    fixed: dict[int, float] = {}
    while len(fixed) < n:
        free = [i for i in range(n) if i not in fixed]
        bounds = [(fixed[i], fixed[i]) if i in fixed else (0, None) for i in range(n)] + [(0, None)]
        rows = [list(row) + [0.0] for row in a] + [[-float(i == j) for j in range(n)] + [1.0] for i in free]
        best = linprog([0.0] * n + [-1.0], A_ub=rows, b_ub=list(b) + [0.0] * len(free), bounds=bounds)
        level = best.x[-1]
        held = [(level * (1 - 1e-9), None) if i in free else (fixed[i] * (1 - 1e-9), fixed[i]) for i in range(n)]
        stuck = [
            i
            for i in free
            if -linprog([-float(i == j) for j in range(n)], A_ub=a, b_ub=b, bounds=held).fun < level * (1 + 1e-6)
        ]
        assert stuck
        fixed.update((i, level) for i in stuck)
    return {name: fixed[i] for i, name in enumerate(flows)}


class TestMaxMinRates:
    def test_one_link_is_shared_evenly(self):
        assert max_min_rates({1: Flow(uses=UP), 2: Flow(uses=UP)}, PCIE) == {1: 27.75, 2: 27.75}

    def test_both_directions_share_the_duplex_limit(self):
        rates = max_min_rates({"h2d": Flow(uses=UP), "d2h": Flow(uses=DOWN)}, PCIE)
        assert rates == {"h2d": pytest.approx(50.0), "d2h": pytest.approx(50.0)}

    def test_a_capped_flow_leaves_the_rest_to_others(self):
        rates = max_min_rates({"slow": Flow(uses=UP, rate_cap_gbps=9.1), "fast": Flow(uses=UP)}, PCIE)
        assert rates == {"slow": pytest.approx(9.1), "fast": pytest.approx(46.4)}

    def test_infinite_capacity_does_not_limit(self):
        assert max_min_rates({1: Flow(uses=(("x", 1.0), ("y", 1.0)))}, {"x": math.inf, "y": 3.0}) == {1: 3.0}

    def test_no_flows(self):
        assert max_min_rates({}, PCIE) == {}

    @given(flows_st, capacities_st)
    def test_capacities_and_caps_hold_and_every_flow_has_a_bottleneck(self, flows, capacities):
        rates = max_min_rates(flows, capacities)
        total = loads(flows, rates)
        for constraint in NAMES:
            assert total[constraint] <= capacities[constraint] * (1 + 1e-9)
        for name, flow in flows.items():
            at_cap = flow.rate_cap_gbps is not None and rates[name] >= flow.rate_cap_gbps * (1 - 1e-9)
            assert rates[name] > 0
            # Max-min: a full constraint of the flow on which nobody is faster, or its own cap.
            assert at_cap or any(
                total[constraint] >= capacities[constraint] * (1 - 1e-9)
                and all(
                    rates[other] <= rates[name] * (1 + 1e-9)
                    for other in flows
                    if any(c == constraint for c, _ in flows[other].uses)
                )
                for constraint, _ in flow.uses
            )

    @settings(max_examples=25, deadline=None)
    @given(flows_st, capacities_st)
    def test_equals_the_linear_programming_oracle(self, flows, capacities):
        rates, expected = max_min_rates(flows, capacities), max_min_oracle(flows, capacities)
        for name in flows:
            assert rates[name] == pytest.approx(expected[name], rel=1e-5)

    @settings(max_examples=50, deadline=None)
    @given(flows_st, capacities_st)
    def test_the_largest_total_equals_scipy(self, flows, capacities):
        rates = max_total_rates(flows, capacities)
        a, b = linear_program(flows, capacities)
        assert np.all(a @ np.array([rates[name] for name in flows]) <= b * (1 + 1e-9))
        assert sum(rates.values()) == pytest.approx(-linprog([-1.0] * len(flows), A_ub=a, b_ub=b).fun, rel=1e-6)

    @given(flows_st, capacities_st)
    def test_order_does_not_matter(self, flows, capacities):
        back = dict(reversed(flows.items()))
        assert max_min_rates(back, capacities) == pytest.approx(max_min_rates(flows, capacities))

    @pytest.mark.parametrize(
        ("flow", "text"),
        [
            (Flow(uses=(("nope", 1.0),)), "'nope', which has no capacity"),
            (Flow(uses=(("dead", 1.0),)), "'dead', whose capacity is 0.0"),
            (Flow(uses=(("x", -1.0),)), "weight -1.0"),
            (Flow(uses=(("x", math.nan),)), "weight nan"),
            (Flow(uses=(("x", 1.0),), rate_cap_gbps=0.0), "rate cap 0.0"),
            (Flow(), "nothing limits its rate"),
        ],
    )
    def test_errors_name_the_flow(self, flow, text):
        with pytest.raises(FlowError, match="'odd'") as error:
            max_min_rates({"odd": flow}, {"x": 1.0, "dead": 0.0})
        assert text in str(error.value)


class TestRun:
    def test_latency_then_bytes(self):
        spans = run([Task(id="t", seconds=1e-3, nbytes=55.5e9, uses=UP)], PCIE)
        assert spans == {"t": Span(0.0, pytest.approx(1.001))}

    def test_a_queue_is_first_in_first_out_even_when_a_later_task_is_ready(self):
        spans = run(
            [
                Task(id="work", seconds=2.0),
                Task(id="first", deps=("work",), seconds=1.0, queue="q"),
                Task(id="second", seconds=1.0, queue="q"),
            ],
            {},
        )
        assert spans["first"] == Span(2.0, 3.0) and spans["second"] == Span(3.0, 4.0)

    def test_rates_change_when_a_flow_leaves(self):
        tasks = [
            Task(id="small", nbytes=1 * GB, uses=(("x", 1.0),)),
            Task(id="large", nbytes=3 * GB, uses=(("x", 1.0),)),
        ]
        spans = run(tasks, {"x": 2.0})
        assert spans["small"].end_s == pytest.approx(1.0) and spans["large"].end_s == pytest.approx(2.0)

    def test_a_relay_is_one_flow_over_all_its_links(self):
        capacities = {"up0": 55.0, "up1": 55.0, "peer": 392.0}
        tasks = [
            Task(id="direct", nbytes=55 * GB, uses=(("up0", 1.0),)),
            Task(id="relay", nbytes=55 * GB, uses=(("up1", 1.0), ("peer", 1.0))),
        ]
        assert [span.end_s for span in run(tasks, capacities).values()] == [pytest.approx(1.0)] * 2

    def test_dependencies_may_be_given_later(self):
        spans = run([Task(id=2, deps=(1,), seconds=1.0), Task(id=1, seconds=1.0)], {})
        assert list(spans) == [2, 1] and spans[2].start_s == 1.0

    @pytest.mark.parametrize(
        ("tasks", "text"),
        [
            ([Task(id="t", deps=("ghost",))], "'t' depends on 'ghost'"),
            ([Task(id="t", deps=("t",))], "'t' after 't'"),
            ([Task(id="p", deps=("q",)), Task(id="q", deps=("p",))], "'p' after 'q' after 'p'"),
            ([Task(id="p", deps=("q",), queue="s"), Task(id="q", queue="s")], "'p' after 'q' after 'p'"),
            ([Task(id="t"), Task(id="t")], "'t' is given twice"),
            ([Task(id="t", seconds=-1.0)], "seconds -1.0"),
            ([Task(id="t", seconds=math.nan)], "seconds nan"),
            ([Task(id="t", nbytes=math.inf, uses=UP)], "nbytes inf"),
            ([Task(id="t", nbytes=1.0)], "nothing limits"),
            ([Task(id="t", nbytes=1.0, uses=(("slow", 1.0),))], "'slow', which has no capacity"),
        ],
    )
    def test_errors_instead_of_hanging(self, tasks, text):
        with pytest.raises(FlowError) as error:
            run(tasks, PCIE)
        assert text in str(error.value)

    @pytest.mark.parametrize("capacity", [0.0, -1.0, math.nan])
    def test_capacities_must_be_positive(self, capacity):
        with pytest.raises(FlowError, match="constraint 'x'"):
            run([], {"x": capacity})

    def test_five_thousand_tasks(self):
        tasks = []
        for i in range(1250):
            tasks += [
                Task(id=f"c{i}", seconds=1e-3, queue="compute", deps=(f"h{i}",)),
                Task(id=f"h{i}", nbytes=5e7, uses=UP, queue="h2d", deps=(f"c{i - 3}",) if i > 2 else ()),
                Task(id=f"g{i}", nbytes=4e7, uses=DOWN, queue="d2h", deps=(f"c{i}",)),
                Task(id=f"a{i}", seconds=2e-4, queue="host", deps=(f"g{i}",)),
            ]
        spans = run(tasks, PCIE)
        assert len(spans) == 5000
        assert max(span.end_s for span in spans.values()) >= 1.25


@st.composite
def workloads(draw):
    count = draw(st.integers(1, 12))
    tasks = []
    for i in range(count):
        nbytes = draw(st.sampled_from((0.0, 1.0, 1e6, 3e9)) | st.floats(0.0, 1e10))
        tasks.append(
            Task(
                id=i,
                deps=tuple(draw(st.sets(st.integers(0, i - 1), max_size=3))) if i else (),
                seconds=draw(st.sampled_from((0.0, 1e-6, 0.5)) | st.floats(0.0, 2.0)),
                nbytes=nbytes,
                uses=draw(uses_st),
                rate_cap_gbps=draw(cap_st),
                queue=draw(st.sampled_from((None, "q0", "q1"))),
            )
        )
    return tasks


@settings(deadline=None)
@given(workloads(), capacities_st)
def test_a_run_moves_every_byte_in_order_within_capacity(tasks, capacities):
    moved = dict.fromkeys((task.id for task in tasks), 0.0)
    by_id = {task.id: task for task in tasks}
    flows = {task.id: Flow(uses=task.uses, rate_cap_gbps=task.rate_cap_gbps) for task in tasks}

    def observe(start, end, rates):
        assert end > start
        total = loads({i: flows[i] for i in rates}, rates)
        assert all(total[name] <= capacities[name] * (1 + 1e-9) for name in NAMES)
        # Work conserving: every flow under way is limited by something that is full.
        for i, rate in rates.items():
            cap = flows[i].rate_cap_gbps
            assert (cap is not None and rate >= cap * (1 - 1e-9)) or any(
                total[name] >= capacities[name] * (1 - 1e-9) for name, _ in flows[i].uses
            )
            moved[i] += rate * GB * (end - start)

    spans = run(tasks, capacities, observe=observe)
    assert spans == run(tasks, capacities)
    ends: dict[str, float] = {}
    for task in tasks:
        span = spans[task.id]
        ready = max((spans[dep].end_s for dep in task.deps), default=0.0)
        if task.queue is not None:
            ready = max(ready, ends.get(task.queue, 0.0))
            ends[task.queue] = span.end_s
        assert span.start_s == ready  # starts at once, never early
        assert span.seconds >= task.seconds * (1 - 1e-9) - 1e-12
        # A byte or two may be lost to rounding of the clock at these rates.
        assert moved[task.id] == pytest.approx(by_id[task.id].nbytes, rel=1e-6, abs=200 * GB * 1e-14 * (1 + span.end_s))


class TestFluid:
    def test_tasks_may_come_while_time_passes(self):
        fluid = Fluid(PCIE)
        fluid.submit(Task(id="x", nbytes=111e9, uses=UP))
        assert fluid.run(until_s=1.0) == 1.0
        fluid.submit(Task(id="y", nbytes=27.75e9, uses=UP))
        assert fluid.run("y") == pytest.approx(2.0)
        assert fluid.run() == pytest.approx(2.5)
        assert fluid.spans["x"] == Span(0.0, pytest.approx(2.5))

    def test_a_task_may_be_held_until_the_host_has_enqueued_it(self):
        fluid = Fluid({})
        fluid.submit(Task(id=0, seconds=1.0), at_s=4.0)
        fluid.submit(Task(id=1, seconds=1.0, deps=(0,)), at_s=2.0)
        fluid.run()
        assert fluid.spans == {0: Span(4.0, 5.0), 1: Span(5.0, 6.0)}

    def test_deps_on_finished_tasks_are_met(self):
        fluid = Fluid({})
        fluid.submit(Task(id=0, seconds=1.0, queue="q"))
        fluid.run(0)
        fluid.submit(Task(id=1, seconds=1.0, deps=(0,), queue="q"))
        fluid.run()
        assert fluid.spans[1] == Span(1.0, 2.0)

    def test_waiting_for_an_unknown_task_is_an_error(self):
        with pytest.raises(FlowError, match="'ghost' is not known"):
            Fluid({}).run("ghost")

    def test_forgotten_spans_are_gone_and_unknown_deps_are_errors(self):
        fluid = Fluid({})
        fluid.submit(Task(id=0))
        fluid.run()
        fluid.forget([0])
        assert fluid.spans == {}
        with pytest.raises(FlowError, match="1 depends on 0"):
            fluid.submit(Task(id=1, deps=(0,)))

    @settings(deadline=None)
    @given(workloads(), capacities_st, st.lists(st.floats(0.0, 5.0), max_size=4))
    def test_pausing_changes_nothing(self, tasks, capacities, stops):
        fluid = Fluid(capacities)
        for task in tasks:
            fluid.submit(task)
        for stop in sorted(stops):
            fluid.run(until_s=stop)
        fluid.run()
        for task_id, span in run(tasks, capacities).items():
            assert fluid.spans[task_id].end_s == pytest.approx(span.end_s, rel=1e-9, abs=1e-9)
