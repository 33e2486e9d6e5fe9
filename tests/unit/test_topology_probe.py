"""The probe: it measures back what it simulates, prints well, and keeps its promises on the command line."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import os
import random
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest
import torch

import topology
from topology import Device, Method, Quantity, Rates, Source, TopologyError, load_node
from topology.probe import SimMeter, cli, cuda, diff, main, measure, render, system
from topology.probe.suite import MIB, Job

GOLDEN = Path(__file__).parent / "golden"
PRESETS = topology.list_presets()


def scaled(value, factor):
    """A node with every rate and latency wrong by a factor."""
    if isinstance(value, Quantity):
        return dataclasses.replace(value, value=value.value * factor)
    if isinstance(value, tuple):
        return tuple(scaled(item, factor) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, Device):
        changes = {field.name: scaled(getattr(value, field.name), factor) for field in dataclasses.fields(value)}
        return dataclasses.replace(value, **changes)
    return value


def numbers(node):
    """Every rate of a node by place, latencies too."""
    found = {}
    for resource in node.resources:
        for way in ("ab", "ba", "both"):
            found[f"{resource.id}:{way}"] = getattr(resource, way)
    for link in node.links:
        for method in ("copy", "kernel", "pageable"):
            for way in ("ab", "ba", "both"):
                found[f"{link.id} {method} {way}"] = getattr(getattr(link, method) or Rates(), way)
        found[f"{link.id} latency"] = link.latency_us
    for host in node.hosts:
        for way in ("ab", "ba", "both"):
            found[f"{host.id} thread {way}"] = getattr(host.thread or Rates(), way)
    return {place: quantity for place, quantity in found.items() if quantity is not None}


@pytest.fixture(scope="module")
def measured():
    """Each preset measured by a probe that starts with numbers wrong by two."""
    return {
        name: measure(scaled(load_node(name), 0.5), SimMeter(load_node(name)), sizes=(MIB, 1024 * MIB))
        for name in PRESETS
    }


class TestMeasuresBack:
    UNSEEN = {
        # Limits that no traffic of the node can reach, so that no measurement can show them.
        "a100-pcie": ("xgmi:", "pcie"),
        "atlas-800t-a2": ("die",),
        "cloudmatrix384-8npu": ("ubcpu0:both", "ubcpu1:both"),
        "cloudmatrix384-node": ("ubcpu0:both", "ubcpu1:both", "ubcpu2:both", "ubcpu3:both"),
        "gh200": ("c2c:",),
        "h200-x1": ("dram0:ab",),
    }

    @pytest.mark.parametrize("preset", PRESETS)
    def test_every_number_of_the_preset_within_two_percent(self, preset, measured):
        want, got = numbers(load_node(preset)), numbers(measured[preset])
        assert want.keys() == got.keys()
        shown = {
            place for place, quantity in got.items() if quantity.source is Source.SIMULATED and quantity.note is None
        }
        for place in shown:
            assert got[place].value == pytest.approx(want[place].value, rel=0.02), place
        for place in want.keys() - shown:
            assert place.startswith(self.UNSEEN.get(preset, ())), f"{place} was not measured"

    @pytest.mark.parametrize("factor", [0.5, 2.0])
    @pytest.mark.parametrize("preset", PRESETS)
    def test_what_was_measured_predicts_every_measurement(self, preset, factor):
        truth = load_node(preset)
        first = measure(scaled(truth, factor), SimMeter(truth), sizes=(64 * MIB,), quick=True)
        truth_records = measure(truth, SimMeter(truth), sizes=(64 * MIB,), quick=True).probe.records
        again = measure(
            truth, SimMeter(dataclasses.replace(first, probe=None)), sizes=(64 * MIB,), quick=True
        ).probe.records
        for record, other in zip(truth_records, again, strict=True):
            assert (record.test, record.at) == (other.test, other.at)
            if record.value is not None:
                assert other.value == pytest.approx(record.value, rel=0.02), record

    @pytest.mark.parametrize("seed", range(3))
    @pytest.mark.parametrize("preset", ["a100-pcie", "atlas-800t-a2", "cloudmatrix384-8npu", "dgx-h200", "h200-x2"])
    def test_noise_of_one_percent_does_not_mislead(self, preset, seed):
        draw = random.Random(seed)

        class Noisy(SimMeter):
            def rates(self, jobs):
                return [rate * draw.uniform(0.99, 1.01) for rate in super().rates(jobs)]

        node = load_node(preset)
        want, got = numbers(node), numbers(measure(node, Noisy(node), sizes=(MIB,), quick=True))
        for place, quantity in got.items():
            if quantity.source is Source.SIMULATED:
                assert quantity.value == pytest.approx(want[place].value, rel=0.03), place

    def test_cells_are_what_the_figures_say(self, measured):
        cells = {(r.test, r.at): r.value for r in measured["h200-x2"].probe.records}

        def cell(test, **at):
            return cells[test, tuple(at.items())]

        assert cell("h2d", device=0, method="copy", mode="alone") == pytest.approx(55.5, rel=0.02)
        assert cell("h2d", device="sum", method="copy", mode="together") == pytest.approx(110.2, rel=0.02)
        assert cell("both", device=1, method="copy", mode="alone") == pytest.approx(100.0, rel=0.02)
        assert cell("p2p", src=1, dst=0, method="copy", mode="alone") == pytest.approx(392.0, rel=0.02)
        assert cell("h2d", device=0, method="kernel", mode="alone") == pytest.approx(51.0, rel=0.02)
        assert cell("latency", what="h2d", device=0) == pytest.approx(15.0, rel=0.02)
        loads = [(r.at, r.value) for r in measured["h200-x2"].probe.records if r.test == "load"]
        assert max(value for _, value in loads) == pytest.approx(110.2, rel=0.02)
        assert dict(loads[0][0])["paths"] == "direct 100%" and loads[0][1] == pytest.approx(30.8, rel=0.02)

    def test_shared_roots_show(self, measured):
        limits = {
            dict(r.at)["constraint"]: (r.value, dict(r.at)["devices"])
            for r in measured["a100-pcie"].probe.records
            if r.test == "limit"
        }
        assert limits["uplink0:ab"][0] == pytest.approx(25.0, rel=0.02)
        ports = {
            dict(r.at)["constraint"]: dict(r.at)["devices"]
            for r in measured["cloudmatrix384-node"].probe.records
            if r.test == "limit"
        }
        assert ports["ubcpu1:ab"] == "dev4 dev5 dev6 dev7"


class TestText:
    @pytest.mark.parametrize("preset", ["h200-x2", "atlas-800t-a2", "cloudmatrix384-node"])
    def test_golden(self, preset):
        """Tables at 2, 8 and 16 devices. MEMFERRY_UPDATE_GOLDEN=1 writes them anew."""
        node = load_node(preset)
        text = render(measure(node, SimMeter(node)))
        path = GOLDEN / f"probe-{preset}.txt"
        if os.environ.get("MEMFERRY_UPDATE_GOLDEN"):
            path.write_text(text)
        assert text == path.read_text()

    def test_every_line_is_prose_data_or_empty(self, measured):
        for node in measured.values():
            for line in render(node).splitlines():
                assert line == line.rstrip() and line.isprintable()
            assert "SIMULATED" in render(node)

    def test_an_unmeasured_node_says_so(self):
        assert render(load_node("sim-2")) == "# sim-2: not measured\n"


class TestJson:
    def test_it_is_a_node_with_numbers_as_numbers(self, tmp_path, capsys):
        path = tmp_path / "node.json"
        assert main(["--backend", "sim", "--node", "h200-x2", "--quick", "--json", str(path)]) == 0
        node = load_node(path)
        assert node.simulated and node.transfer("h2d", 0).rate_cap_gbps == pytest.approx(55.5, rel=0.02)
        assert node.max_flow("host0", 0).total_gbps == pytest.approx(111.0, rel=0.02)
        tree = json.loads(path.read_text())
        assert list(tree)[0] == "schema" and isinstance(tree["probe"]["records"][0]["value"], float)
        assert {"version", "python", "host", "time", "backend"} <= set(tree["probe"]["environment"])
        out = capsys.readouterr().out
        assert f"# Saved {path}\n# Result OK (simulated)\n" in out
        # The text is made from the JSON alone.
        assert out.startswith(render(node))

    def test_yaml_too(self, tmp_path):
        assert main(["--backend", "sim", "--quick", "--json", str(tmp_path / "node.yaml")]) == 0
        assert load_node(tmp_path / "node.yaml").probe is not None


class TestCommand:
    def test_list_presets_has_one_name_first_on_each_line(self, capsys):
        assert main(["--list-presets"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert [line.split()[0] for line in lines] == list(PRESETS)

    @pytest.mark.parametrize(
        ("argv", "text"),
        [
            (["--backend", "npu"], "measuring Ascend devices is not built yet"),
            (["--backend", "sim", "--node", "h200x2"], "did you mean 'h200-x2'"),
            (["--backend", "sim", "--sizes", "1M,huge"], "size 'huge'"),
            (["--backend", "sim", "--sizes", "1"], "between 4K and 64G"),
            (["--backend", "sim", "--json", "/nonexistent/x.json"], "folder does not exist"),
            (["--backend", "sim", "--json", "x.txt"], "ends in .json"),
            (["--diff", "sim-2", "nothing"], "no preset and no file 'nothing'"),
            (["--diff", "sim-2", "sim-2", "--noise", "200"], "percentage"),
            (["--backend", "tpu"], "invalid choice"),
        ],
    )
    def test_mistakes_are_said_with_status_2(self, argv, text, capsys):
        assert main(argv) == 2
        captured = capsys.readouterr()
        assert text in captured.err and not captured.out

    def test_help(self, capsys):
        assert main(["--help"]) == 0
        assert "--list-presets" in capsys.readouterr().out

    def test_sizes(self):
        assert cli.parse_sizes("16M, 1M,1GiB,4096") == (4096, MIB, 16 * MIB, 1024 * MIB)

    def test_without_cuda_auto_simulates(self, monkeypatch, capsys):
        monkeypatch.setattr(cuda, "unavailable", lambda: "no device")
        assert main(["--quick"]) == 0 and "SIMULATED from sim-2" in capsys.readouterr().out
        assert main(["--backend", "cuda"]) == 2 and "no device" in capsys.readouterr().err

    def test_other_ranks_stay_silent(self, monkeypatch, capsys):
        monkeypatch.setenv("RANK", "1")
        assert main(["--backend", "sim"]) == 0
        assert capsys.readouterr() == ("", "")

    def test_interruption_leaves_nothing_half_written(self, tmp_path, monkeypatch, capsys):
        path = tmp_path / "node.json"
        path.write_text("before")

        def stop(*args):
            raise KeyboardInterrupt

        monkeypatch.setattr(SimMeter, "latency_s", stop)
        assert main(["--backend", "sim", "--quick", "--json", str(path)]) == 130
        assert "interrupted: nothing saved" in capsys.readouterr().err
        monkeypatch.undo()
        monkeypatch.setattr(os, "replace", stop)
        assert main(["--backend", "sim", "--quick", "--json", str(path)]) == 130
        assert [item.name for item in tmp_path.iterdir()] == ["node.json"] and path.read_text() == "before"

    def test_progress_only_on_a_terminal(self, monkeypatch, capsys):
        assert main(["--backend", "sim", "--quick"]) == 0
        assert capsys.readouterr().err == ""
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
        assert main(["--backend", "sim", "--quick"]) == 0
        assert "# measuring h2d 0 copy alone" in capsys.readouterr().err

    def test_the_script_runs_from_a_checkout_without_torch(self, tmp_path):
        script = Path(topology.__file__).parents[1] / "scripts" / "probe_topology.py"
        (tmp_path / "torch.py").write_text("raise ImportError('no torch here')\n")
        done = subprocess.run(
            [sys.executable, str(script), "--backend", "sim", "--node", "gh200", "--quick"],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(tmp_path)},
        )
        assert done.returncode == 0 and done.stdout.endswith("# Result OK (simulated)\n"), done.stderr


class TestDiff:
    def save(self, node, path):
        topology.save_node(node, path)
        return str(path)

    def test_nothing_changed(self, tmp_path, measured, capsys):
        path = self.save(measured["h200-x2"], tmp_path / "a.json")
        assert main(["--diff", path, path]) == 0
        assert capsys.readouterr().out == "# no change beyond 5 %\n"

    def test_a_degraded_link_is_named(self, tmp_path, capsys):
        good = load_node("dgx-h200")
        slow = Quantity(value=27.0, source=Source.MEASURED)
        resources = tuple(dataclasses.replace(r, ab=slow) if r.id == "pcie3" else r for r in good.resources)
        bad = dataclasses.replace(good, resources=resources)
        a = self.save(measure(good, SimMeter(good), quick=True), tmp_path / "a.json")
        b = self.save(measure(good, SimMeter(bad), quick=True), tmp_path / "b.json")
        assert main(["--diff", a, b]) == 1
        out = capsys.readouterr().out
        assert "h2d device 3 method copy mode alone  55.5 -> 27.0  (-51%)" in out
        assert "device 2 " not in out
        assert main(["--diff", a, b, "--noise", "60"]) == 0

    def test_a_lost_device_and_a_lost_path(self, measured):
        before = measured["h200-x2"]
        after = dataclasses.replace(before, devices=before.devices[:1], links=before.links[:1])
        names = [str(change) for change in diff(before, after)]
        assert names[0] == "device 1 NVIDIA H200  gone" and "link NVLINK dev0 - dev1  gone" in names
        assert [str(change) for change in diff(after, before)][0] == "device 1 NVIDIA H200  new"

    def test_numbers_of_nodes_without_records(self, measured):
        before = dataclasses.replace(measured["h200-x2"], probe=None)
        assert diff(before, before) == []
        assert any("resource pcie0 ab" in change.what for change in diff(before, scaled(before, 0.8)))
        # Estimates are nobody's measurement.
        assert diff(load_node("sim-2"), scaled(load_node("sim-2"), 0.5)) == []


class FakeCuda(types.SimpleNamespace):
    """Streams and events of a CUDA that copies at once on the processor."""

    class Event:
        def __init__(self, enable_timing=False):
            self.at = 0.0

        def record(self, stream):
            self.at = time.perf_counter()

        def query(self):
            return True

        def elapsed_time(self, other):
            return max(1e-6, (other.at - self.at) * 1e3)

    class Stream:
        cuda_stream = 0

        def __init__(self, device=0):
            pass

        def synchronize(self):
            pass

        def wait_event(self, event):
            pass

        def record_event(self):
            return FakeCuda.Event()


def fake_torch(devices=2):
    def on_host(name):
        def make(*args, device=None, pin_memory=False, **kwargs):
            return getattr(torch, name)(*args, **kwargs)

        return make

    found = types.SimpleNamespace(name="Fake", total_memory=1 << 30, major=9, minor=0)
    return types.SimpleNamespace(
        ones=on_host("ones"),
        zeros=lambda *args, **kwargs: types.SimpleNamespace(to=lambda device: None),
        arange=on_host("arange"),
        empty_like=torch.empty_like,
        equal=torch.equal,
        uint8=torch.uint8,
        int32=torch.int32,
        get_num_threads=torch.get_num_threads,
        set_num_threads=lambda count: None,
        __version__="2.11.0",
        version=types.SimpleNamespace(cuda="13.0"),
        cuda=FakeCuda(
            device_count=lambda: devices,
            get_device_properties=lambda i: found,
            device=lambda i: contextlib.nullcontext(),
            stream=lambda stream: contextlib.nullcontext(),
            synchronize=lambda i: None,
            can_device_access_peer=lambda a, b: a != b,
            _sleep=lambda cycles: None,
        ),
    )


@pytest.fixture
def fake(monkeypatch):
    """A CUDA meter of two fake devices with small buffers."""
    base = load_node("sim-2")
    base = dataclasses.replace(base, hosts=(dataclasses.replace(base.hosts[0], memory_bytes=64 * MIB, cores=2),))
    monkeypatch.setattr(cuda, "runtime_memcpy", lambda: None)
    meter = cuda.CudaMeter(base, fake_torch(), quick=True)
    meter._bytes, meter._copies = MIB, 2
    return base, meter


class TestCudaMeter:
    """The Python of the CUDA meter on a fake; the numbers need hardware."""

    def test_a_whole_run(self, fake, monkeypatch, capsys):
        monkeypatch.setattr(cuda, "unavailable", lambda: None)
        monkeypatch.setattr(cuda, "open_meter", lambda base, quick, kernel: fake)
        assert main(["--quick", "--sizes", "1M,8M"]) == 0
        out = capsys.readouterr().out
        assert "torch 2.11.0  cuda 13.0" in out and "SIMULATED" not in out and out.endswith("# Result OK\n")
        assert "kernel read   n/a (needs cuda_ops)" in out
        assert "# Waived: h2d by kernel (needs cuda_ops)" in out

    def test_a_full_run_marks_numbers_measured(self, fake):
        base, meter = fake
        node = measure(base, meter, sizes=(MIB,))
        assert not node.simulated and node.links[0].copy.ab.source is Source.MEASURED
        assert node.links[0].kernel.ab.source is Source.ESTIMATE

    def test_a_copy_kernel_fills_the_rows_of_direct_host_access(self, fake):
        base, meter = fake
        meter._kernel = lambda device, dst, src, nbytes, stream: ctypes.memmove(dst, src, nbytes)
        node = measure(base, meter, sizes=(MIB,), quick=True)
        assert node.links[0].kernel.ab.source is node.links[0].kernel.both.source is Source.MEASURED
        assert meter.failures() == ()
        meter._checked.clear()
        meter._kernel = lambda device, dst, src, nbytes, stream: ctypes.memmove(dst, src, nbytes - 1)
        meter.rates([Job(kind="mix", device=1, method=Method.KERNEL, write=1.0)])
        assert meter.failures() == ("mix of device 1: data differ",)

    def test_wrong_data_fails_the_probe(self, fake, monkeypatch, capsys):
        base, meter = fake
        good = meter._copy

        def copy(dst, src, nbytes, stream, dst_at=0, src_at=0):
            good(dst, src, nbytes, stream, dst_at, src_at)
            dst[dst_at + nbytes - 1] += 1

        monkeypatch.setattr(meter, "_copy", copy)
        monkeypatch.setattr(cuda, "unavailable", lambda: None)
        monkeypatch.setattr(cuda, "open_meter", lambda base, quick, kernel: (fake[0], meter))
        assert main(["--quick", "--sizes", "1M"]) == 1
        out = capsys.readouterr().out
        assert "# FAILED: h2d of device 0: data differ" in out and "# FAILED: load of 1048576 bytes" in out
        assert out.endswith("# Result FAILED\n")

    def test_relays_move_every_byte(self, fake):
        base, meter = fake
        for nbytes in (4096, MIB + 4096, 40 * MIB + 12288):
            paths = base.paths("host0", 0)
            meter.load_gbps(0, nbytes, [(paths[0], 0.45), (paths[1], 0.55)])
        assert meter.failures() == ()

    def test_the_node_is_completed_by_what_torch_knows(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "torch", fake_torch())
        node, _ = cuda.open_meter(load_node("rtx4090-x2"), quick=True)
        assert node.devices[0].name == "Fake" and node.devices[0].architecture == "sm_90"
        assert node.paths(0, 1) and any("have peer access; over what is not known" in note for note in node.notes)
        with pytest.raises(TopologyError, match="has 1 devices and torch sees 2"):
            cuda.open_meter(load_node("gh200"), quick=True)
        monkeypatch.setattr(cuda, "discover", lambda visible: load_node("gh200"))
        node, _ = cuda.open_meter(None, quick=True)
        assert len(node.devices) == 2 and any("links are not known" in note for note in node.notes)

    def test_memory_is_touched_near_its_processors(self):
        mine = os.sched_getaffinity(0)
        host = dataclasses.replace(load_node("sim-2").hosts[0], cpus=str(min(mine)))
        with system.bound(host):
            assert os.sched_getaffinity(0) == {min(mine)}
        assert os.sched_getaffinity(0) == mine
        with system.bound(dataclasses.replace(host, cpus="99999")):
            assert os.sched_getaffinity(0) == mine

    def test_no_peer_access(self, fake):
        base, meter = fake
        meter._torch.cuda.can_device_access_peer = lambda a, b: False
        assert meter.why_not(Job(kind="p2p", device=0, peer=1)) == "no peer access"
