"""Shared by every test: two cores are enough, and a hung test fails instead of stalling the suite."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

# Before anything imports torch: torch_npu without CANN would break the import.
os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def root() -> Path:
    """The checkout."""
    return ROOT


@pytest.fixture
def clean_environ(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """No variable that changes what a run does."""
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    yield monkeypatch
