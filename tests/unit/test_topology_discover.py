"""Discovery: each text form, damaged texts, and the node that comes out."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from topology import Distance, LinkKind, Node, Source, TopologyError, parse_node, texts
from topology.assemble import assemble
from topology.discover import discover, read_hosts, run_tool
from topology.model import DeviceKind

FIXTURES = Path(__file__).parent / "fixtures" / "topology"
PARSERS = {
    "nvidia-topo": texts.parse_nvidia_topo,
    "nvidia-query": texts.parse_nvidia_query,
    "npu-topo": texts.parse_npu_topo,
    "npu-list": texts.parse_npu_list,
    "npu-map": texts.parse_npu_map,
}


def fixture(name):
    return (FIXTURES / f"{name}.txt").read_text()


def cells(topo):
    return {(cell.a, cell.b): cell for cell in topo.cells}


def host_files(root, nodes):
    for number, (cpus, kib) in nodes.items():
        folder = root / "sys/devices/system/node" / f"node{number}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{cpus}\n")
        (folder / "meminfo").write_text(f"Node {number} MemTotal:       {kib} kB\nNode {number} MemFree: 1 kB\n")


def pci_files(root, pci_id, **files):
    folder = root / "sys/bus/pci/devices" / pci_id
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name).write_text(f"{text}\n")


def tools(**outputs):
    """A runner that knows some commands: `nvidia_topo=`, `nvidia_query=`, `npu_topo=`, `npu_map=`, `npu_list=`."""
    commands = {
        "nvidia-smi topo -m": "nvidia_topo",
        "nvidia-smi -q": "nvidia_query",
        "npu-smi info -t topo": "npu_topo",
        "npu-smi info -m": "npu_map",
        "npu-smi info -l": "npu_list",
    }

    def run(command):
        name = commands[" ".join(command)]
        if name not in outputs:
            raise TopologyError(f"{command[0]} is not installed")
        return outputs[name]

    return run


class TestNvidia:
    def test_two_gpus_with_tabs_and_underline(self):
        topo = texts.parse_nvidia_topo(fixture("nvidia-topo-2"))
        assert topo.ids == (0, 1) and topo.messages == ()
        assert cells(topo)[0, 1] == texts.Cell(a=0, b=1, kind=LinkKind.NVLINK, lanes=18)
        assert topo.cpus == ((0, "0-31"), (1, "0-31")) and topo.numa == ((0, 0), (1, 0))

    def test_eight_gpus_with_nics(self):
        topo = texts.parse_nvidia_topo(fixture("nvidia-topo-8"))
        assert topo.ids == tuple(range(8)) and len(topo.cells) == 28 and topo.messages == ()
        assert dict(topo.numa)[7] == 1 and dict(topo.cpus)[0] == "0-55,112-167"

    def test_spaces_instead_of_tabs(self):
        topo = texts.parse_nvidia_topo(fixture("nvidia-topo-pix"))
        assert cells(topo)[0, 1].distance is Distance.PIX and cells(topo)[2, 3].distance is Distance.PXB
        assert cells(topo)[0, 2].distance is Distance.SYS and dict(topo.numa) == {0: 0, 1: 0, 2: 1, 3: 1}

    def test_query(self):
        facts = texts.parse_nvidia_query(fixture("nvidia-query-2"))
        first, second = facts.devices
        assert first == texts.DeviceFacts(
            id=0, name="NVIDIA H200", pci_id="0000:00:06.0", memory_bytes=143771 << 20, pcie_gen=5, pcie_width=16
        )
        assert second.pci_id == "0000:00:07.0" and facts.messages == ()

    def test_mig_is_said(self):
        facts = texts.parse_nvidia_query(fixture("nvidia-query-mig"))
        assert facts.devices[0].mig and "GPU 0 is in MIG mode" in facts.messages[0]

    def test_unknown_cells_and_truncated_tables_give_a_smaller_topo(self):
        text = fixture("nvidia-topo-8").replace("GPU1\tNV18", "GPU1\tWARP", 1)
        lines = text.splitlines()
        topo = texts.parse_nvidia_topo("\n".join(lines[:5])[:-60])
        assert any("cell 'WARP' is not known" in message for message in topo.messages)
        assert any("no row for device 7 (truncated output?)" in message for message in topo.messages)
        assert any("of 10 cells" in message for message in topo.messages)
        assert cells(topo)[0, 1].lanes == 18  # the other half of the table says it

    def test_contradictions_are_said(self):
        text = fixture("nvidia-topo-2").replace("GPU1\tNV18", "GPU1\tSYS")
        assert "differ; the first counts" in texts.parse_nvidia_topo(text).messages[0]

    def test_nothing_usable_is_an_error(self):
        for text in ("", "No devices were found", "GPU0\t X \tNV18\n"):
            with pytest.raises(TopologyError, match="no header row"):
                texts.parse_nvidia_topo(text)
        with pytest.raises(TopologyError, match="is a driver loaded"):
            texts.parse_nvidia_query("NVIDIA-SMI has failed")


class TestAscend:
    def test_a2(self):
        topo = texts.parse_npu_topo(fixture("npu-topo-a2"))
        assert topo.ids == tuple(range(8)) and not topo.physical and topo.messages == ()
        assert {cell.kind for cell in topo.cells} == {LinkKind.HCCS} and len(topo.cells) == 28
        assert dict(topo.cpus)[4] == "0-23"

    def test_a3_with_holes_and_without_affinity(self):
        topo = texts.parse_npu_topo(fixture("npu-topo-a3-holes"))
        assert topo.ids == (2, 3, 12, 13) and topo.physical and topo.cpus == ()
        assert cells(topo)[2, 3].kind is LinkKind.SIO and cells(topo)[3, 12].kind is LinkKind.HCCS_SW

    def test_a3_node(self):
        topo = texts.parse_npu_topo(fixture("npu-topo-a3-16"))
        assert len(topo.cells) == 120 and sum(cell.kind is LinkKind.SIO for cell in topo.cells) == 8

    def test_lists(self):
        assert [device.physical_id for device in texts.parse_npu_list(fixture("npu-list")).devices] == [0, 3]
        a2 = texts.parse_npu_map(fixture("npu-map-a2")).devices
        assert len(a2) == 8 and a2[3].architecture == "Ascend910B4" and a2[3].physical_id == 3
        a3 = texts.parse_npu_map(fixture("npu-map-a3")).devices
        assert [(device.id, device.physical_id) for device in a3] == [(0, 2), (1, 3), (2, 12), (3, 13)]
        assert a3[0].architecture == "Ascend910_9391"

    def test_acl_flags(self):
        topo = texts.parse_acl_topo({(0, 1): 0x20, (1, 0): 0x20, (0, 2): 0x40, (1, 2): 0x4})
        assert cells(topo)[0, 1].kind is LinkKind.SIO and cells(topo)[0, 2].kind is LinkKind.HCCS_SW
        assert "flag 4 between devices 1 and 2" in topo.messages[0]
        with pytest.raises(TopologyError):
            texts.parse_acl_topo({})


class TestKernelFiles:
    def test_values(self):
        assert texts.parse_cpu_list("0-2,8\n") == (0, 1, 2, 8)
        assert texts.parse_link_speed("32.0 GT/s PCIe\n") == 5 and texts.parse_link_speed("2.5 GT/s") == 1
        assert texts.parse_link_width("16\n") == 16
        assert texts.parse_numa_node("-1\n") is None and texts.parse_numa_node("3") == 3
        assert texts.parse_node_meminfo("Node 0 MemTotal:  1024 kB") == 1 << 20
        assert texts.normal_pci("00000000:3B:00.0") == "0000:3b:00.0"

    @pytest.mark.parametrize(
        ("parse", "text"),
        [
            (texts.parse_cpu_list, ""),
            (texts.parse_cpu_list, "3-1"),
            (texts.parse_cpu_list, "a"),
            (texts.parse_link_speed, "Unknown"),
            (texts.parse_link_speed, "7.0 GT/s"),
            (texts.parse_link_width, "0"),
            (texts.parse_link_width, "255"),
            (texts.parse_numa_node, "one"),
            (texts.parse_node_meminfo, "MemFree: 3 kB"),
            (texts.normal_pci, "6.0"),
        ],
    )
    def test_errors(self, parse, text):
        with pytest.raises(TopologyError):
            parse(text)


class TestFuzz:
    ALL = [*PARSERS.values(), texts.parse_cpu_list, texts.parse_link_speed, texts.parse_link_width]
    ALL += [texts.parse_numa_node, texts.parse_node_meminfo, texts.normal_pci, parse_node]

    @settings(max_examples=150, deadline=None)
    @given(st.text(max_size=300))
    def test_any_text(self, text):
        for parse in self.ALL:
            try:
                parse(text)
            except TopologyError:
                pass

    @settings(max_examples=150, deadline=None)
    @given(
        st.lists(
            st.sampled_from(
                "GPU0 GPU1 NPU0 Phy-ID0 Phy-ID3 X NV18 NV0 HCCS SIO PIX CPU Affinity 0-3 \t \n \x1b[4m".split(" ")
                + [" ", "\n"]
            ),
            max_size=40,
        )
    )
    def test_words_of_tables(self, words):
        for text in ("".join(words), " ".join(words)):
            for parse in PARSERS.values():
                try:
                    parse(text)
                except TopologyError:
                    pass

    @settings(max_examples=200, deadline=None)
    @given(st.data())
    def test_damaged_fixtures_give_a_node_or_a_topology_error(self, data):
        path = data.draw(st.sampled_from(sorted(FIXTURES.glob("*.txt"))))
        text = path.read_text()
        for _ in range(data.draw(st.integers(1, 4))):
            at, cut = data.draw(st.integers(0, len(text))), data.draw(st.integers(0, 80))
            text = (
                text[:at]
                + data.draw(st.text(max_size=4) | st.sampled_from(("NV99999", "Phy-ID7", "\t", "0-9")))
                + text[at + cut :]
            )
        parse = next(parse for name, parse in PARSERS.items() if path.name.startswith(name))
        kind = DeviceKind.CUDA if path.name.startswith("nvidia") else DeviceKind.NPU
        hosts = read_hosts(Path("/nonexistent"))
        try:
            found = parse(text)
            topo, facts = (found, None) if isinstance(found, texts.Topo) else (None, found)
            node = assemble(kind, topo, facts, hosts=hosts)
        except TopologyError:
            return
        assert parse_node(node.to_json()) == node
        for device in node.devices:
            assert node.transfer("h2d", device.id).uses


class TestDiscover:
    def test_two_h200(self, tmp_path):
        host_files(tmp_path, {0: ("0-31", 256 << 20)})
        for bus in ("06", "07"):
            pci_files(
                tmp_path, f"0000:00:{bus}.0", numa_node="-1", max_link_speed="32.0 GT/s PCIe", current_link_width="16"
            )
        run = tools(nvidia_topo=fixture("nvidia-topo-2"), nvidia_query=fixture("nvidia-query-2"))
        node = discover(run=run, root=tmp_path)
        assert [device.pci_id for device in node.devices] == ["0000:00:06.0", "0000:00:07.0"]
        assert node.hosts[0].cores == 32 and node.hosts[0].memory_bytes == 256 << 30
        assert node.switches == () and node.notes == ()
        assert [path.name for path in node.paths("host0", 0)] == ["direct", "via dev1"]
        assert node.links[0].detail == "gen5 x16" and node.links[-1].kind is LinkKind.NVLINK
        assert node.resources[-1].ab.value == 450.0 and node.resources[-1].ab.source is Source.VENDOR

    def test_eight_gpus_reach_each_other_through_a_switch(self, tmp_path):
        host_files(tmp_path, {0: ("0-55,112-167", 1 << 30), 1: ("56-111,168-223", 1 << 30)})
        node = discover(run=tools(nvidia_topo=fixture("nvidia-topo-8")), root=tmp_path)
        assert [switch.id for switch in node.switches] == ["nvswitch"]
        assert len(node.paths("host0", 0)) == 8 and node.distance(0, 7) is Distance.SYS
        assert node.home(0).id == "host0" and node.home(7).id == "host1"
        assert any("nvidia-smi is not installed" in note for note in node.notes)
        assert any("memory size is not known" in note for note in node.notes)

    def test_a_pcie_switch_is_shared(self, tmp_path):
        host_files(tmp_path, {0: ("0-63", 1 << 30), 1: ("64-127", 1 << 30)})
        node = discover(run=tools(nvidia_topo=fixture("nvidia-topo-pix")), root=tmp_path)
        assert [switch.id for switch in node.switches] == ["pciesw0", "pciesw2"]
        assert node.distance(0, 1) is Distance.PIX
        assert node.transfer("p2p", 0, peer=1).rate_cap_gbps and node.max_flow("host0", 0).total_gbps == 25.0

    def test_a2_server(self, tmp_path):
        cpus = ["0-23", "24-47", "48-71", "72-95", "96-119", "120-143", "144-167", "168-191"]
        host_files(tmp_path, {i: (text, 128 << 20) for i, text in enumerate(cpus)})
        run = tools(npu_topo=fixture("npu-topo-a2"), npu_map=fixture("npu-map-a2"))
        node = discover(run=run, root=tmp_path)
        assert [device.numa_node for device in node.devices] == [6, 6, 4, 4, 0, 0, 2, 2]
        assert {device.memory_bytes for device in node.devices} == {32 << 30}  # 910B4
        assert len(node.paths("host6", 0)) == 8 and node.links[-1].kind is LinkKind.HCCS

    def test_a3_container(self, tmp_path):
        host_files(tmp_path, {0: ("0-39", 1 << 28), 1: ("40-79", 1 << 28)})
        run = tools(npu_topo=fixture("npu-topo-a3-holes"), npu_map=fixture("npu-map-a3"))
        node = discover(run=run, root=tmp_path)
        assert [(device.id, device.physical_id) for device in node.devices] == [(0, 2), (1, 3), (2, 12), (3, 13)]
        assert [hop.link for hop in node.paths(0, 1)[0].hops] == ["link-sio-0-1"]
        assert [hop.to for hop in node.paths(0, 2)[0].hops] == ["hccs_sw", "dev2"]
        assert [device.numa_node for device in node.devices] == [0, 0, 1, 1]
        assert any("NUMA affinity is not known" in note for note in node.notes)
        assert node.transfer("h2d", 0).rate_cap_gbps == 100.0 and node.transfer("d2h", 0).rate_cap_gbps == 54.0

    def test_the_slower_of_two_statements_about_a_link_counts(self, tmp_path):
        pci_files(tmp_path, "0000:00:06.0", max_link_speed="32.0 GT/s PCIe", current_link_width="8", numa_node="7")
        run = tools(nvidia_topo=fixture("nvidia-topo-2"), nvidia_query=fixture("nvidia-query-2"))
        node = discover(run=run, root=tmp_path)
        assert node.links[0].detail == "gen5 x8" and node.transfer("h2d", 0).rate_cap_gbps == 27.5
        assert any("current_link_width is 8 by sysfs and 16" in note for note in node.notes)
        assert any("NUMA node 7 is not one of the host's" in note for note in node.notes)

    def test_the_process_sees_some_devices_in_its_own_order(self, tmp_path):
        host_files(tmp_path, {0: ("0-31", 256 << 20)})
        run = tools(nvidia_topo=fixture("nvidia-topo-2"), nvidia_query=fixture("nvidia-query-2"))
        one = discover(run=run, root=tmp_path, visible=["0000:00:07.0"])
        assert [(device.id, device.pci_id) for device in one.devices] == [(0, "0000:00:07.0")]
        assert [link.kind for link in one.links] == [LinkKind.PCIE]
        both = discover(run=run, root=tmp_path, visible=["0000:00:07.0", "0000:00:06.0"])
        assert both.devices[0].pci_id == "0000:00:07.0" and both.paths(0, 1)
        other = discover(run=run, root=tmp_path, visible=["0000:99:00.0"])
        assert len(other.devices) == 2 and any("do not list" in note for note in other.notes)

    def test_no_tools_and_no_files_give_a_host(self, tmp_path):
        node = discover(run=tools(), root=tmp_path)
        assert isinstance(node, Node) and node.devices == () and len(node.hosts) == 1
        assert "no accelerator found: the node has host memory only" in node.notes

    def test_tools_that_print_rubbish(self, tmp_path):
        node = discover(run=lambda command: "\x00\ufffdsegmentation fault\n", root=tmp_path)
        assert node.devices == () and len(node.notes) > 3

    def test_this_machine(self):
        assert parse_node(discover().to_yaml()).hosts

    def test_tool_errors_are_topology_errors(self):
        with pytest.raises(TopologyError, match="no-such-tool is not installed"):
            run_tool(["no-such-tool"])
        with pytest.raises(TopologyError, match="ended with status 1"):
            run_tool(["false"])
