"""Run files: every mistake names file, line and option; every valid file reads back to itself."""

from __future__ import annotations

import dataclasses
import enum
import typing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memferry_npu.config import ConfigError, RunConfig, dump_config, load_config, parse_config
from memferry_npu.runtime.policy import GradientPath, Placement
from memferry_npu.strict_yaml import parse_bytes


def test_defaults_come_from_an_empty_file() -> None:
    assert parse_config("", "run.yaml") == RunConfig()
    assert parse_config("model:\noffload:\n", "run.yaml") == RunConfig()


def test_values_of_every_kind() -> None:
    config = parse_config(
        """
model: {layers: 2, tie_weights: true, checkpointing: none}
data: {max_bytes: 1MB}
optimizer:
  lr: 1e-4
  betas: [0.8, 0.99]
  weight_decay: 0
train: {steps: 010, save: out.pt}
offload:
  device_memory: 1.5GiB
  host_memory: 4_096
  placement: dha
  gradient: {"blocks.*": keep, default: dha_write}
  units: [wte, blocks.0]
  compute_dtype: bfloat16
""",
        "run.yaml",
    )
    assert config.optimizer.lr == 1e-4 and config.optimizer.betas == (0.8, 0.99)
    assert config.optimizer.weight_decay == 0.0 and isinstance(config.optimizer.weight_decay, float)
    assert config.train.steps == 10 and config.train.save == "out.pt"
    assert config.data.max_bytes == 10**6
    assert config.offload.device_memory_bytes == 3 * 2**29 and config.offload.host_memory_bytes == 4096
    assert config.offload.placement == {"default": Placement.DHA}
    assert config.offload.gradient == {"blocks.*": GradientPath.KEEP, "default": GradientPath.DHA_WRITE}
    assert config.offload.units == ("wte", "blocks.0")
    assert config.model.checkpointing == "none"


MISTAKES = {
    "offload:\n  slotz: 2": "run.yaml:2: offload.slotz: unknown option; did you mean 'slots'?",
    "modle:\n  layers: 2": "run.yaml:1: modle: unknown option; did you mean 'model'?",
    "train:\n  qqq: 1": "run.yaml:2: train.qqq: unknown option; known: batch, compare_with_plain",
    "offload:\n  device_memory_bytes: 2": "run.yaml:2: offload.device_memory_bytes: unknown option; did you mean",
    "\n\nmodel:\n\n  layers: 0": "run.yaml:5: model.layers: must be at least 1, got 0",
    "offload:\n  slots: 65": "run.yaml:2: offload.slots: must be at most 64, got 65",
    "model:\n  layers: true": "run.yaml:2: model.layers: expected an integer; got 'true'",
    "model:\n  layers: 2.0": "run.yaml:2: model.layers: expected an integer; got '2.0'",
    "model:\n  layers: '2'": "run.yaml:2: model.layers: expected an integer; got the quoted string '2'",
    "model:\n  layers:\n    - 2": "run.yaml:2: model.layers: expected an integer; got a list",
    "model:\n  layers:": "run.yaml:2: model.layers: expected an integer; got null",
    "model:\n  tie_weights: 1": "run.yaml:2: model.tie_weights: expected true or false; got '1'",
    "model:\n  tie_weights: yes": "run.yaml:2: model.tie_weights: expected true or false; got 'yes'",
    "model:\n  dtype: b16": "run.yaml:2: model.dtype: expected one of bf16, fp32 (did you mean 'bf16'?); got 'b16'",
    "model: 3": "run.yaml:1: model: expected a mapping of options, got '3'",
    "- model": "run.yaml:1: run file: expected a mapping of options, got a list",
    "model:\n  layers: 1\n  layers: 2": "run.yaml:3: model.layers: given twice; the first is at run.yaml:2",
    "model:\n  width: 100\n  heads: 3": "run.yaml:2: model.width: 100 is not a multiple of model.heads (3)",
    "optimizer:\n  lr: fast": "run.yaml:2: optimizer.lr: expected a number; got 'fast'",
    "optimizer:\n  lr: nan": "run.yaml:2: optimizer.lr: expected a finite number; got 'nan'",
    "optimizer:\n  lr: true": "run.yaml:2: optimizer.lr: expected a number; got 'true'",
    "optimizer:\n  lr: -1": "run.yaml:2: optimizer.lr: must be at least 0.0, got -1.0",
    "optimizer:\n  betas: [0.9]": "run.yaml:2: optimizer.betas: expected a list of 2; got a list",
    "optimizer:\n  betas: [0.9, 1]": "run.yaml:2: optimizer.betas[1]: must be below 1.0, got 1.0",
    "offload:\n  max_grad_norm: 0": "run.yaml:2: offload.max_grad_norm: must be above 0.0, got 0.0",
    "offload:\n  device_memory: 0": "run.yaml:2: offload.device_memory: must be at least 1 bytes, got 0",
    "offload:\n  device_memory: 3 apples": "run.yaml:2: offload.device_memory: expected bytes such as 64MiB",
    "offload:\n  device_memory: true": "run.yaml:2: offload.device_memory: expected bytes such as 64MiB",
    "offload:\n  placement: strem": "run.yaml:2: offload.placement: expected one of resident, stream, dha (did",
    "offload:\n  placement:\n    wte: drop": "run.yaml:3: offload.placement.wte: expected one of resident, stream",
    "offload:\n  placement: [dha]": "run.yaml:2: offload.placement: expected a word or a mapping",
    "offload:\n  units: wte": "run.yaml:2: offload.units: expected a list; got 'wte'",
    "data:\n  source: path": "run.yaml:2: data.source: 'path' needs data.path",
    "data:\n  path: x": "run.yaml:2: data.path: needs data.source: path",
    "model:\n  layers: [": "run.yaml:2: not valid YAML: ",
    "a: &x {a: *x}": "run.yaml:1: nested too deeply",
    "model: !!python/none x": "run.yaml:1: YAML tags are not used",
    "? [a]\n: 1": "run.yaml:1: an option's name must be a word",
    f"model: {{layers: {'9' * 5000}}}": "run.yaml:1: model.layers: expected an integer",
}


@pytest.mark.parametrize("text", MISTAKES, ids=lambda text: text[:40])
def test_a_mistake_names_its_place(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(text, "run.yaml")
    assert str(caught.value).startswith(MISTAKES[text])
    assert "\n" not in str(caught.value)


OVERRIDE_MISTAKES = {
    "train.step=3": "command line: train.step: unknown option; did you mean 'steps'?",
    "trian.steps=3": "command line: trian: unknown option; did you mean 'train'?",
    "train.steps": "command line: 'train.steps': expected section.key=value",
    "train=3": "command line: 'train=3': expected section.key=value",
    ".=3": "command line: '.=3': expected section.key=value",
    "train.steps.x=3": "command line: train.steps.x: train.steps is not a mapping",
    "train.steps=many": "command line: train.steps: expected an integer; got 'many'",
    "train.steps=": "command line: train.steps: expected an integer; got null",
    "train.steps=[1": "command line: not valid YAML: ",
    "offload.placement.wte=drop": "command line: offload.placement.wte: expected one of resident, stream, dha;",
    "model.width=100": "command line: model.width: 100 is not a multiple of model.heads (6)",
}


@pytest.mark.parametrize("word", OVERRIDE_MISTAKES)
def test_overrides_are_checked_like_the_file(word: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config("model:\n  layers: 2\n", "run.yaml", [word])
    assert str(caught.value).startswith(OVERRIDE_MISTAKES[word])


def test_an_override_does_not_hide_a_mistake_in_the_file() -> None:
    with pytest.raises(ConfigError, match=r"run.yaml:1: train: expected a mapping"):
        parse_config("train: 3", "run.yaml", ["train.steps=5"])
    with pytest.raises(ConfigError, match=r"run.yaml:1: run file: expected a mapping"):
        parse_config("- 3", "run.yaml", ["train.steps=5"])


def test_overrides_win_over_the_file_and_over_earlier_ones() -> None:
    text = "train: {steps: 9}\noffload: {placement: {'*': stream}}\n"
    words = ["train.steps=5", "train.steps=6", "offload.placement.blocks.*=dha", "train.save=", "optimizer.lr=1e-2"]
    config = parse_config(text, "run.yaml", words)
    assert config.train.steps == 6 and config.train.save is None and config.optimizer.lr == 0.01
    # The first matching pattern wins, so one from the command line stands before the file's.
    assert list(config.offload.placement.items()) == [("blocks.*", Placement.DHA), ("*", Placement.STREAM)]


def test_an_override_adds_to_a_single_word() -> None:
    config = parse_config("offload: {placement: stream}", "run.yaml", ["offload.placement.wte=dha"])
    assert config.offload.placement == {"wte": Placement.DHA, "default": Placement.STREAM}
    config = parse_config("", "run.yaml", ["offload.placement=resident"])
    assert config.offload.placement == {"default": Placement.RESIDENT}


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("4096", 4096),
        ("64MiB", 64 << 20),
        ("64 mib", 64 << 20),
        ("1.5GiB", 3 << 29),
        ("2GB", 2 * 10**9),
        ("1TiB", 1 << 40),
        ("1.5", None),
        ("-1MiB", None),
        ("MiB", None),
        ("1e3", None),
        ("", None),
    ],
)
def test_sizes(text: str, size: int | None) -> None:
    assert parse_bytes(text) == size


def test_a_missing_or_unreadable_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nope\.yaml: cannot read the run file: No such file"):
        load_config(tmp_path / "nope.yaml")
    with pytest.raises(ConfigError, match="cannot read the run file: Is a directory"):
        load_config(tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"model: \xff")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load_config(tmp_path / "latin.yaml")


def _values(hint: Any, meta: Any) -> st.SearchStrategy[Any]:
    """Any valid value of an option, from its type and metadata alone."""
    if dataclasses.is_dataclass(hint):
        return _configs(hint)
    args = typing.get_args(hint)
    if type(None) in args:
        return st.none() | _values(args[0], meta)
    origin = typing.get_origin(hint)
    if origin is dict:
        return st.dictionaries(st.text("abc.*[]?:# '\"-0\n", min_size=1), st.sampled_from(list(args[1])), max_size=3)
    if origin is tuple:
        if args[1] is Ellipsis:
            return st.lists(_values(args[0], meta), max_size=3).map(tuple)
        return st.tuples(*[_values(arg, meta) for arg in args])
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return st.sampled_from(list(hint))
    if "choices" in meta:
        return st.sampled_from(meta["choices"])
    if hint is bool:
        return st.booleans()
    if hint is int:
        return st.integers(meta.get("min"), meta.get("max", 1 << 40))
    if hint is float:
        return st.floats(
            meta.get("min", 0.0),
            meta.get("max"),
            allow_nan=False,
            allow_infinity=False,
            exclude_min=bool(meta.get("exclusive_min")),
            exclude_max=bool(meta.get("exclusive_max")),
        )
    assert hint is str
    return st.sampled_from(["out.pt", "no", "null", "true", "1e-4", "0x1", "a: b", "~", "", " x ", "#", "!!int 3"])


def _configs(cls: Any) -> st.SearchStrategy[Any]:
    hints = typing.get_type_hints(cls)
    return st.builds(cls, **{f.name: _values(hints[f.name], f.metadata) for f in dataclasses.fields(cls)})


@settings(max_examples=200, deadline=None)
@given(_configs(RunConfig))
def test_every_config_reads_back_from_its_dump(config: RunConfig) -> None:
    # Options that only make sense together are put right; each alone stays arbitrary.
    config = dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, width=config.model.heads * 2),
        data=dataclasses.replace(config.data, path="x" if config.data.source == "path" else None),
    )
    again = parse_config(dump_config(config), "dump.yaml")
    assert again == config
    assert list(again.offload.placement) == list(config.offload.placement)  # first match wins: order counts


def test_every_option_is_documented(root: Path) -> None:
    """docs/configuration.md has a row for every option, with its default."""
    text = (root / "docs" / "configuration.md").read_text()
    for section in dataclasses.fields(RunConfig):
        part = text.split(f"## {section.name}\n", 1)[1].split("\n## ", 1)[0]
        for option in dataclasses.fields(typing.get_type_hints(RunConfig)[section.name]):
            name = option.metadata.get("yaml", option.name)
            assert f"| `{name}` |" in part, f"{section.name}.{name} is not in docs/configuration.md"


def test_shipped_run_files_load(root: Path) -> None:
    files = sorted((root / "configs").glob("*.yaml"))
    assert files
    for path in files:
        config = load_config(path)
        assert parse_config(dump_config(config), str(path)) == config
