"""The command `memferry probe`: arguments, progress, files and exit status.

Owns the command line. Must not import torch itself; `cuda` does, when asked to measure.

Exit status: 0 measured and everything arrived as sent, or no difference; 1 data did not arrive as sent, or `--diff`
found a change; 2 a usage error or nothing to measure with; 130 interrupted.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import importlib.util
import os
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ..codec import Table, TopologyError
from ..load import list_presets, load_node, save_node
from ..model import Node, ProbeResult, Record
from . import cuda
from .cuda import Kernel
from .diff import diff
from .fit import fit
from .report import render
from .sim import SimMeter
from .suite import Meter, Progress, Suite

MIB = 1 << 20
SIZES = tuple(n * MIB for n in (1, 4, 16, 64, 256, 1024))
QUICK_SIZES = tuple(n * MIB for n in (1, 16, 64, 1024))


def main(argv: Sequence[str] | None = None, *, kernel: Kernel | None = None) -> int:
    """Run the command; returns its exit status and never raises for a user's mistake.

    `kernel` copies by a kernel on a CUDA device (see `cuda.Kernel`), for the rows of direct host access.
    """
    try:
        args = _parser().parse_args(argv)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 2
    try:
        return _run(args, kernel)
    except TopologyError as error:
        print(f"memferry probe: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\n# interrupted: nothing saved", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader has gone (head, less); what was to be saved has been.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def measure(
    base: Node,
    meter: Meter,
    *,
    sizes: Sequence[int] = SIZES,
    quick: bool = False,
    environment: Table = (),
    progress: Progress = lambda text: None,
) -> Node:
    """Measure everything; the base node with measured numbers and the probe block."""
    suite = Suite(base, meter, sizes=sizes, quick=quick, progress=progress)
    found = suite.run()
    node, limits = fit(base, found, simulated=meter.simulated)
    suite.run_loads(node)
    records = list(found.records)
    for limit in limits:
        devices = " ".join(f"dev{i}" for i in limit.devices) or "host threads"
        records.append(
            Record(test="limit", at=(("constraint", limit.constraint), ("devices", devices)), value=limit.gbps)
        )
    table = (*environment, ("method", meter.method), *meter.environment(), ("waived", "; ".join(found.waived)))
    return replace(node, probe=ProbeResult(environment=table, records=tuple(records)))


def parse_sizes(text: str) -> tuple[int, ...]:
    """`1M,16M,1G` (binary units) as bytes, sorted. TopologyError names what is not a size."""
    sizes = set()
    for word in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,9})\s*([KMG]?)(?:i?B)?\s*", word, re.IGNORECASE)
        nbytes = int(match[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[match[2].upper()] if match else 0
        if not 4096 <= nbytes <= 64 << 30:
            raise TopologyError(f"size {word.strip()!r}: expected for example 16M, between 4K and 64G")
        sizes.add(nbytes)
    return tuple(sorted(sizes))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="memferry probe", description="Measure the links and memories of this node.")
    parser.add_argument(
        "--backend",
        choices=("auto", "sim", "cuda", "npu"),
        default="auto",
        help="default: cuda if there is one, else sim",
    )
    parser.add_argument("--node", metavar="PRESET|FILE", help="node to simulate (sim) or structure to measure (cuda)")
    parser.add_argument("--sizes", metavar="1M,16M,...", help="load sizes for multi-path")
    parser.add_argument("--json", metavar="FILE", help="write the measured node (.json or .yaml)")
    parser.add_argument("--quick", action="store_true", help="fewer samples and sizes, under a minute")
    parser.add_argument("--list-presets", action="store_true", help="names of the presets, one first on each line")
    parser.add_argument(
        "--diff", nargs=2, metavar=("A", "B"), help="what changed from A to B; exit status 1 if anything"
    )
    parser.add_argument(
        "--noise", type=float, default=5.0, metavar="PERCENT", help="changes below this do not count (5)"
    )
    return parser


def _run(args: argparse.Namespace, kernel: Kernel | None) -> int:
    if args.list_presets:
        width = max(map(len, list_presets()))
        for name in list_presets():
            print(f"{name:<{width}}  {load_node(name).description or ''}".rstrip())
        return 0
    if args.diff:
        return _diff(args.diff[0], args.diff[1], args.noise)
    if os.environ.get("RANK", "0") not in ("", "0"):
        return 0  # rank 0 measures all devices; others would fight over them
    sizes = parse_sizes(args.sizes) if args.sizes else QUICK_SIZES if args.quick else SIZES
    if args.json and Path(args.json).suffix not in (".json", ".yaml", ".yml"):
        raise TopologyError("a node file ends in .json, .yaml or .yml", origin=args.json)
    if args.json and not Path(args.json).absolute().parent.is_dir():
        raise TopologyError("its folder does not exist", origin=args.json)
    base, meter = _meter(args.backend, args.node, quick=args.quick, kernel=kernel)
    if not base.devices and not meter.simulated:
        raise TopologyError("no accelerator to measure")
    progress = _Progress()
    try:
        node = measure(base, meter, sizes=sizes, quick=args.quick, environment=_environment(), progress=progress)
    finally:
        progress.clear()
    if args.json:
        save_node(node, args.json)
    sys.stdout.write(render(node) + "\n" + _footer(node, meter.failures(), args.json))
    sys.stdout.flush()
    return 1 if meter.failures() else 0


def _meter(backend: str, name: str | None, *, quick: bool, kernel: Kernel | None) -> tuple[Node, Meter]:
    if backend == "npu":
        raise TopologyError(
            "--backend npu: measuring Ascend devices is not built yet; "
            "--backend sim --node atlas-800t-a2 simulates a server from published figures"
        )
    if backend in ("auto", "cuda") and (backend == "cuda" or importlib.util.find_spec("torch") is not None):
        reason = cuda.unavailable()
        if reason is None:
            base = load_node(name) if name else None
            return cuda.open_meter(base, quick=quick, kernel=kernel)
        if backend == "cuda":
            raise TopologyError(f"--backend cuda: {reason}")
    base = load_node(name or "sim-2")
    return base, SimMeter(base)


def _diff(a: str, b: str, percent: float) -> int:
    if not 0.0 <= percent < 100.0:
        raise TopologyError(f"--noise {percent}: expected a percentage from 0 to below 100")
    changes = diff(load_node(a), load_node(b), noise=percent / 100.0)
    for change in changes:
        print(change)
    print(f"# {len(changes)} changes beyond {percent:g} %" if changes else f"# no change beyond {percent:g} %")
    return 1 if changes else 0


def _footer(node: Node, failures: Sequence[str], saved: str | None) -> str:
    assert node.probe is not None
    waived = dict(node.probe.environment).get("waived")
    lines = [f"# note: {note}" for note in node.notes]
    lines += [f"# Waived: {waived}"] if waived else []
    lines += [f"# Saved {saved}"] if saved else []
    lines += [f"# FAILED: {failure}" for failure in failures]
    verdict = "FAILED" if failures else "OK (simulated)" if node.simulated else "OK"
    return "\n".join([*lines, f"# Result {verdict}"]) + "\n"


def _environment() -> Table:
    try:
        version = importlib.metadata.version("memferry-npu")
    except importlib.metadata.PackageNotFoundError:
        version = "from source"
    commit = _git()
    return (
        ("version", f"{version} (git {commit})" if commit else version),
        ("python", platform.python_version()),
        ("host", platform.node()),
        ("time", datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")),
    )


def _git() -> str | None:
    folder = Path(__file__).resolve().parents[2]
    if not (folder / ".git").exists():
        return None
    try:
        done = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=folder, capture_output=True, text=True, timeout=5, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 and done.stdout.strip().isalnum() else None


class _Progress:
    """One line on a terminal that says what is being measured; nothing elsewhere."""

    def __init__(self) -> None:
        self._on = sys.stderr.isatty()

    def __call__(self, text: str) -> None:
        if self._on:
            sys.stderr.write(f"\r\x1b[K# measuring {text[:100]}")
            sys.stderr.flush()

    def clear(self) -> None:
        if self._on:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
