"""Data, model and comparison of the trainer, without any offload."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from memferry_npu import report
from memferry_npu.config import ConfigError, DataConfig, ModelConfig
from memferry_npu.train import compare
from memferry_npu.train.data import Batches, load_text
from memferry_npu.train.gpt import build_model, next_byte_loss

TINY = ModelConfig(layers=2, width=32, heads=2, context=16)


def test_stdlib_text_is_source_code_and_repeats() -> None:
    text = load_text(DataConfig(max_bytes=1 << 16))
    assert len(text) == 1 << 16 and b"import " in text.tobytes()
    assert (text == load_text(DataConfig(max_bytes=1 << 16))).all()


def test_text_from_a_path_is_read_in_order(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    for name, content in (("c.txt", b"c"), ("b/z.txt", b"b"), ("a.bin", b"a" * 2000)):
        (tmp_path / name).write_bytes(content)
    read = load_text(DataConfig(source="path", path=str(tmp_path)))
    assert read.tobytes() == b"a" * 2000 + b"b" + b"c"
    assert len(load_text(DataConfig(source="path", path=str(tmp_path / "a.bin"), max_bytes=1024))) == 1024
    with pytest.raises(ConfigError, match="no such file or folder"):
        load_text(DataConfig(source="path", path=str(tmp_path / "none")))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="has no text"):
        load_text(DataConfig(source="path", path=str(tmp_path / "empty")))


def test_a_batch_depends_on_its_numbers_alone() -> None:
    text = np.arange(1000, dtype=np.uint32).astype(np.uint8)
    batches = Batches(text, batch=3, context=16, seed=5)
    inputs, targets = batches.get(2, 1)
    assert inputs.shape == (3, 16) and inputs.dtype == torch.int64
    assert torch.equal((inputs + 1) % 256, targets)
    batches.get(9, 0)
    assert torch.equal(batches.get(2, 1)[0], inputs)
    others = [batches.get(2, 0), batches.get(1, 1), Batches(text, batch=3, context=16, seed=6).get(2, 1)]
    assert not any(torch.equal(other, inputs) for other, _ in others)
    with pytest.raises(ConfigError, match="16 bytes of text are fewer than"):
        Batches(text[:16], batch=1, context=16, seed=0)
    last = Batches(text[:17], batch=1, context=16, seed=0).get(0, 0)
    assert last[0][0, 0] == 0 and last[1][0, -1] == 16


def test_the_model_is_fixed_by_its_seed_and_leaves_the_global_generator() -> None:
    state = torch.get_rng_state()
    a, b, c = build_model(TINY, 1), build_model(TINY, 1), build_model(TINY, 2)
    assert torch.equal(torch.get_rng_state(), state)
    assert compare.first_difference(a.state_dict(), b.state_dict()) is None
    assert compare.first_difference(a.state_dict(), c.state_dict()) is not None


@pytest.mark.parametrize("options", [{}, {"tie_weights": True}, {"dtype": "bf16"}, {"vocab": 300}])
def test_checkpointing_changes_no_gradient(options: dict[str, Any]) -> None:
    tokens = torch.arange(32).reshape(2, 16)
    gradients = []
    for checkpointing in ("none", "reentrant", "non_reentrant"):
        config = ModelConfig(layers=2, width=32, heads=2, context=16, checkpointing=checkpointing, **options)
        model = build_model(config, 0)
        next_byte_loss(model(tokens), tokens + 1).backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert len(gradients[0]) == len(list(build_model(config, 0).parameters()))
    for other in gradients[1:]:
        assert compare.first_difference(gradients[0], other) is None


def test_the_model_is_causal_and_refuses_long_input() -> None:
    model = build_model(TINY, 0)
    tokens = torch.arange(16)[None]
    changed = tokens.clone()
    changed[0, 9] = 200
    assert torch.equal(model(tokens)[0, :9], model(changed)[0, :9])
    assert not torch.equal(model(tokens)[0, 9], model(changed)[0, 9])
    with pytest.raises(ValueError, match="17 tokens are more than the model's context of 16"):
        model(torch.zeros(1, 17, dtype=torch.int64))


def test_one_changed_bit_is_found_and_named() -> None:
    ours = {"w": torch.tensor([[1.0, -0.0], [float("nan"), 4.0]]), "s": torch.tensor(2.0), "e": torch.zeros(0)}
    same = {name: value.clone() for name, value in reversed(ours.items())}
    assert compare.first_difference(ours, same) is None
    assert compare.fingerprint(ours) == compare.fingerprint(same)
    for name, index, value, expected in (
        ("w", (0, 1), 0.0, "w[0, 1] -0.0 vs 0.0"),
        ("w", (1, 1), 4.000001, "w[1, 1] 4.0 vs 4.00000"),
        ("s", (), 3.0, "s[] 2.0 vs 3.0"),
    ):
        theirs = {n: v.clone() for n, v in ours.items()}
        theirs[name][index] = value
        difference = compare.first_difference(ours, theirs)
        assert difference is not None and difference.startswith(expected)
        assert compare.fingerprint(ours) != compare.fingerprint(theirs)
    assert compare.first_difference(ours, {"w": ours["w"], "s": ours["s"]}) == "e is missing in the reference"
    assert "torch.float32 (2, 2) vs torch.bfloat16 (2, 2)" in str(
        compare.first_difference(ours, {**ours, "w": ours["w"].bfloat16()})
    )
    transposed = {"w": ours["w"].t().contiguous().t()}  # same values in another memory order
    assert compare.first_difference({"w": ours["w"]}, transposed) is None


def test_largest_difference() -> None:
    ours = {"a": torch.zeros(2), "b": torch.tensor([[1.0, 2.0]]), "e": torch.zeros(0)}
    assert compare.largest_difference(ours, ours) == (0.0, "a[0]")
    theirs = {**ours, "b": torch.tensor([[1.0, 2.5]])}
    assert compare.largest_difference(ours, theirs) == (0.5, "b[0, 1]")
    broken = {**theirs, "a": torch.tensor([0.0, float("nan")])}
    assert compare.largest_difference(ours, broken) == (float("inf"), "a[1]")


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_torch_comparison_is_stock_adamw(dtype: str) -> None:
    """On fp32 weights, exactly the plain loop that everyone writes; on bf16, the same on fp32 masters."""
    config = ModelConfig(layers=1, width=32, heads=2, context=16, dtype=dtype)
    ours, plain = build_model(config, 0), build_model(config, 0)
    kwargs: dict[str, Any] = {"lr": 1e-2, "foreach": False}
    masters = compare.TorchMasterAdamW(torch.optim.AdamW(ours.parameters(), **kwargs), max_grad_norm=0.5)
    copies = [torch.nn.Parameter(p.detach().float().clone()) for p in plain.parameters()]
    stock = torch.optim.AdamW(copies, **kwargs)
    tokens = torch.arange(32).reshape(2, 16)
    for _ in range(3):
        next_byte_loss(ours(tokens), tokens + 1).backward()
        masters.step()
        masters.zero_grad()
        plain.zero_grad()
        next_byte_loss(plain(tokens), tokens + 1).backward()
        for copy, parameter in zip(copies, plain.parameters(), strict=True):
            copy.grad = parameter.grad.float() if parameter.grad is not None else None
        torch.nn.utils.clip_grad_norm_(copies, 0.5)
        stock.step()
        with torch.no_grad():
            for copy, parameter in zip(copies, plain.parameters(), strict=True):
                parameter.copy_(copy)
    assert compare.first_difference(ours.state_dict(), plain.state_dict()) is None


def test_step_line() -> None:
    stats: Any = SimpleNamespace(
        device_peak_bytes=22548578,
        device_cap_bytes=64424509,
        pinned_host_bytes=139586437,
        h2d_gbps=21.13,
        d2h_gbps=9.81,
        stall_fraction=0.0312,
    )
    line = report.step_line(step=12, loss=2.31041, seconds=0.84, tokens=7476, stats=stats)
    assert line == (
        "step 12  loss 2.3104  0.84 s  8.9k tok/s  device 0.021/0.060 GiB  host 0.130 GiB pinned"
        "  sim: H2D 21.1 GB/s D2H 9.8 GB/s stall 3.1%"
    )
    assert report.step_line(step=0, loss=1, seconds=0, tokens=1, stats=None) == "step 0  loss 1.0000  0.00 s  - tok/s"


def test_figures() -> None:
    assert [report.count(v) for v in (0, 870, 999.96, 1000, 8912, 999_990, 10_921_728, 7e9)] == [
        *("0", "870", "1.0k", "1.0k", "8.9k", "1.0M", "10.9M", "7.0B")
    ]
    assert [report.gib(v) for v in (0, 1 << 20, 1 << 30, 150 << 30)] == ["0.000", "0.001", "1.00", "150.0"]
    assert report.table(["a", "bb"], [["ccc", "1"]]) == "a    bb\nccc   1"
