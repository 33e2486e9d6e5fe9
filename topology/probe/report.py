"""The text of a probe, made from a node with its probe block and nothing else.

Owns the layout: `#` for prose, plain columns for data, the unit in the caption, `-` for self, `n/a (reason)` for what
cannot be measured. Must not import torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ..codec import Scalar
from ..model import Device, Node, Record

MIB = 1 << 20
Cells = Mapping[tuple[str, Scalar], Record]


def render(node: Node) -> str:
    """The tables of a measured node; ends with a newline. Footer lines are the caller's."""
    if node.probe is None:
        return f"# {node.name}: not measured\n"
    report = _Report(node)
    for section in (
        report.head,
        lambda: report.host_links("h2d", "Host -> device", "kernel read"),
        lambda: report.host_links("d2h", "Device -> host", "kernel write"),
        report.both_ways,
        report.far,
        lambda: report.peers("copy", "Device -> device"),
        lambda: report.peers("kernel", "Device -> device by a kernel"),
        report.fans,
        report.host_memory,
        report.loads,
        report.latency,
        report.limits,
    ):
        section()
    return "\n".join(report.lines) + "\n"


def table(rows: Sequence[tuple[str, Sequence[str]]], columns: Sequence[str]) -> list[str]:
    """Plain columns, right-aligned, at least 8 wide; cells beyond the columns follow the row."""
    first = max([9, *(len(label) for label, _ in rows)]) + 1
    data = [cell for _, cells in rows if len(cells) > 1 for cell in cells[: len(columns)]]
    width = max([7, *map(len, data), *map(len, columns)]) + 1
    lines = [" " * first + "".join(f"{column:>{width}}" for column in columns)]
    for label, cells in rows:
        if len(cells) == 1 and cells[0].startswith("n/a ("):
            lines.append(f"{label:<{first}}  {cells[0]}")
            continue
        text = "".join(f"{cell:>{width}}" for cell in cells[: len(columns)]) + "  ".join(["", *cells[len(columns) :]])
        lines.append(f"{label:<{first}}{text}".rstrip())
    return lines


class _Report:
    def __init__(self, node: Node) -> None:
        assert node.probe is not None
        self.node = node
        self.records = node.probe.records
        self.environment = dict(node.probe.environment)
        self.lines: list[str] = []
        self.ids = [device.id for device in node.devices]
        self.names = [device.vertex for device in node.devices]

    # --- sections -------------------------------------------------------------------------------------------------

    def head(self) -> None:
        parts = [f"# memferry probe {self.environment.get('version', '')}".rstrip()]
        parts += [
            f"{key} {self.environment[key]}" for key in ("torch", "cuda", "host", "time") if self.environment.get(key)
        ]
        self.lines.append("  ".join(parts))
        if self.node.simulated:
            self.lines.append(
                f"# SIMULATED from {self.environment.get('simulated_node', '?')}: no hardware was measured"
            )
        self.lines += [self._device(device) for device in self.node.devices]
        for host in self.node.hosts:
            memory = f"{host.memory_bytes / (1 << 30):.0f} GiB"
            self.lines.append(f"# {host.id}  numa {_or(host.numa_node)}  {host.cores} cores  {memory}")
        if self.environment.get("method"):
            self.lines.append(f"# GB/s, 1 GB = 1e9 bytes; {self.environment['method']}")

    def host_links(self, test: str, caption: str, kernel: str) -> None:
        rows: list[tuple[str, list[Record | None], str]] = []
        labels = (("alone", "copy", "alone"), ("two copies", "copy", "two copies"))
        for label, method, mode in (*labels, (kernel, "kernel", "alone"), ("pageable", "pageable", "alone")):
            rows.append((label, [self._get(test, device=i, method=method, mode=mode) for i in self.ids], ""))
        rows[1:1] = self._groups(test)
        self._section(f"# {caption}, GB/s", rows)

    def both_ways(self) -> None:
        rows = [("alone", [self._get("both", device=i, method="copy", mode="alone") for i in self.ids], "")]
        rows += self._groups("both")
        rows.append(("kernel", [self._get("both", device=i, method="kernel", mode="alone") for i in self.ids], ""))
        self._section("# Both directions at once, GB/s: sum of the two", rows)

    def far(self) -> None:
        if not self._all("far"):
            return
        for kind, caption in (("h2d", "Host -> device"), ("d2h", "Device -> host")):
            rows = []
            for host in self.node.hosts:
                cells = [
                    (
                        "-"
                        if self.node.home(i).id == host.id
                        else _show(self._get("far", host=host.id, device=i, kind=kind))
                    )
                    for i in self.ids
                ]
                rows.append((host.id, cells))
            self._table(f"# {caption} by NUMA node of the memory, GB/s; - is the device's own", rows, self.names)

    def peers(self, method: str, caption: str) -> None:
        found = [r for r in self._all("p2p") if dict(r.at).get("mode") == "alone" and dict(r.at)["method"] == method]
        if not found:
            return
        self.lines += ["", f"# {caption}, GB/s: row sends to column"]
        reasons = {record.reason for record in found}
        if all(record.value is None for record in found):
            self.lines.append(f"n/a ({', '.join(sorted(reason or '' for reason in reasons))})")
            return
        cells = {(dict(r.at)["src"], dict(r.at)["dst"]): _show(r, short=True) for r in found}
        rows = [(f"dev{a}", ["-" if a == b else cells.get((a, b), "") for b in self.ids]) for a in self.ids]
        self.lines += table(rows, self.names)
        for reason in sorted(reason for reason in reasons if reason):
            self.lines.append(f"# n/a: {reason}")

    def fans(self) -> None:
        rows = []
        for label in ("to all", "from all"):
            cells = [self._get("p2p", device=i, method="copy", mode=label) for i in self.ids]
            if any(cell is not None for cell in cells):
                rows.append((label, cells, ""))
        if rows:
            self._section("# Device with all others at once, GB/s: sum", rows)

    def host_memory(self) -> None:
        found = self._all("dram")
        if not found:
            return
        labels: dict[str, dict[Scalar, str]] = {}
        for record in found:
            at = dict(record.at)
            label = f"{at['what']} x{at['threads']}" + (f" with {at['with']}" if "with" in at else "")
            labels.setdefault(label, {})[at["host"]] = _show(record)
        hosts = [host.id for host in self.node.hosts]
        rows = [(label, [cells.get(host, "") for host in hosts]) for label, cells in labels.items()]
        caption = "# Host memory by threads, GB/s (copy: read + write; with: while all its devices copy)"
        self._table(caption, rows, hosts)

    def loads(self) -> None:
        found = [record for record in self._all("load") if record.value is not None]
        if not found:
            return
        columns = list(dict.fromkeys(_added(record) for record in found))
        cells: dict[int, dict[str, float]] = {}
        for record in found:
            cells.setdefault(int(dict(record.at)["bytes"] or 0), {})[_added(record)] = record.value or 0.0
        best = max(found, key=lambda record: record.value or 0.0)
        direct = max((row["direct"] for row in cells.values() if "direct" in row), default=0.0)
        gain = f" = {best.value / direct:.2f}x" if best.value and direct else ""
        caption = f"# Host -> dev{dict(best.at)['dst']} through peers, GB/s by load size, columns add paths"
        rows = [
            (_size(nbytes), [f"{row[column]:.1f}" if column in row else "" for column in columns])
            for nbytes, row in sorted(cells.items())
        ]
        self._table(caption, rows, columns)
        self.lines.append(f"# best {best.value:.1f}{gain} ({dict(best.at)['paths']})")
        if len(columns) > 1:
            worth = [n for n, row in sorted(cells.items()) if max(row.values()) >= 1.05 * row.get("direct", 0.0)]
            text = f"from {_size(worth[0])} on" if worth else "at no size measured"
            self.lines.append(f"# break-even: more than one path is 5 % faster {text}")

    def latency(self) -> None:
        found = self._all("latency")
        if not found:
            return
        rows: list[tuple[str, list[Record | None], str]] = []
        for what, label in (("h2d", "to device"), ("d2h", "to host")):
            rows.append((label, [self._get("latency", what=what, device=i) for i in self.ids], ""))
        self._section("# Latency of a small copy, us", rows)
        peers = [record.value for record in found if dict(record.at)["what"] == "p2p" and record.value is not None]
        if peers:
            self.lines.append(f"# device to device {min(peers):.1f} to {max(peers):.1f}")

    def limits(self) -> None:
        """Limits that more than one device, or the host's threads, reached; those of one link are in the tables."""
        pairs = {
            r
            for link in self.node.links
            if link.a.startswith("dev") and link.b.startswith("dev")
            for r in link.resources
        }
        rows: dict[str, dict[str, str]] = {}
        for record in self._all("limit"):
            at = dict(record.at)
            resource, _, way = str(at["constraint"]).rpartition(":")
            users = str(at["devices"])
            if resource not in pairs and (" " in users):
                rows.setdefault(resource, {"by": users})[way] = _show(record)
        if rows:
            shown = [
                (name, [row.get(way, "") for way in ("ab", "ba", "both")] + [f" {row['by']}"])
                for name, row in rows.items()
            ]
            columns = ("a to b", "b to a", "both")
            self._table("# Shared limits that were reached, GB/s, and by whom", shown, columns)

    # --- helpers --------------------------------------------------------------------------------------------------

    def _device(self, device: Device) -> str:
        detail = next((link.detail for link in self.node.links if link.b == device.vertex and link.detail), None)
        parts = [f"# dev {device.id}", device.name, device.pci_id or "", f"numa {_or(device.numa_node)}"]
        return "  ".join(part for part in (*parts, f"{device.memory_bytes / (1 << 30):.1f} GiB", detail or "") if part)

    def _groups(self, test: str) -> list[tuple[str, list[Record | None], str]]:
        """Rows of devices that copied together, disjoint groups of one size in one row."""
        modes: dict[Scalar, int] = {}
        for record in self._all(test):
            mode = dict(record.at).get("mode")
            if isinstance(mode, str) and mode.startswith("with "):
                modes[mode] = mode.count(",") + 1
        rows: list[tuple[str, list[Record | None], str]] = []
        for size in sorted(set(modes.values())):
            cells: dict[int, Record | None] = {}
            for mode in (mode for mode, count in modes.items() if count == size):
                for i in self.ids:
                    cells[i] = cells.get(i) or self._get(test, device=i, method="copy", mode=mode)
            rows.append((f"by {size}", [cells.get(i) for i in self.ids], ""))
        total = self._get(test, device="sum", method="copy", mode="together")
        if total is not None:
            cells_all = [self._get(test, device=i, method="copy", mode="together") for i in self.ids]
            rows.append(("together", cells_all, f"sum {_show(total)}"))
        return rows

    def _section(self, caption: str, rows: Iterable[tuple[str, list[Record | None], str]]) -> None:
        shown = []
        for label, records, tail in rows:
            present = [record for record in records if record is not None]
            if not present:
                continue
            reasons = {record.reason for record in present}
            if all(record.value is None for record in present) and len(reasons) == 1:
                shown.append((label, [f"n/a ({present[0].reason})"]))
            else:
                shown.append((label, [_show(record) for record in records] + ([tail] if tail else [])))
        if shown:
            self._table(caption, shown, self.names)

    def _table(self, caption: str, rows: Sequence[tuple[str, Sequence[str]]], columns: Sequence[str]) -> None:
        self.lines += ["", caption, *table(rows, columns)]

    def _all(self, test: str) -> list[Record]:
        return [record for record in self.records if record.test == test]

    def _get(self, test: str, **at: Scalar) -> Record | None:
        for record in self.records:
            if record.test == test and dict(record.at) == at:
                return record
        return None


def _show(record: Record | None, *, short: bool = False) -> str:
    if record is None:
        return ""
    if record.value is None:
        return "n/a" if short else f"n/a ({record.reason})"
    return f"{record.value:.1f}"


def _added(record: Record) -> str:
    added = str(dict(record.at)["added"])
    return added if added == "direct" else "+" + added.removeprefix("via ")


def _size(nbytes: int) -> str:
    for unit, name in ((1 << 30, "G"), (1 << 20, "M"), (1 << 10, "K")):
        if nbytes >= unit and nbytes % unit == 0:
            return f"{nbytes // unit}{name}"
    return str(nbytes)


def _or(value: int | None) -> str:
    return "-" if value is None else str(value)
