"""`make demo`, with fewer and smaller steps: what a new user sees first has to be true."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from memferry_npu.cli import main
from memferry_npu.train import compare

SMALL = (
    *("model.width=128", "model.heads=4", "model.layers=3", "model.context=64", "train.batch=2", "data.max_bytes=1MiB"),
    *("optimizer.warmup_steps=2", "node.device_memory=4MiB"),
)
STEP = re.compile(
    r"step (\d+)  loss (\d+\.\d{4})  \d+\.\d\d s  [\d.]+[kM]? tok/s  device ([\d.]+)/([\d.]+) GiB"
    r"  host [\d.]+ GiB pinned  sim: H2D [\d.]+ GB/s D2H [\d.]+ GB/s stall [\d.]+%"
)
IDENTICAL = re.compile(r"weights identical to the same training without offload: yes \(sha256 [0-9a-f]{64}\)")


@pytest.fixture
def quickstart(root: Path) -> str:
    return str(root / "configs" / "quickstart.yaml")


@pytest.fixture(autouse=True)
def _one_rank(clean_environ: pytest.MonkeyPatch) -> None:
    pass


def lines_of(capsys: pytest.CaptureFixture[str], status: int, *words: str) -> list[str]:
    assert main(["train", *words]) == status, capsys.readouterr()
    return capsys.readouterr().out.splitlines()


def test_demo(capsys: pytest.CaptureFixture[str], quickstart: str) -> None:
    lines = lines_of(capsys, 0, quickstart, *SMALL, "train.steps=12")
    plain = [line for line in lines if line.startswith("plain training of")]
    assert len(plain) == 1 and "out of memory, as expected: out of memory on device 0" in plain[0]

    steps = [match for match in map(STEP.fullmatch, lines) if match]
    assert [int(match[1]) for match in steps] == list(range(12))
    losses = [float(match[2]) for match in steps]
    assert losses[0] > 5 and losses[-1] < losses[0] - 0.5
    assert all(0 < float(match[3]) <= float(match[4]) for match in steps)

    assert sum(bool(IDENTICAL.fullmatch(line)) for line in lines) == 1
    assert any(re.match(r"largest weight difference to torch.optim.AdamW .*: [\d.e-]+ at \w", line) for line in lines)


@pytest.mark.parametrize(
    "words",
    [
        ("model.dtype=fp32", "offload.placement=stream", "node.device_memory=8MiB"),
        ("model.tie_weights=true", "model.checkpointing=reentrant", "offload.max_grad_norm="),
        ("offload.accumulation_steps=2", "node.device_memory=8MiB"),
        ("offload.split_master=true", "model.checkpointing=none", "offload.step_returns=complete"),
    ],
    ids=["fp32", "tied-reentrant-unclipped", "accumulation", "split-master"],
)
def test_variants_of_the_demo_are_exact(
    capsys: pytest.CaptureFixture[str], quickstart: str, words: tuple[str, ...]
) -> None:
    lines = lines_of(capsys, 0, quickstart, *SMALL, "train.steps=4", *words)
    assert any(IDENTICAL.fullmatch(line) for line in lines), lines


def test_a_difference_is_reported_with_status_1(
    capsys: pytest.CaptureFixture[str], quickstart: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison reads real weights: one changed element of the offloaded run is found."""
    copy_weights, calls = compare.copy_weights, []

    def spoiled(model):  # type: ignore[no-untyped-def]
        weights = copy_weights(model)
        calls.append(model)
        if len(calls) == 1:
            weights["blocks.1.mlp.up.weight"][3, 5] += 1
        return weights

    monkeypatch.setattr(compare, "copy_weights", spoiled)
    lines = lines_of(capsys, 1, quickstart, *SMALL, "train.steps=2")
    claim = "weights identical to the same training without offload: no (first difference: blocks.1.mlp.up.weight[3, 5]"
    assert any(line.startswith(claim) for line in lines)


def test_save_and_continue_gives_the_weights_of_one_long_run(
    capsys: pytest.CaptureFixture[str], quickstart: str, tmp_path: Path
) -> None:
    path = str(tmp_path / "run.pt")
    words = (quickstart, *SMALL)
    lines_of(capsys, 0, *words, "train.steps=3", f"train.save={path}", "train.compare_with_plain=false")
    lines = lines_of(capsys, 0, *words, "train.steps=6", f"train.load={path}")
    assert f"continuing {path} at step 3" in lines
    assert [int(match[1]) for match in map(STEP.fullmatch, lines) if match] == [3, 4, 5]
    # The reference always starts at step 0.
    assert any(IDENTICAL.fullmatch(line) for line in lines), lines

    for extra, expected in (
        (("train.steps=3",), f"train.load: {path} is at step 3; train.steps must be above it"),
        (("train.steps=6", "model.layers=2"), f"train.load: {path} was written with another model.layers"),
        (("train.steps=6", "train.seed=1"), f"train.load: {path} was written with another train.seed"),
        (("train.steps=6", f"train.load={quickstart}"), f"train.load: cannot read {quickstart}"),
        (("train.steps=6", "train.load=/nowhere"), "train.load: cannot read /nowhere"),
    ):
        assert main(["train", *words, f"train.load={path}", *extra]) == 2
        assert expected in capsys.readouterr().err


def test_mistakes_that_only_the_run_can_see_are_one_line(capsys: pytest.CaptureFixture[str], quickstart: str) -> None:
    for word, expected in (
        ("node.preset=sim-3000", "node: "),
        ("node.device=99", "node: "),
        ("node.device_memory=64KiB", "out of memory on device 0"),
        ("offload.host_memory=64KiB", "out of memory on the host budget"),
        ("offload.device_memory=64KiB", "out of memory on the device budget"),
        ("offload.device_memory=1600KiB", "out of memory on device 0"),
        ("offload.units=[nothing]", "nothing"),
    ):
        assert main(["train", quickstart, *SMALL, "train.steps=2", "train.compare_with_plain=false", word]) == 2
        out = capsys.readouterr()
        assert expected in out.err and len(out.err.splitlines()) == 1, (word, out)


def test_the_program_in_the_readme_runs(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = (root / "README.md").read_text().split("```python\n")[1].split("```")[0]
    names: dict[str, object] = {}
    exec(compile(program, "README.md", "exec"), names)
    assert "True" in capsys.readouterr().out
    names["optimizer"].close()  # type: ignore[attr-defined]
