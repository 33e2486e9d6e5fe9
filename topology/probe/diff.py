"""What changed between two probes of a node beyond noise. Pure. Must not import torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ..codec import to_tree
from ..model import Node, Source

_TIMES = 5.0
"""Latencies and loads under 16 MiB scatter more: their noise is this many times larger."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One number, or one part of the node, that is not what it was."""

    what: str
    before: float | None
    after: float | None

    def __str__(self) -> str:
        if self.before is None or self.after is None:
            there = "gone" if self.after is None else "new"
            value = self.before if self.after is None else self.after
            return f"{self.what}  {there}" + (f" (was {self.before:.1f})" if there == "gone" and value else "")
        return f"{self.what}  {self.before:.1f} -> {self.after:.1f}  ({self.after / self.before - 1:+.0%})"


def diff(a: Node, b: Node, *, noise: float = 0.05) -> list[Change]:
    """Changes from a to b larger than `noise` (a part of the larger value), parts that came or went first.

    Measured cells are compared where both nodes have them, else the measured numbers of the nodes.
    """
    changes = []
    before, after = dict(_parts(a)), dict(_parts(b))
    for name in dict.fromkeys((*before, *after)):
        if (name in before) != (name in after):
            there = name in before
            changes.append(Change(what=name, before=0.0 if there else None, after=None if there else 0.0))
    old, new = (_cells(a), _cells(b)) if a.probe and b.probe else (_numbers(a), _numbers(b))
    for name, value in old.items():
        if name not in new:
            continue
        other = new[name]
        if value is None or other is None:
            if value is not other:
                changes.append(Change(what=name, before=value, after=other))
        elif abs(value - other) > noise * _scatter(name) * max(value, other):
            changes.append(Change(what=name, before=value, after=other))
    return changes


def _parts(node: Node) -> Iterator[tuple[str, None]]:
    for device in node.devices:
        yield f"device {device.id} {device.name}", None
    for host in node.hosts:
        yield f"host memory {host.id}", None
    for link in node.links:
        yield f"link {link.kind.value} {link.a} - {link.b}", None


def _cells(node: Node) -> dict[str, float | None]:
    assert node.probe is not None
    found: dict[str, float | None] = {}
    for record in node.probe.records:
        if record.test != "limit":
            at = dict(record.at)
            # The split over paths is a choice, not a property of the node.
            words = [
                f"{key} {_bytes(value) if key == 'bytes' else value}" for key, value in at.items() if key != "paths"
            ]
            found[" ".join([record.test, *words])] = record.value
    return found


def _bytes(value: object) -> str:
    return f"{value / (1 << 20):g}M" if isinstance(value, int) else str(value)


def _numbers(node: Node) -> dict[str, float | None]:
    found: dict[str, float | None] = {}

    def walk(tree: object, path: str) -> None:
        if isinstance(tree, Mapping):
            if "value" in tree and "source" in tree:
                if tree["source"] in (Source.MEASURED.value, Source.SIMULATED.value):
                    found[path] = float(tree["value"])
                return
            for key, item in tree.items():
                walk(item, f"{path} {key}")
        elif isinstance(tree, list):
            for item in tree:
                name = item.get("id", "") if isinstance(item, Mapping) else ""
                walk(item, f"{path} {name}")

    for group in ("hosts", "resources", "links"):
        walk(to_tree(getattr(node, group)), group.removesuffix("s"))
    return found


def _scatter(name: str) -> float:
    words = name.split()
    small = words[0] == "load" and words[-1].endswith("M") and float(words[-1][:-1]) < 16
    return _TIMES if small or "latency" in name else 1.0
