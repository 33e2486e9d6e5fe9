"""Parsers of tool output and kernel files: text in, frozen facts out; what is not understood becomes a message.

Owns the forms of `nvidia-smi`, `npu-smi`, ACL topology flags and sysfs. Pure: runs no tool, reads no file. No input
makes a parser raise anything but TopologyError, and that only where nothing in it is usable.
Must import nothing but the standard library and this package's `model` and `codec`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from .codec import TopologyError
from .model import Distance, LinkKind

_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_MAX_ID = 4096
_MAX_LINES = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """How two devices are joined, as a tool says it."""

    a: int
    b: int
    kind: LinkKind | None = None
    """A link made for devices; None = only `distance` is known."""
    lanes: int | None = None
    """Number of links (NV18 = 18)."""
    distance: Distance | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Topo:
    """A topology matrix. `cells` holds each pair once, a < b."""

    ids: tuple[int, ...]
    physical: bool = False
    """Ids are the vendor's physical ids (A3: Phy-ID), which may have holes."""
    cells: tuple[Cell, ...] = ()
    cpus: tuple[tuple[int, str], ...] = ()
    """CPU list by device."""
    numa: tuple[tuple[int, int], ...] = ()
    """NUMA node by device."""
    messages: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFacts:
    """What a tool says about one device; None = not said."""

    id: int
    physical_id: int | None = None
    name: str | None = None
    pci_id: str | None = None
    memory_bytes: int | None = None
    pcie_gen: int | None = None
    pcie_width: int | None = None
    architecture: str | None = None
    mig: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    devices: tuple[DeviceFacts, ...]
    messages: tuple[str, ...] = ()


def parse_nvidia_topo(text: str) -> Topo:
    """`nvidia-smi topo -m`. NICs are left out. TopologyError if there is no GPU in the table."""
    return _matrix(text, re.compile(r"GPU(\d{1,4})"), "nvidia-smi topo -m")


def parse_npu_topo(text: str) -> Topo:
    """`npu-smi info -t topo`: NPU0.. with HCCS cells (A2) or Phy-ID0.. with SIO and HCCS_SW cells (A3)."""
    return _matrix(text, re.compile(r"(?:NPU|Phy-ID)(\d{1,4})"), "npu-smi info -t topo")


def parse_acl_topo(flags: Mapping[tuple[int, int], int]) -> Topo:
    """`aclrtGetDevicesTopo` flags by device pair, as the Ascend backend reads them."""
    words = {0x1: "HCCS", 0x2: "PIX", 0x8: "PHB", 0x10: "SYS", 0x20: "SIO", 0x40: "HCCS_SW"}
    found: dict[tuple[int, int], Cell] = {}
    messages = []
    for (a, b), flag in flags.items():
        if a == b:
            continue
        if flag not in words:
            messages.append(f"ACL topology flag {flag!r} between devices {a} and {b} is not known; ignored")
            continue
        low, high = min(a, b), max(a, b)
        found[low, high] = replace(_cell(words[flag]), a=low, b=high)
    ids = sorted({i for pair in flags for i in pair})
    if not ids:
        raise TopologyError("ACL gave no device pairs")
    return Topo(ids=tuple(ids), cells=tuple(found[pair] for pair in sorted(found)), messages=tuple(messages))


def parse_nvidia_query(text: str) -> Facts:
    """`nvidia-smi -q`: name, PCI id, memory, PCIe generation and width, MIG, of each GPU in order."""
    messages: list[str] = []
    devices: list[DeviceFacts] = []
    path: list[tuple[int, str]] = []
    for line in _lines(text):
        stripped = line.strip()
        indent = len(line) - len(line.lstrip())
        match = re.fullmatch(r"GPU ([0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-9A-Fa-f])", stripped)
        if match:
            devices.append(DeviceFacts(id=len(devices), pci_id=normal_pci(match[1])))
            path = []
            continue
        if not devices or not stripped:
            continue
        while path and path[-1][0] >= indent:
            path.pop()
        key, colon, value = (part.strip() for part in stripped.partition(" : "))
        if not colon:
            path.append((indent, stripped.rstrip(":")))
            continue
        trail = tuple(word for _, word in path)
        devices[-1] = _query_line(devices[-1], trail, key, value, messages)
    if not devices:
        raise TopologyError("nvidia-smi -q: no line `GPU <PCI id>`; is a driver loaded?")
    for device in devices:
        if device.memory_bytes is None:
            messages.append(f"nvidia-smi -q: no memory size for GPU {device.id}")
    return Facts(devices=tuple(devices), messages=tuple(messages))


def parse_npu_list(text: str) -> Facts:
    """`npu-smi info -l`: the NPUs with their ids and names."""
    messages: list[str] = []
    devices: list[DeviceFacts] = []
    total = None
    for line in _lines(text):
        key, colon, value = (part.strip() for part in line.partition(":"))
        if not colon:
            continue
        if key == "Total Count":
            total = _number(value)
        elif key == "NPU ID":
            number = _number(value)
            if number is None:
                messages.append(f"npu-smi info -l: NPU ID {_clip(value)} is not a number; ignored")
            else:
                devices.append(DeviceFacts(id=len(devices), physical_id=number))
        elif key in ("Product Name", "Chip Name") and devices and _word(value):
            devices[-1] = replace(devices[-1], name=_word(value))
    if not devices:
        raise TopologyError("npu-smi info -l: no `NPU ID` in the output")
    if total is not None and total != len(devices):
        messages.append(f"npu-smi info -l: counts {total} NPUs and lists {len(devices)}")
    return Facts(devices=tuple(devices), messages=tuple(messages))


def parse_npu_map(text: str) -> Facts:
    """`npu-smi info -m`: rows NPU id, chip id, logic id, chip name; controllers (logic id `-`) are left out.

    The device id is the logic id. An A3 package has two rows.
    """
    messages: list[str] = []
    devices: dict[int, DeviceFacts] = {}
    for line in _lines(text):
        match = re.match(r"\s*(\d{1,4})\s+(\d{1,4})\s+(\d{1,4}|-)\s+(\S.*)$", line)
        if match is None:
            if re.match(r"\s*\d", line):
                messages.append(f"npu-smi info -m: row {_clip(line.strip())} is not understood; ignored")
            continue
        # A3 puts a physical chip id between logic id and name.
        rest = re.fullmatch(r"(\d{1,4})\s+(\S.*)", match[4])
        name = rest[2] if rest else match[4]
        if match[3] == "-" or name.strip().lower() == "mcu":
            continue
        number = int(match[3])
        if number in devices:
            messages.append(f"npu-smi info -m: logic id {number} appears twice; the first counts")
            continue
        physical = int(rest[1]) if rest else int(match[1])
        devices[number] = DeviceFacts(id=number, physical_id=physical, name=_word(name), architecture=_soc(name))
    if not devices:
        raise TopologyError("npu-smi info -m: no row with a chip logic id")
    return Facts(devices=tuple(devices[i] for i in sorted(devices)), messages=tuple(messages))


def parse_cpu_list(text: str) -> tuple[int, ...]:
    """A kernel CPU list such as `0-23,96-119`. TopologyError if it is not one."""
    cpus: set[int] = set()
    for part in text.strip().split(","):
        match = re.fullmatch(r"\s*(\d{1,6})(?:-(\d{1,6}))?\s*", part)
        if match is None:
            raise TopologyError(f"CPU list {_clip(text.strip())}: {_clip(part)} is not a range")
        first = int(match[1])
        last = int(match[2]) if match[2] else first
        if last < first:
            raise TopologyError(f"CPU list {_clip(text.strip())}: {_clip(part)} runs backwards")
        cpus.update(range(first, last + 1))
    return tuple(sorted(cpus))


def parse_node_meminfo(text: str) -> int:
    """Bytes of memory from a node's `meminfo` or from /proc/meminfo."""
    match = re.search(r"MemTotal:\s+(\d{1,15}) kB", text)
    if match is None or int(match[1]) == 0:
        raise TopologyError("meminfo: no line `MemTotal: N kB`")
    return int(match[1]) * 1024


def parse_link_speed(text: str) -> int:
    """PCIe generation from sysfs `current_link_speed` or `max_link_speed`, for example `32.0 GT/s PCIe`."""
    speeds = {"2.5": 1, "5": 2, "8": 3, "16": 4, "32": 5, "64": 6}
    match = re.match(r"\s*(\d{1,3}(?:\.\d)?)\s*GT/s", text)
    gen = speeds.get(match[1].removesuffix(".0")) if match else None
    if gen is None:
        raise TopologyError(f"link speed {_clip(text.strip())} is not known")
    return gen


def parse_link_width(text: str) -> int:
    """Lanes from sysfs `current_link_width`. TopologyError for 0 or 255 (a link that is down) and for other texts."""
    width = _number(text)
    if width not in (1, 2, 4, 8, 12, 16, 32):
        raise TopologyError(f"link width {_clip(text.strip())} is not known")
    return width


def parse_numa_node(text: str) -> int | None:
    """NUMA node from sysfs `numa_node`; None for -1 (the firmware does not say)."""
    match = re.fullmatch(r"\s*(-1|\d{1,4})\s*", text)
    if match is None:
        raise TopologyError(f"numa_node {_clip(text.strip())} is not a number")
    return None if match[1] == "-1" else int(match[1])


def normal_pci(text: str) -> str:
    """`00000000:00:06.0` and `0000:00:06.0` as sysfs writes it: four digits of domain, lower case."""
    match = re.fullmatch(r"([0-9A-Fa-f]{4,8}):([0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-9A-Fa-f])", text.strip())
    if match is None:
        raise TopologyError(f"PCI id {_clip(text)} is not of the form 0000:00:06.0")
    return f"{int(match[1], 16):04x}:{match[2].lower()}"


def _matrix(text: str, pattern: re.Pattern[str], tool: str) -> Topo:
    columns: list[int | None] = []
    physical = False
    rows: dict[int, list[str]] = {}
    trails: dict[int, list[str]] = {}
    messages: list[str] = []
    for raw in _lines(text):
        line = _ANSI.sub("", raw)
        words = line.split()
        if not words:
            continue
        if not columns:
            names = words[: words.index("CPU")] if "CPU" in words else words
            matches = [pattern.fullmatch(name) for name in names] or [None]
            if matches[0] and "X" not in names:
                columns = [int(match[1]) if match else None for match in matches]
                physical = names[0].startswith("Phy")
            continue
        if words[0].rstrip(":") == "Legend":
            break
        match = pattern.fullmatch(words[0])
        if match is None:
            continue
        row = int(match[1])
        if row in rows:
            messages.append(f"{tool}: row {words[0]} appears twice; the first counts")
            continue
        rows[row] = words[1 : 1 + len(columns)]
        if "\t" in line:
            trails[row] = [part.strip() for part in line.strip("\n").split("\t")[1 + len(columns) :]]
        else:
            trails[row] = words[1 + len(columns) :]
    ids = [column for column in columns if column is not None]
    if not ids:
        raise TopologyError(f"{tool}: no header row with devices")
    if len(set(ids)) < len(ids):
        raise TopologyError(f"{tool}: a device appears twice in the header row")
    cells = _cells(columns, rows, tool, messages)
    for i in ids:
        if i not in rows:
            messages.append(f"{tool}: no row for device {i} (truncated output?)")
    cpus, numa = [], []
    for i in ids:
        affinity, node = _affinity(trails.get(i, []))
        if affinity is not None:
            cpus.append((i, affinity))
        if node is not None:
            numa.append((i, node))
    return Topo(
        ids=tuple(sorted(ids)),
        physical=physical,
        cells=cells,
        cpus=tuple(cpus),
        numa=tuple(numa),
        messages=tuple(dict.fromkeys(messages)),
    )


def _cells(
    columns: list[int | None], rows: Mapping[int, list[str]], tool: str, messages: list[str]
) -> tuple[Cell, ...]:
    known = {column for column in columns if column is not None}
    found: dict[tuple[int, int], Cell] = {}
    for row, words in rows.items():
        if row not in known:
            messages.append(f"{tool}: device {row} has a row but no column; ignored")
            continue
        if len(words) < len(columns):
            messages.append(f"{tool}: the row of device {row} has {len(words)} of {len(columns)} cells")
        for column, word in zip(columns, words, strict=False):
            if column is None or column == row or word == "X":
                continue
            pair = (min(row, column), max(row, column))
            try:
                cell = replace(_cell(word), a=pair[0], b=pair[1])
            except TopologyError as error:
                messages.append(f"{tool}: devices {row} and {column}: {error.message}; ignored")
                continue
            if found.setdefault(pair, cell) != cell:
                messages.append(f"{tool}: the two cells of devices {pair[0]} and {pair[1]} differ; the first counts")
    return tuple(found[pair] for pair in sorted(found))


def _cell(word: str) -> Cell:
    lanes = re.fullmatch(r"NV(\d{1,3})", word)
    if lanes and int(lanes[1]) > 0:
        return Cell(a=0, b=0, kind=LinkKind.NVLINK, lanes=int(lanes[1]))
    if word in ("HCCS", "HCCS_SW", "SIO", "UB"):
        return Cell(a=0, b=0, kind=LinkKind(word))
    if word in Distance.__members__:
        return Cell(a=0, b=0, distance=Distance(word))
    raise TopologyError(f"cell {_clip(word)} is not known")


def _affinity(words: list[str]) -> tuple[str | None, int | None]:
    """CPU list and NUMA node after the cells of a row; either may be missing or `N/A`."""
    cpus, numa = None, None
    if words and words[0]:
        try:
            parse_cpu_list(words[0])
            cpus = words[0]
        except TopologyError:
            pass
    if len(words) > 1:
        numa = _number(words[1])
    return cpus, numa


def _query_line(device: DeviceFacts, trail: tuple[str, ...], key: str, value: str, messages: list[str]) -> DeviceFacts:
    number = _number(value.split(" ")[0].rstrip("x"))
    if not trail and key == "Product Name":
        return replace(device, name=_word(value))
    if trail[-1:] == ("FB Memory Usage",) and key == "Total" and number and value.endswith("MiB"):
        return replace(device, memory_bytes=number << 20)
    if trail[-1:] == ("PCIe Generation",) and key == "Max" and number in range(1, 8):
        return replace(device, pcie_gen=number)
    if trail[-1:] == ("Link Width",) and key == "Max" and number in (1, 2, 4, 8, 16, 32):
        return replace(device, pcie_width=number)
    if trail[-1:] == ("MIG Mode",) and key == "Current" and value == "Enabled":
        messages.append(f"GPU {device.id} is in MIG mode; memory and links are those of the whole GPU")
        return replace(device, mig=True)
    return device


def _soc(name: str) -> str | None:
    match = re.search(r"910_?[A-Z0-9]{1,5}", name.replace(" ", ""))
    return f"Ascend{match[0]}" if match else None


def _number(text: str) -> int | None:
    match = re.fullmatch(r"\s*(\d{1,9})\s*", text, re.ASCII)
    return int(match[1]) if match else None


def _word(text: str) -> str | None:
    """One printable line of at most 80 characters, or None."""
    clean = "".join(c for c in text.strip() if c.isprintable())[:80]
    return clean if clean and clean != "N/A" else None


def _clip(text: str) -> str:
    shown = ascii(text)
    return shown if len(shown) <= 40 else shown[:37] + "..."


def _lines(text: str) -> Iterable[str]:
    return text.split("\n")[:_MAX_LINES]
