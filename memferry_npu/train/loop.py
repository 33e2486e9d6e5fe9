"""The run behind `memferry train`.

Owns: building the parts a run file asks for, the training loop, the check against
training without offload, and checkpoints. Says what happens through the `say` it
is given; writes nothing to stdout by itself.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from memferry_npu import report
from memferry_npu.api import offload, place_plain
from memferry_npu.backend.base import OutOfMemoryError
from memferry_npu.backend.sim import SimBackend
from memferry_npu.config import OptimizerConfig, RunConfig, dump_config, parse_config
from memferry_npu.optim.reference import SerialAdamW
from memferry_npu.runtime.policy import OffloadPolicy
from memferry_npu.train import compare
from memferry_npu.train.data import Batches, load_text
from memferry_npu.train.gpt import build_model, next_byte_loss

CHECKPOINT_FORMAT = "memferry.checkpoint/1"
_log = logging.getLogger("memferry")

Say = Callable[[str], None]


class RunError(RuntimeError):
    """A run that cannot go on for a reason its user can change. The text is one line."""


class StepOptimizer(Protocol):
    """What the loop needs of an optimizer; a torch.optim.Optimizer has it."""

    @property
    def param_groups(self) -> list[dict[str, Any]]: ...
    def step(self) -> object: ...
    def zero_grad(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One finished step."""

    step: int
    loss: float
    """Mean over the step's micro-batches, in nats per byte, before the update."""
    seconds: float
    """Wall time."""


def run(config: RunConfig, say: Say) -> int:
    """One run. Returns 0, or 1 if weights differ from the un-offloaded reference.

    Raises RunError or ConfigError for what the user can change.
    """
    started = time.perf_counter()
    batches = Batches(
        load_text(config.data), batch=config.train.batch, context=config.model.context, seed=config.train.seed
    )
    checkpoint = _load_checkpoint(config)
    with_plain = config.train.compare_with_plain
    if with_plain:
        say(_try_plain(config, batches))
    weights = _offloaded(config, batches, checkpoint, say)
    status = _compare(config, batches, weights, say) if with_plain else 0
    say(f"done in {time.perf_counter() - started:.0f} s")
    return status


def train_steps(
    model: nn.Module,
    optimizer: StepOptimizer,
    batches: Batches,
    config: RunConfig,
    *,
    start: int,
    steps: int,
    on_step: Callable[[StepRecord], None] | None = None,
) -> None:
    """Run steps `start` ... `steps` - 1. The same lines for every optimizer, offloaded or not."""
    micro_batches = config.offload.accumulation_steps
    for step in range(start, steps):
        began = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config.optimizer, step)
        losses = []
        for micro in range(micro_batches):
            inputs, targets = batches.get(step, micro)
            loss = next_byte_loss(model(inputs), targets) / micro_batches
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        if on_step is not None:
            total = sum(loss.item() for loss in losses)
            on_step(StepRecord(step=step, loss=total, seconds=time.perf_counter() - began))


def learning_rate(config: OptimizerConfig, step: int) -> float:
    """Rises linearly over the warm-up, then stays."""
    return config.lr * min(1.0, (step + 1) / max(1, config.warmup_steps))


def _adamw(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    groups = compare.parameter_groups(model, config.weight_decay)
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, foreach=False)


def _backend(config: RunConfig, *, budgets: OffloadPolicy | None = None) -> SimBackend:
    """The node's device; with `budgets`, no larger than the policy allows, activations included."""
    memory = [config.node.device_memory_bytes, budgets.device_memory_bytes if budgets is not None else None]
    try:
        return SimBackend(
            config.node.preset,
            device=config.node.device,
            device_memory_bytes=min((size for size in memory if size is not None), default=None),
            host_memory_bytes=budgets.host_memory_bytes if budgets is not None else None,
        )
    except (ValueError, OSError) as error:
        raise RunError(f"node: {_one_line(error)}") from error


def _try_plain(config: RunConfig, batches: Batches) -> str:
    """One line: does training with everything on the device fit? Two steps reach its peak."""
    model = build_model(config.model, config.train.seed)
    num_parameters = sum(p.numel() for p in model.parameters())
    what = f"plain training of {report.count(num_parameters)} parameters on the device"
    try:
        with place_plain(model, _backend(config)):
            train_steps(model, _adamw(model, config.optimizer), batches, config, start=0, steps=2)
    except OutOfMemoryError as error:
        return f"{what}: out of memory, as expected: {_one_line(error)}"
    return f"{what}: fits; offload is not needed for this model on this node"


def _offloaded(
    config: RunConfig, batches: Batches, checkpoint: dict[str, Any] | None, say: Say
) -> dict[str, torch.Tensor]:
    """The offloaded run with its step lines. Returns a copy of the final weights."""
    model = build_model(config.model, config.train.seed)
    backend = _backend(config, budgets=config.offload)
    try:
        optimizer = offload(model, _adamw(model, config.optimizer), policy=config.offload, backend=backend)
    except (OutOfMemoryError, ValueError) as error:
        raise RunError(f"offload: {_one_line(error)}") from error
    start = 0 if checkpoint is None else checkpoint["step"]
    tokens = config.train.batch * config.model.context * config.offload.accumulation_steps
    losses: list[float] = []

    def on_step(record: StepRecord) -> None:
        losses.append(record.loss)
        if record.step % config.train.log_every == 0 or record.step == config.train.steps - 1:
            stats = optimizer.stats()
            say(
                report.step_line(step=record.step, loss=record.loss, seconds=record.seconds, tokens=tokens, stats=stats)
            )

    with optimizer:
        if checkpoint is not None:
            model.load_state_dict(checkpoint["model"])
            optimizer.load_state_dict(checkpoint["optimizer"])
            say(f"continuing {config.train.load} at step {start}")
        say(report.STEP_LINE_KEY)
        try:
            train_steps(model, optimizer, batches, config, start=start, steps=config.train.steps, on_step=on_step)
            optimizer.synchronize()
        except OutOfMemoryError as error:
            raise RunError(f"offloaded training: {_one_line(error)}") from error
        weights = compare.copy_weights(model)
        if config.train.save is not None:
            _save_checkpoint(config, weights, optimizer.state_dict())
            say(f"saved {config.train.save}")
    say(f"loss {losses[0]:.4f} at step {start}, {losses[-1]:.4f} at step {config.train.steps - 1}")
    return weights


def _compare(config: RunConfig, batches: Batches, weights: dict[str, torch.Tensor], say: Say) -> int:
    """Train twice more without offload, from step 0 with the same batches, and compare every weight."""
    steps, clip = config.train.steps, config.offload.max_grad_norm
    compute_dtype = getattr(torch, config.offload.compute_dtype) if config.offload.compute_dtype else None

    plain = build_model(config.model, config.train.seed)
    reference = SerialAdamW(
        _adamw(plain, config.optimizer),
        max_grad_norm=clip,
        accumulation_steps=config.offload.accumulation_steps,
        compute_dtype=compute_dtype,
    )
    train_steps(plain, reference, batches, config, start=0, steps=steps)
    reference_weights = compare.copy_weights(plain)

    stock = build_model(config.model, config.train.seed)
    masters = compare.TorchMasterAdamW(_adamw(stock, config.optimizer), max_grad_norm=clip, compute_dtype=compute_dtype)
    train_steps(stock, masters, batches, config, start=0, steps=steps)
    gap, where = compare.largest_difference(weights, compare.copy_weights(stock))
    dtype = str(next(stock.parameters()).dtype).removeprefix("torch.")
    say(
        f"largest weight difference to torch.optim.AdamW (fp32 masters, {dtype} weights, same batches, {steps} steps): "
        f"{gap:.3g} at {where}"
    )
    difference = compare.first_difference(weights, reference_weights)
    claim = "weights identical to the same training without offload"
    if difference is not None:
        say(f"{claim}: no (first difference: {difference})")
        return 1
    say(f"{claim}: yes (sha256 {compare.fingerprint(weights)})")
    return 0


def _save_checkpoint(config: RunConfig, weights: dict[str, torch.Tensor], optimizer: dict[str, Any]) -> None:
    """Write everything to a file beside the target, then rename: a crash leaves the old checkpoint."""
    assert config.train.save is not None
    path = Path(config.train.save)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    content = {
        "format": CHECKPOINT_FORMAT,
        "step": config.train.steps,
        "config": dump_config(config),
        "model": weights,
        "optimizer": optimizer,
    }
    try:
        torch.save(content, partial)
        partial.replace(path)
    except (OSError, RuntimeError) as error:  # torch reports a missing folder as RuntimeError
        partial.unlink(missing_ok=True)
        raise RunError(f"train.save: cannot write {path}: {_one_line(error)}") from error


def _load_checkpoint(config: RunConfig) -> dict[str, Any] | None:
    """The checkpoint of `train.load`, checked before anything is built. Raises RunError."""
    if config.train.load is None:
        return None
    path = config.train.load
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load has no one class for "not a checkpoint"
        raise RunError(f"train.load: cannot read {path}: {_one_line(error)}") from error
    if not isinstance(content, dict) or content.get("format") != CHECKPOINT_FORMAT:
        raise RunError(f"train.load: {path} is not a {CHECKPOINT_FORMAT} file")
    if content["step"] >= config.train.steps:
        raise RunError(f"train.load: {path} is at step {content['step']}; train.steps must be above it")
    option = _changed_option(parse_config(content["config"], path), config)
    if option is not None and option.startswith("model."):
        raise RunError(f"train.load: {path} was written with another {option}")
    if option is not None and config.train.compare_with_plain:
        raise RunError(
            f"train.load: {path} was written with another {option}: a run from step 0 cannot give its weights; "
            "set train.compare_with_plain=false"
        )
    if option is not None:
        _log.warning("%s was written with another %s", path, option)
    return content


def _changed_option(old: RunConfig, new: RunConfig) -> str | None:
    """The first option that decides the weights and is not the same in both; model options first."""
    for section in ("model", "data", "optimizer", "train", "offload"):
        before, after = getattr(old, section), getattr(new, section)
        names = {"train": ("batch", "seed"), "offload": ("max_grad_norm", "accumulation_steps", "compute_dtype")}
        for name in names.get(section, type(before).__dataclass_fields__):
            if getattr(before, name) != getattr(after, name):
                return f"{section}.{name}"
    return None


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
