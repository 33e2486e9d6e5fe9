"""The distribution: what it contains, what it depends on, and that importing it does nothing."""

from __future__ import annotations

import fnmatch
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import memferry_npu

TOP_LEVEL = ("memferry_npu", "topology", "cuda_ops", "ascendc_ops")

tomllib: Any = pytest.importorskip("tomllib", reason="Python 3.11 reads TOML")


@pytest.fixture(scope="module")
def project(root: Path) -> dict[str, Any]:
    return dict(tomllib.loads((root / "pyproject.toml").read_text()))


def test_metadata(project: dict[str, Any]) -> None:
    meta = project["project"]
    assert meta["name"] == "memferry-npu"
    assert meta["requires-python"] == ">=3.10"
    assert sorted(re.split(r"[<>=]", d)[0] for d in meta["dependencies"]) == ["numpy", "pyyaml", "torch"]
    assert set(meta["optional-dependencies"]) == {"npu", "cuda", "hf", "log", "test", "bench"}
    assert meta["scripts"] == {"memferry": "memferry_npu.cli:main"}


def test_constraints_pin_torch_inside_the_range_and_every_test_tool(root: Path, project: dict[str, Any]) -> None:
    pins = {
        line.split("==")[0].lower(): line.split("==")[1].split(";")[0].strip()
        for line in (root / "constraints.txt").read_text().splitlines()
        if "==" in line
    }
    assert pins["torch"] == "2.13.0"
    for requirement in project["project"]["optional-dependencies"]["test"]:
        assert re.split(r"[<>=]", requirement)[0].lower() in pins


def test_every_folder_with_code_is_a_package(root: Path) -> None:
    """`find` without namespaces skips a folder that has no __init__.py, and a wheel would lack it."""
    for top in TOP_LEVEL:
        for path in (root / top).rglob("*.py"):
            assert (path.parent / "__init__.py").is_file(), f"{path.parent.relative_to(root)} has no __init__.py"


def test_data_files_travel_with_the_package(root: Path, project: dict[str, Any]) -> None:
    patterns = [p.removeprefix("**/") for p in project["tool"]["setuptools"]["package-data"]["*"]]
    known = ["*.py", "*.md", *patterns]
    for top in TOP_LEVEL:
        for path in (root / top).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                assert any(fnmatch.fnmatch(path.name, p) for p in known), f"{path.relative_to(root)} is in no wheel"
    assert (root / "memferry_npu" / "py.typed").is_file()


def test_import_has_no_side_effects(root: Path) -> None:
    code = """
import sys, threading
before = set(sys.modules)
import memferry_npu, cuda_ops, ascendc_ops
assert not {"torch", "torch_npu", "numpy", "yaml", "subprocess"} & (set(sys.modules) - before), sys.modules
assert threading.active_count() == 1
assert memferry_npu.OffloadPolicy().slots == 2
assert "torch" not in sys.modules
assert dir(memferry_npu) == sorted(memferry_npu.__all__)
try:
    memferry_npu.nothing
except AttributeError as error:
    assert "nothing" in str(error)
else:
    raise AssertionError
"""
    env = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=env)
    assert done.returncode == 0, done.stderr


def test_public_names() -> None:
    for name in memferry_npu.__all__:
        assert getattr(memferry_npu, name) is not None


def test_no_file_names_a_machine_or_a_registry(root: Path) -> None:
    """What is installed from where is the business of the machine, not of the project."""
    words = re.compile(r"index-url|find-links|trusted-host|://[^ ]*(pypi|mirror)", re.IGNORECASE)
    for name in ("pyproject.toml", "constraints.txt", "Makefile", ".ci/run"):
        assert not words.search((root / name).read_text()), name
