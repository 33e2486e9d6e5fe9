"""From this machine's tools and kernel files to a Node: ask everyone, believe little, say what is missing.

Owns running the tools and reading kernel files; `assemble` makes the node. Must not import torch or memferry_npu.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from . import texts
from .assemble import assemble
from .codec import TopologyError
from .model import DeviceKind, HostMemory, Node, Quantity, Rates, Source
from .texts import DeviceFacts, Facts, Topo

Runner = Callable[[list[str]], str]
T = TypeVar("T")


def discover(*, visible: Sequence[str] | None = None, run: Runner | None = None, root: Path = Path("/")) -> Node:
    """The node of this machine. What cannot be found out is left out and named in `notes`.

    Never fails for a missing tool: without accelerators the node has host memory only. `run` and `root` replace the
    tools and the file system in tests. `visible` = PCI ids of the devices that the process sees, in its order
    (CUDA_VISIBLE_DEVICES hides and reorders); None = as the tools list them.
    """
    run = run or run_tool
    notes: list[str] = []
    topo: Topo | None = None
    facts: Facts | None = None
    kind = DeviceKind.CUDA
    if gpu := _ask(run, ["nvidia-smi", "topo", "-m"], texts.parse_nvidia_topo, notes):
        topo, facts = gpu, _ask(run, ["nvidia-smi", "-q"], texts.parse_nvidia_query, notes)
    else:
        facts = _ask(run, ["nvidia-smi", "-q"], texts.parse_nvidia_query, notes)
    if topo is None and facts is None:
        topo = _ask(run, ["npu-smi", "info", "-t", "topo"], texts.parse_npu_topo, notes)
        facts = _ask(run, ["npu-smi", "info", "-m"], texts.parse_npu_map, notes)
        if facts is None:
            facts = _ask(run, ["npu-smi", "info", "-l"], texts.parse_npu_list, notes)
        kind = DeviceKind.NPU
    if visible is not None and facts is not None:
        topo, facts = _only(visible, topo, facts, notes)
    if facts is not None and kind is DeviceKind.CUDA:
        facts = replace(facts, devices=tuple(_with_sysfs(device, root, notes) for device in facts.devices))
    hosts = read_hosts(root, notes)
    numa = {device.id: node for device in (facts.devices if facts else ()) if (node := _numa(device, root)) is not None}
    return assemble(kind, topo, facts, hosts=hosts, numa=numa, notes=notes)


def _only(visible: Sequence[str], topo: Topo | None, facts: Facts, notes: list[str]) -> tuple[Topo | None, Facts]:
    """Facts and table of the visible devices, renumbered in their order."""
    by_pci = {device.pci_id: device for device in facts.devices}
    if any(pci not in by_pci for pci in visible):
        notes.append("the process sees devices that the tools do not list; devices are as the tools list them")
        return topo, facts
    new = {by_pci[pci].id: i for i, pci in enumerate(visible)}
    devices = tuple(replace(by_pci[pci], id=i) for i, pci in enumerate(visible))
    if topo is not None:
        pairs = [
            replace(c, a=min(new[c.a], new[c.b]), b=max(new[c.a], new[c.b]))
            for c in topo.cells
            if c.a in new and c.b in new
        ]
        topo = replace(
            topo,
            ids=tuple(range(len(visible))),
            cells=tuple(sorted(pairs, key=lambda cell: (cell.a, cell.b))),
            cpus=tuple((new[i], cpus) for i, cpus in topo.cpus if i in new),
            numa=tuple((new[i], node) for i, node in topo.numa if i in new),
        )
    return topo, replace(facts, devices=devices)


def run_tool(command: list[str]) -> str:
    """Standard output of a tool. TopologyError if it is missing, fails, or takes more than 30 s."""
    try:
        done = subprocess.run(command, capture_output=True, timeout=30, check=False)
    except FileNotFoundError:
        raise TopologyError(f"{command[0]} is not installed") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise TopologyError(f"{' '.join(command)}: {type(error).__name__}") from None
    if done.returncode != 0:
        raise TopologyError(f"{' '.join(command)} ended with status {done.returncode}")
    return done.stdout.decode("utf-8", "replace")


def read_hosts(root: Path = Path("/"), notes: list[str] | None = None) -> tuple[HostMemory, ...]:
    """Host memory by NUMA node from sysfs, or one domain from /proc where sysfs does not say."""
    notes = notes if notes is not None else []
    hosts = []
    base = root / "sys/devices/system/node"
    try:
        numbers = sorted(int(path.name[4:]) for path in base.glob("node*") if path.name[4:].isdecimal())
    except OSError:
        numbers = []
    for number in numbers:
        try:
            cpus = (base / f"node{number}/cpulist").read_text().strip()
            cores = len(texts.parse_cpu_list(cpus))
            memory = texts.parse_node_meminfo((base / f"node{number}/meminfo").read_text())
        except (OSError, ValueError) as error:
            # Memory without processors (a device's own memory, for example) has an empty list.
            notes.append(f"NUMA node {number} is left out: {_reason(error)}")
            continue
        hosts.append(_host(number, cores, memory, cpus))
    if not hosts:
        try:
            memory = texts.parse_node_meminfo((root / "proc/meminfo").read_text())
        except (OSError, ValueError):
            memory = 1 << 30
            notes.append("size of host memory is not known: 1 GiB assumed")
        notes.append("no NUMA information: one host memory assumed")
        hosts.append(_host(0, os.cpu_count() or 1, memory, None))
    return tuple(hosts)


def _ask(run: Runner, command: list[str], parse: Callable[[str], T], notes: list[str]) -> T | None:
    try:
        return parse(run(command))
    except TopologyError as error:
        notes.append(str(error))
        return None


def _reason(error: Exception) -> str:
    return error.strerror or type(error).__name__ if isinstance(error, OSError) else str(error)


def _host(number: int, cores: int, memory: int, cpus: str | None) -> HostMemory:
    thread = Quantity(value=5.0, source=Source.ESTIMATE)
    return HostMemory(
        id=f"host{number}",
        numa_node=number,
        cores=cores,
        memory_bytes=memory,
        dram=f"dram{number}",
        source=Source.MEASURED,
        cpus=cpus,
        thread=Rates(ab=thread, ba=thread, both=thread),
    )


def _pci_file(device: DeviceFacts, root: Path, name: str) -> str:
    return (root / "sys/bus/pci/devices" / (device.pci_id or "-") / name).read_text()


def _with_sysfs(device: DeviceFacts, root: Path, notes: list[str]) -> DeviceFacts:
    """PCIe generation and width of the running link where sysfs knows them (a link at rest may run slower: max)."""
    for name, parse in (("max_link_speed", texts.parse_link_speed), ("current_link_width", texts.parse_link_width)):
        try:
            found = parse(_pci_file(device, root, name))
        except (OSError, ValueError):
            continue
        said = device.pcie_gen if parse is texts.parse_link_speed else device.pcie_width
        if said is not None and said != found:
            notes.append(f"device {device.id}: {name} is {found} by sysfs and {said} by nvidia-smi; the smaller counts")
            found = min(said, found)
        if parse is texts.parse_link_speed:
            device = replace(device, pcie_gen=found)
        else:
            device = replace(device, pcie_width=found)
    return device


def _numa(device: DeviceFacts, root: Path) -> int | None:
    try:
        return texts.parse_numa_node(_pci_file(device, root, "numa_node"))
    except (OSError, ValueError):
        return None
