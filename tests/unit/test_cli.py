"""The command line: one line on stderr and status 2 for a user's mistake, never a traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from memferry_npu import __version__
from memferry_npu.cli import main
from memferry_npu.config import load_config, parse_config


def mistake(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The line that a wrong command prints."""
    try:
        status = main(words)
    except SystemExit as stop:  # argparse leaves this way
        status = int(stop.code or 0)
    out, err = capsys.readouterr()
    assert status == 2 and out == "" and len(err.splitlines()) == 1, (status, out, err)
    return err.strip()


def test_mistakes_are_one_line_with_status_2(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run_file = tmp_path / "run.yaml"
    run_file.write_text("offload:\n  slotz: 3\n")
    assert mistake(capsys, "train", str(run_file)) == (
        f"{run_file}:2: offload.slotz: unknown option; did you mean 'slots'?"
    )
    assert "No such file" in mistake(capsys, "train", "nope.yaml")
    assert mistake(capsys, "train", os.devnull, "train.steps=many").startswith("command line: train.steps:")
    assert "run.yaml" in mistake(capsys, "train")
    assert "invalid choice: 'fly'" in mistake(capsys, "fly")
    assert "--colour" in mistake(capsys, "env", "--colour")
    mistake(capsys)


def test_print_config_reads_back(capsys: pytest.CaptureFixture[str], root: Path) -> None:
    path = root / "configs" / "quickstart.yaml"
    assert main(["train", str(path), "train.steps=5", "offload.device_memory=64MiB", "--print-config"]) == 0
    printed = parse_config(capsys.readouterr().out, "printed.yaml")
    assert printed == load_config(path, ["train.steps=5", "offload.device_memory=64MiB"])


def test_several_ranks_are_refused(capsys: pytest.CaptureFixture[str], clean_environ: pytest.MonkeyPatch) -> None:
    clean_environ.setenv("WORLD_SIZE", "2")
    line = mistake(capsys, "train", os.devnull)
    assert line.startswith("WORLD_SIZE=2: data parallel training over several ranks is not there yet")


def run_python(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, timeout=120, env={**os.environ, **variables}
    )


def test_module_and_script_are_the_same_command(root: Path) -> None:
    env = {"PYTHONPATH": str(root), "WORLD_SIZE": "1"}
    version = run_python("-m", "memferry_npu", "--version", **env)
    assert (version.returncode, version.stdout) == (0, f"memferry {__version__}\n")
    for command in (("-m", "memferry_npu", "train"), (str(root / "scripts" / "train.py"),)):
        done = run_python(*command, os.devnull, "modle.layers=2", **env)
        assert done.returncode == 2 and done.stdout == ""
        assert done.stderr == "command line: modle: unknown option; did you mean 'model'?\n"


def test_a_wrong_run_file_shows_without_importing_torch(root: Path) -> None:
    code = "import sys; from memferry_npu.cli import main; main(['train', '/nope']); print('torch' in sys.modules)"
    done = run_python("-c", code, PYTHONPATH=str(root))
    assert done.stdout == "False\n" and "/nope: cannot read the run file" in done.stderr
