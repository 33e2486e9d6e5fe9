"""Nodes from presets and files, to files, and small changes to them.

Owns preset look-up and file names in errors. Must not import torch or memferry_npu.
"""

from __future__ import annotations

import os
import re
import tempfile
from dataclasses import replace
from pathlib import Path

from .codec import TopologyError, Where, did_you_mean, line_of, parse_json, parse_yaml
from .model import Node

_PRESETS = Path(__file__).parent / "presets"


def list_presets() -> tuple[str, ...]:
    """Names of the presets that come with the package, sorted."""
    return tuple(sorted(path.stem for path in _PRESETS.glob("*.yaml")))


def load_node(preset_or_path: str | os.PathLike[str]) -> Node:
    """The node of a preset name or of a YAML or JSON file.

    A name without a slash and a suffix is a preset. TopologyError names file and line, or near preset names.
    """
    text = os.fspath(preset_or_path)
    if re.fullmatch(r"[A-Za-z0-9_-]+", text) and (text in list_presets() or not os.path.exists(text)):
        if text not in list_presets():
            raise TopologyError(f"no preset and no file {text!r}{did_you_mean(text, list_presets())}")
        path = _PRESETS / f"{text}.yaml"
        return parse_node(path.read_text(encoding="utf-8"), f"preset {text}")
    try:
        content = Path(text).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise TopologyError(f"cannot read: {reason}", origin=text) from None
    return parse_node(content, text, json=True if text.endswith(".json") else None)


def parse_node(text: str, origin: str | None = None, *, json: bool | None = None) -> Node:
    """The node in a text. `json` None = JSON if the text begins with a brace, else YAML."""
    if json is None:
        json = text.lstrip()[:1] == "{"
    lines: dict[Where, int] = {}
    if json:
        tree = parse_json(text, origin)
    else:
        tree, lines = parse_yaml(text, origin)
    try:
        return Node.from_tree(tree)
    except TopologyError as error:
        error.origin = origin
        error.line = line_of(error.where, lines)
        raise


def save_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a file whole or not at all: a temporary file beside it, then a rename. TopologyError if it cannot be."""
    target = Path(path)
    temporary = None
    try:
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".tmp")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, target)
        temporary = None
    except OSError as error:
        raise TopologyError(f"cannot write: {error.strerror or error}", origin=str(target)) from None
    finally:
        if temporary is not None:
            os.unlink(temporary)


def save_node(node: Node, path: str | os.PathLike[str]) -> None:
    """Write a node as JSON (`.json`) or YAML (`.yaml`, `.yml`), whole or not at all."""
    suffix = Path(path).suffix
    if suffix not in (".json", ".yaml", ".yml"):
        raise TopologyError("a node file ends in .json, .yaml or .yml", origin=os.fspath(path))
    save_text(path, node.to_json() if suffix == ".json" else node.to_yaml())


def replace_memory(node: Node, device_memory_bytes: int) -> Node:
    """The same node with another memory size on every device (to plan for a smaller card)."""
    return replace(node, devices=tuple(replace(device, memory_bytes=device_memory_bytes) for device in node.devices))
