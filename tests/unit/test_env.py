"""`memferry env` prints on any machine: no variables, no tools, a torch that breaks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from memferry_npu import env

SECTIONS = {
    *("versions", "torch", "system", "cpu", "numa", "memory", "tools", "accelerators", "CANN"),
    *("host ops", "sim backend", "environment", "notes"),
}


def run_env(root: Path, *words: str, path: str = "", **variables: str) -> str:
    """`memferry env` with no environment but what is given."""
    search = f"{path}:{root}" if path else str(root)
    done = subprocess.run(
        [sys.executable, "-m", "memferry_npu", "env", *words],
        capture_output=True,
        text=True,
        timeout=240,
        env={"PYTHONPATH": search, **variables},
        cwd="/",
    )
    assert done.returncode == 0 and done.stderr == "", done.stderr
    return done.stdout


def test_an_empty_environment_gives_all_sections(root: Path) -> None:
    assert set(json.loads(run_env(root, "--json"))) == SECTIONS
    report = json.loads(run_env(root, "--json", PATH="/nowhere"))
    assert set(report) == SECTIONS
    assert report["versions"]["memferry"] and report["versions"]["torch"]
    assert report["torch"]["version"].startswith("2.")
    assert report["accelerators"]["nvidia-smi"] is None and report["tools"]["g++"] is None


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("raise RuntimeError('Failed to load the backend extension: torch_npu')", "torch_npu"),
        ("import os; os.kill(os.getpid(), 11)", "killed by signal 11"),
        ("raise SystemExit(3)", "exit status 3"),
        ("print('noise')", "AttributeError"),
    ],
)
def test_a_broken_torch_is_a_line_of_the_report(root: Path, tmp_path: Path, source: str, expected: str) -> None:
    (tmp_path / "torch.py").write_text(source)
    report = json.loads(run_env(root, "--json", path=str(tmp_path)))
    assert set(report) == SECTIONS
    assert expected in report["torch"]["error"]


def test_torch_npu_without_cann_is_explained(root: Path, tmp_path: Path) -> None:
    """What installing torch_npu on a machine without CANN does, down to the remedy."""
    (tmp_path / "torch_npu-2.13.0.dist-info").mkdir()
    (tmp_path / "torch_npu-2.13.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: torch_npu\nVersion: 2.13.0\n"
    )
    (tmp_path / "torch.py").write_text(
        "import os, types\n"
        "if os.environ.get('TORCH_DEVICE_BACKEND_AUTOLOAD') != '0': raise RuntimeError('libascendcl.so: not found')\n"
        "__version__ = '2.13.0'\n"
        "no = lambda: False\n"
        "version = types.SimpleNamespace(cuda=None)\n"
        "cuda = types.SimpleNamespace(is_available=no)\n"
        "get_num_threads = lambda: 1\n"
        "backends = types.SimpleNamespace(cpu=types.SimpleNamespace(get_cpu_capability=lambda: 'X'))\n"
    )
    text = run_env(root, path=str(tmp_path))
    assert "torch_npu  2.13.0" in text
    assert "with TORCH_DEVICE_BACKEND_AUTOLOAD=0  imports" in text
    assert "torch_npu is installed but no CANN toolkit was found" in text
    assert "set TORCH_DEVICE_BACKEND_AUTOLOAD=0" in text or "TORCH_DEVICE_BACKEND_AUTOLOAD=0 is set" in text


def test_the_text_has_a_heading_for_every_section(capsys: pytest.CaptureFixture[str]) -> None:
    assert env.main(as_json=False) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {line[2:] for line in lines if line.startswith("# ")} >= SECTIONS


def test_a_probe_that_raises_or_hangs_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def broken() -> Any:
        raise PermissionError("no")

    monkeypatch.setattr(env, "_PROBES", {"torch": broken, "versions": broken, "CANN": broken})
    report = env.report()
    assert report["CANN"] == {"error": "PermissionError: no"}
    assert "PermissionError: no" in env.format_report(report)

    slow = tmp_path / "slow"
    slow.write_text("#!/bin/sh\nexec sleep 20\n")
    slow.chmod(0o755)
    assert env._run(str(slow), seconds=0.2) == "no answer in 0.2 s"
    assert env._run(str(tmp_path / "none")) is None
    slow.write_text("#!/bin/sh\necho broken >&2\nexit 4\n")
    assert env._run(str(slow)) == "exit status 4: broken"
