"""Run files: every option of `memferry train`, its unit, its range and its default.

Owns: `RunConfig` and what two options mean together; `strict_yaml` reads it and
checks each option against its field's metadata, naming file, line and option.
Must not import torch: a mistake in a run file shows at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from memferry_npu import strict_yaml
from memferry_npu.runtime.policy import OffloadPolicy
from memferry_npu.strict_yaml import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The model that is trained."""

    kind: str = field(default="gpt", metadata={"choices": ("gpt",)})
    """Only the byte-level GPT so far."""
    layers: int = field(default=6, metadata={"min": 1, "max": 1024})
    """Transformer blocks."""
    width: int = field(default=384, metadata={"min": 1, "max": 65536})
    """Size of the residual stream; a multiple of heads."""
    heads: int = field(default=6, metadata={"min": 1, "max": 1024})
    """Attention heads."""
    context: int = field(default=256, metadata={"min": 1, "max": 1 << 20, "unit": "tokens"})
    """Tokens per sequence; positions are learned."""
    vocab: int = field(default=256, metadata={"min": 256, "max": 1 << 20})
    """Rows of the embedding. Bytes need 256."""
    dtype: str = field(default="fp32", metadata={"choices": ("bf16", "fp32")})
    """Type of the weights that forward and backward use; AdamW keeps fp32 masters of bf16 weights."""
    tie_weights: bool = False
    """Use the embedding as the output head."""
    checkpointing: str = field(default="none", metadata={"choices": ("none", "reentrant", "non_reentrant")})
    """Recompute each block in backward instead of keeping its activations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """The text that is trained on."""

    source: str = field(default="stdlib", metadata={"choices": ("stdlib", "path")})
    """stdlib: the .py files of the running interpreter's own standard library; path: `data.path`."""
    path: str | None = None
    """A file, or a folder whose files are read in sorted order. Needs `source: path`."""
    max_bytes: int = field(default=8 << 20, metadata={"min": 1 << 10, "unit": "bytes"})
    """Stop reading after this many bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """Length, batches and checkpoints. Micro-batches per step: `offload.accumulation_steps`."""

    steps: int = field(default=30, metadata={"min": 1})
    """Optimizer steps counted from step 0; a loaded run goes on to this number."""
    batch: int = field(default=4, metadata={"min": 1, "unit": "sequences"})
    """Sequences per micro-batch."""
    seed: int = field(default=0, metadata={"min": 0, "max": (1 << 63) - 1})
    """Fixes the first weights and every batch."""
    log_every: int = field(default=1, metadata={"min": 1, "unit": "steps"})
    """Print one step line per this many steps."""
    compare_with_plain: bool = False
    """Also try training without offload on the device, and compare with un-offloaded reference runs."""
    save: str | None = None
    """Write a checkpoint here after the last step."""
    load: str | None = None
    """Continue from this checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """AdamW. Gradient clipping: `offload.max_grad_norm`."""

    lr: float = field(default=1e-3, metadata={"min": 0.0})
    """Learning rate after the warm-up."""
    betas: tuple[float, float] = field(default=(0.9, 0.95), metadata={"min": 0.0, "max": 1.0, "exclusive_max": True})
    """Decay of the first and second moment."""
    eps: float = field(default=1e-8, metadata={"min": 0.0})
    """Added to the root of the second moment."""
    weight_decay: float = field(default=0.1, metadata={"min": 0.0})
    """Decoupled weight decay, per unit of learning rate."""
    warmup_steps: int = field(default=0, metadata={"min": 0, "unit": "steps"})
    """Steps over which the learning rate rises linearly to `lr`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConfig:
    """The machine that trains."""

    backend: str = field(default="sim", metadata={"choices": ("sim",)})
    """sim: the embedded simulated node. CUDA and Ascend are not there yet."""
    preset: str = "sim-2"
    """Name of a preset of `topology`, or the path of a node file."""
    device: int = field(default=0, metadata={"min": 0})
    """Index of the device to train on."""
    device_memory_bytes: int | None = field(default=None, metadata={"min": 1, "unit": "bytes", "yaml": "device_memory"})
    """Memory of a simulated device. null: what the node says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """One run of `memferry train`; each field is a section of the YAML file."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    offload: OffloadPolicy = field(default_factory=OffloadPolicy)
    node: NodeConfig = field(default_factory=NodeConfig)


def load_config(path: str | Path, overrides: Iterable[str] = ()) -> RunConfig:
    """Read a run file, apply `section.key=value` overrides in order, check everything.

    Raises ConfigError with the place ("run.yaml:12" or "command line"), the option and what is allowed.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(f"{path}: cannot read the run file: {reason}") from error
    return parse_config(text, str(path), overrides)


def parse_config(text: str, name: str, overrides: Iterable[str] = ()) -> RunConfig:
    """Like `load_config`, from text; `name` is what error messages call it."""
    config, place_of = strict_yaml.read(RunConfig, text, name, overrides)
    assert isinstance(config, RunConfig)
    problem = _inconsistency(config)
    if problem is not None:
        option, message = problem
        raise ConfigError(f"{place_of(option)}: {option}: {message}")
    return config


def dump_config(config: RunConfig) -> str:
    """The run file, with every option, that loads back to an equal `RunConfig`."""
    return yaml.safe_dump(strict_yaml.to_plain(config), sort_keys=False, allow_unicode=True)


def _inconsistency(config: RunConfig) -> tuple[str, str] | None:
    """The first (option, message) that only shows when two options are seen together."""
    model, data = config.model, config.data
    if model.width % model.heads:
        return "model.width", f"{model.width} is not a multiple of model.heads ({model.heads})"
    if data.source == "path" and data.path is None:
        return "data.source", "'path' needs data.path"
    if data.source != "path" and data.path is not None:
        return "data.path", "needs data.source: path"
    return None
