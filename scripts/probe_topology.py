"""Measure this node's links and memories: `python scripts/probe_topology.py --help` (the same as `memferry probe`)."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from topology.probe import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
