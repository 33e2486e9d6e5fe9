"""The node as a value: text forms, errors that name their place, and what a node says to `flow`."""

from __future__ import annotations

import dataclasses
import string

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import topology
from topology import (
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
    TopologyError,
    load_node,
    parse_node,
)
from topology.flow import max_min_rates, run

words = st.text(string.printable.strip() + " äß中", max_size=12).filter(str.isprintable)
names = st.text(string.ascii_lowercase, min_size=4, max_size=8)
sources = st.sampled_from(Source)
quantities = st.builds(Quantity, value=st.floats(1e-9, 1e12), source=sources, note=st.none() | words)
rates_st = st.builds(Rates, ab=st.none() | quantities, ba=st.none() | quantities, both=st.none() | quantities)
scalars = (
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | words
)
tables = st.dictionaries(words, scalars, max_size=3).map(lambda table: tuple(table.items()))
records = st.builds(
    Record, test=words, at=tables, value=st.none() | st.floats(-1e9, 1e9), unit=words, reason=st.none() | words
)


@st.composite
def nodes(draw):
    ids = iter(draw(st.lists(names, min_size=16, max_size=16, unique=True)))
    resources = tuple(
        Resource(
            id=next(ids),
            ab=draw(quantities),
            ba=draw(quantities),
            both=draw(st.none() | quantities),
            name=draw(st.none() | words),
        )
        for _ in range(draw(st.integers(1, 4)))
    )
    some = st.sampled_from([resource.id for resource in resources])
    devices = tuple(
        Device(
            id=i,
            name=draw(words),
            kind=draw(st.sampled_from(DeviceKind)),
            memory_bytes=draw(st.integers(1, 2**50)),
            source=draw(sources),
            numa_node=draw(st.none() | st.integers(-1, 8)),
            pci_id=draw(st.none() | st.just("0000:00:06.0")),
        )
        for i in sorted(draw(st.sets(st.integers(0, 20), max_size=3)))
    )
    hosts = tuple(
        HostMemory(
            id=next(ids),
            cores=1,
            memory_bytes=1,
            dram=draw(some),
            source=draw(sources),
            thread=draw(st.none() | rates_st),
        )
        for _ in range(draw(st.integers(1, 2)))
    )
    switches = tuple(
        Switch(id=next(ids), kind=draw(st.sampled_from(SwitchKind))) for _ in range(draw(st.integers(0, 2)))
    )
    vertices = [*(device.vertex for device in devices), *(item.id for item in (*hosts, *switches))]
    links = ()
    if len(vertices) > 1:
        pairs = draw(st.lists(st.permutations(vertices).map(lambda order: order[:2]), max_size=4))
        links = tuple(
            Link(
                id=next(ids),
                a=a,
                b=b,
                kind=draw(st.sampled_from(LinkKind)),
                resources=tuple(draw(st.lists(some, min_size=1, max_size=2))),
                copy=draw(st.none() | rates_st),
                distance=draw(st.none() | st.sampled_from(Distance)),
            )
            for a, b in pairs
        )
    return Node(
        name=draw(words),
        simulated=draw(st.booleans()),
        devices=devices,
        hosts=hosts,
        switches=switches,
        resources=resources,
        links=links,
        notes=tuple(draw(st.lists(words, max_size=2))),
        probe=draw(
            st.none() | st.builds(ProbeResult, environment=tables, records=st.lists(records, max_size=2).map(tuple))
        ),
    )


class TestText:
    @settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(nodes())
    def test_yaml_and_json_give_the_same_node_back(self, node):
        for text in (node.to_yaml(), node.to_json()):
            again = parse_node(text)
            assert again == node and again.hash == node.hash
        assert parse_node(node.to_yaml()).to_json() == node.to_json()
        assert list(node.to_tree())[0] == "schema"
        assert node.to_yaml().startswith("schema: memferry.node/1\n")

    @pytest.mark.parametrize("preset", topology.list_presets())
    def test_presets_round_trip(self, preset):
        node = load_node(preset)
        assert node.name == preset and node.description
        assert parse_node(node.to_json()) == parse_node(node.to_yaml()) == node

    def test_files(self, tmp_path):
        node = load_node("sim-2")
        for name in ("node.yaml", "node.json"):
            topology.save_node(node, tmp_path / name)
            assert load_node(tmp_path / name) == node
        assert sorted(path.name for path in tmp_path.iterdir()) == ["node.json", "node.yaml"]
        with pytest.raises(TopologyError, match="ends in .json, .yaml"):
            topology.save_node(node, tmp_path / "node.txt")
        with pytest.raises(TopologyError, match="cannot write"):
            topology.save_node(node, tmp_path / "missing" / "node.json")

    def test_the_hash_ignores_how_it_was_measured_and_nothing_else(self):
        node = load_node("sim-2")
        probe = ProbeResult(environment=(("host", "node7"),))
        assert dataclasses.replace(node, probe=probe).hash == node.hash
        assert topology.replace_memory(node, 1 << 30).hash != node.hash
        assert len(node.hash) == 64

    def test_replace_memory(self):
        node = topology.replace_memory(load_node("dgx-h200"), 24 << 30)
        assert {device.memory_bytes for device in node.devices} == {24 << 30}


class TestErrors:
    @pytest.mark.parametrize(
        ("old", "new", "text"),
        [
            ("node/1", "node/2", "1: schema: schema version 'memferry.node/2' is not known"),
            ("schema: memferry.node/1", "schema: other/1", "schema 'other/1' is not a node"),
            ("schema: memferry.node/1\n", "", "key 'schema' is missing"),
            ("hosts:", "hots:", "unknown key 'hots'; did you mean 'hosts'?"),
            ("kind: NVLINK", "kind: NVLNK", "34: links[2].kind: unknown value 'NVLNK'; did you mean 'NVLINK'?"),
            ("dram: dram0", "dram: dram7", "13: hosts[0].dram: 'dram7' is not defined; did you mean 'dram0'?"),
            ("  dram: dram0\n", "", "hosts[0]: key 'dram' is missing"),
            ("cores: 8", "cores: 8.5", "hosts[0].cores: expected a whole number, found 8.5"),
            ("cores: 8", "cores: 0", "hosts[0].cores: 0 is too small"),
            ("cores: 8", "cores: true", "expected a whole number, found True"),
            ("value: 100,", "value: -3,", "resources[3].ab.value: -3.0 must be positive"),
            ("value: 100,", "value: .inf,", "resources[3].ab.value: expected a finite number"),
            ("id: pcie1", "id: pcie0", "resources[2].id: 'pcie0' appears twice"),
            ("b: dev1\n", "b: dev0\n", "links[2].b: both ends are 'dev0'"),
            ("resources: [pcie1]", "resources: pcie1", "links[1].resources: expected a list"),
            ("cores: 8", "cores: 8\n  cores: 9", "key 'cores' appears twice"),
            ("name: sim-2", 'name: "a\\nb"', "name: text must be one printable line"),
            ("cores: 8", "cores: [", "not YAML"),
            ("cores: 8", "cores: 2001-01-01", "hosts[0].cores: value '2001-01-01'"),
        ],
    )
    def test_yaml_errors_name_file_line_and_place(self, old, new, text):
        source = (topology.load._PRESETS / "sim-2.yaml").read_text()
        assert old in source
        with pytest.raises(TopologyError) as error:
            parse_node(source.replace(old, new, 1), "my.yaml")
        assert str(error.value).startswith("my.yaml:") and text in str(error.value)

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("{", "my.json:1: not JSON"),
            ('{"schema": "memferry.node/1", "schema": "x"}', "appears twice"),
            ('{"schema": "memferry.node/1", "name": NaN}', "NaN is not a number"),
            ("[]", "a node is a mapping"),
            ("[" * 100_000, "not JSON"),
            ("1" * 5000, "my.json"),
            ('{"schema": "memferry.node/1", "name": "x", "hosts": []}', "at least one host"),
        ],
    )
    def test_json_errors(self, text, message):
        with pytest.raises(TopologyError) as error:
            parse_node(text, "my.json", json=True)
        assert message in str(error.value)

    def test_an_alias_bomb_is_refused(self):
        bomb = "a: &a [x,x,x,x,x,x,x,x,x,x]\n" + "".join(
            f"{b}: &{b} [{','.join(['*' + a] * 10)}]\n" for a, b in zip("abcdefg", "bcdefgh", strict=True)
        )
        with pytest.raises(TopologyError, match="too many values"):
            parse_node(bomb)
        with pytest.raises(TopologyError, match="contains itself"):
            parse_node("a: &a [*a]")

    def test_unknown_presets_and_files(self, tmp_path):
        with pytest.raises(TopologyError, match="no preset and no file 'sim-3'; did you mean 'sim-2'"):
            load_node("sim-3")
        with pytest.raises(TopologyError, match="nothing.yaml: cannot read"):
            load_node(tmp_path / "nothing.yaml")
        (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
        with pytest.raises(TopologyError, match="cannot read"):
            load_node(tmp_path / "bytes.yaml")

    @settings(max_examples=150, deadline=None)
    @given(st.text(max_size=200) | st.text(alphabet="{}[]:,-&*!?|>'\"%@`# \n\tab10.e", max_size=60))
    def test_any_text_is_a_node_or_a_topology_error(self, text):
        for json in (None, True, False):
            with pytest.raises(TopologyError):
                parse_node(text, "x", json=json)

    @settings(max_examples=60, deadline=None)
    @given(st.data())
    def test_a_damaged_preset_is_a_node_or_a_topology_error(self, data):
        text = (topology.load._PRESETS / "sim-2.yaml").read_text()
        at = data.draw(st.integers(0, len(text)))
        cut = data.draw(st.integers(0, 30))
        text = text[:at] + data.draw(st.text(max_size=5)) + text[at + cut :]
        try:
            assert isinstance(parse_node(text), Node)
        except TopologyError:
            pass

    def test_look_ups_name_what_exists(self):
        node = load_node("sim-2")
        with pytest.raises(TopologyError, match="has no device 7; it has 0, 1"):
            node.device(7)
        with pytest.raises(TopologyError, match="no host 'host1'; did you mean 'host0'"):
            node.host("host1")
        with pytest.raises(TopologyError, match="transfer kind 'h2h'"):
            node.transfer("h2h", 0)
        with pytest.raises(TopologyError, match="needs peer"):
            node.transfer("p2p", 0)
        with pytest.raises(TopologyError, match="takes no peer"):
            node.transfer("h2d", 0, peer=1)
        with pytest.raises(TopologyError, match="not its own peer"):
            node.transfer("p2p", 0, peer=0)
        with pytest.raises(TopologyError, match="no path dev0 to dev1 by copy"):
            load_node("rtx4090-x2").transfer("p2p", 0, peer=1)
        with pytest.raises(TopologyError, match="at least one thread"):
            node.host_work("host0", 1, 1, 0)
        with pytest.raises(TopologyError, match="bytes to read and write"):
            node.kernel_mix(0, 0, 0)
        with pytest.raises(TopologyError, match="two ends"):
            node.paths("host0", "host0")


class TestPaths:
    def test_direct_then_relays(self):
        node = load_node("h200-x2")
        direct, relay = node.paths("host0", 0)
        assert (direct.name, direct.relays, direct.rate_gbps) == ("direct", (), 55.5)
        assert (relay.name, relay.relays, relay.rate_gbps) == ("via dev1", (1,), 55.5)
        assert [hop.to for hop in relay.hops] == ["dev1", "dev0"]
        assert direct.shares_with(relay) == ("dram0:ab", "dram0:both")
        assert relay.latency_s == pytest.approx(25e-6)

    def test_the_multi_path_limit_of_two_h200(self):
        flow = load_node("h200-x2").max_flow("host0", 0)
        assert flow.total_gbps == pytest.approx(110.2, rel=0.02)  # both links together, measured
        assert [rate for _, rate in flow.rates] == [55.5, 55.5]

    def test_a_neighbour_behind_the_same_uplink_adds_nothing(self):
        node = load_node("a100-pcie")
        assert [path.name for path in node.paths("host0", 0)] == ["direct"]
        assert node.max_flow("host0", 0).total_gbps == 25.0
        assert node.distance(0, 1) is Distance.PIX and node.distance(0, 2) is Distance.SYS

    def test_every_npu_of_an_a2_server_is_a_relay(self):
        node = load_node("atlas-800t-a2")
        paths = node.paths("host6", 0)
        assert [path.name for path in paths] == ["direct", *(f"via dev{i}" for i in range(1, 8))]
        # One NUMA node's DRAM ends it, not the links.
        assert node.max_flow("host6", 0).total_gbps == pytest.approx(75.0)
        assert node.home(0).id == "host6" and node.home(7).id == "host2"

    def test_dies_share_their_processor_port(self):
        node = load_node("cloudmatrix384-node")
        flows = {i: node.paths(node.home(i).id, i)[0] for i in range(4)}
        rates = max_min_rates({i: topology.flow.Flow(uses=path.uses) for i, path in flows.items()}, node.capacities())
        assert sum(rates.values()) == pytest.approx(160.0)
        sibling, other = node.paths(0, 1)[0], node.paths(0, 2)[0]
        assert [hop.link for hop in sibling.hops] == ["dev0-dev1"] and [hop.to for hop in other.hops] == [
            "hccs",
            "dev2",
        ]

    def test_back_to_the_host_and_far_hosts(self):
        node = load_node("dgx-h200")
        assert node.paths(0, "host0")[0].rate_gbps == 55.2
        far = node.paths("host1", 0)[0]
        assert [hop.to for hop in far.hops] == ["host0", "dev0"]
        # A processor on the way is passed, its memory is not read.
        assert "dram1:ab" in dict(far.uses) and "dram0:ab" not in dict(far.uses)

    def test_a_link_nobody_can_use_by_this_method(self):
        node = load_node("sim-2")
        assert node.paths(0, 1, method=Method.PAGEABLE) == ()
        bare = dataclasses.replace(node, links=tuple(dataclasses.replace(link, kernel=None) for link in node.links))
        assert bare.paths("host0", 0, method=Method.KERNEL) == ()
        assert bare.paths("host0", 0)[0].rate_gbps == 25.0

    @pytest.mark.parametrize("preset", topology.list_presets())
    def test_max_flow_is_between_the_direct_path_and_the_sum(self, preset):
        node = load_node(preset)
        for device in node.devices:
            host = node.home(device.id).id
            paths, flow = node.paths(host, device.id), node.max_flow(host, device.id)
            assert (
                paths[0].rate_gbps * (1 - 1e-9) <= flow.total_gbps <= sum(path.rate_gbps for path in paths) * (1 + 1e-9)
            )
            assert all(rate <= path.rate_gbps * (1 + 1e-9) for path, rate in flow.rates)


class TestRoutes:
    def seconds(self, node, route, nbytes, **other):
        tasks = [route.task("t", nbytes), *(r.task(name, n) for name, (r, n) in other.items())]
        return run(tasks, node.capacities())["t"].seconds

    def test_one_copy(self):
        node = load_node("sim-2")
        assert self.seconds(node, node.transfer("h2d", 0), 25e9) == pytest.approx(1.0 + 10e-6)
        assert self.seconds(node, node.transfer("d2h", 0, method=Method.KERNEL), 22e9) == pytest.approx(1.0, rel=1e-4)
        assert self.seconds(node, node.transfer("h2d", 1, method=Method.PAGEABLE), 6e9) == pytest.approx(1.0, rel=1e-4)
        assert self.seconds(node, node.transfer("p2p", 0, peer=1), 100e9) == pytest.approx(1.0, rel=1e-4)

    def test_both_directions_share(self):
        node = load_node("sim-2")
        up, down = node.transfer("h2d", 0), node.transfer("d2h", 0)
        assert self.seconds(node, up, 20e9, other=(down, 20e9)) == pytest.approx(1.0, rel=1e-4)

    def test_host_work_competes_with_copies_for_dram(self):
        node = load_node("sim-2")
        work = node.host_work("host0", 14.0, 14.0, 8)
        assert work.rate_cap_gbps == 64.0 and dict(work.uses) == {"dram0:ab": 0.5, "dram0:ba": 0.5, "dram0:both": 1.0}
        assert self.seconds(node, work, 60e9) == pytest.approx(1.0)
        assert self.seconds(node, work, 35e9, copy=(node.transfer("h2d", 0), 100e9)) == pytest.approx(1.0, rel=1e-3)

    def test_threads_limit_host_work_and_cores_limit_threads(self):
        node = load_node("h200-x2")
        assert node.host_work("host0", 1, 1, 4).rate_cap_gbps == pytest.approx(4 * 4.8)
        assert node.host_work("host0", 1, 0, 99).rate_cap_gbps == pytest.approx(32 * 4.8)

    def test_an_adamw_kernel_on_mapped_state(self):
        node = load_node("h200-x2")
        route = node.kernel_mix(0, 12.0, 12.0)
        assert self.seconds(node, route, 24e9) == pytest.approx(0.286, rel=0.01)  # measured
        assert node.kernel_mix(0, 1.0, 0.0).rate_cap_gbps == 51.0

    def test_a_piece_after_another_has_no_latency(self):
        route = load_node("sim-2").transfer("h2d", 0)
        assert route.task("t", 1, latency=False).seconds == 0.0 and route.task("t", 1).seconds == pytest.approx(10e-6)


def test_rates_hold_a_source_each():
    for preset in topology.list_presets():
        tree = load_node(preset).to_tree()
        stack = [tree["resources"], tree["links"]]
        numbers = 0
        while stack:
            item = stack.pop()
            if isinstance(item, dict):
                if "value" in item:
                    numbers += 1
                    assert item["source"] in ("measured", "vendor", "estimate")
                else:
                    stack += item.values()
            elif isinstance(item, list):
                stack += item
            else:
                assert isinstance(item, str), f"a bare number in preset {preset}"
        assert numbers
