"""Frozen dataclasses to plain trees and back, and trees to YAML or JSON text with places in every error.

Owns the exact round trip, the unknown-key errors and `TopologyError`. Knows nothing about nodes.
Must import nothing but the standard library and yaml.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import math
import types
import typing
from enum import Enum
from typing import Any, TypeVar

import yaml

Where = tuple[str | int, ...]
Scalar = str | int | float | bool | None
Table = tuple[tuple[str, Scalar], ...]
"""A small free-form mapping, kept as pairs so that it is hashable; a mapping in the tree."""

T = TypeVar("T")

_MAX_TEXT = 16 << 20
_MAX_VALUES = 400_000


class TopologyError(ValueError):
    """A node description, tool output or measurement that cannot be used; says where, what and what to do."""

    def __init__(self, message: str, *, where: Where = (), origin: str | None = None, line: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.where = where
        self.origin = origin
        self.line = line

    def __str__(self) -> str:
        place = self.origin or ""
        if self.line is not None:
            place += f"{':' if place else 'line '}{self.line}"
        path = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in self.where).lstrip(".")
        return ": ".join(part for part in (place, path, self.message) if part)


def to_tree(value: Any) -> Any:
    """Plain dicts, lists and scalars; fields that equal their default are left out."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        hints, tree = _hints(type(value)), {}
        for field in dataclasses.fields(value):
            item = getattr(value, field.name)
            if field.default is not dataclasses.MISSING and item == field.default:
                continue
            tree[field.name] = (
                dict(item) if Table in (hints[field.name], *typing.get_args(hints[field.name])) else to_tree(item)
            )
        return tree
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, tuple):
        return [to_tree(item) for item in value]
    return value


def from_tree(cls: type[T], tree: Any, where: Where = ()) -> T:
    """The dataclass `cls` from a plain tree; TopologyError names the place of anything that does not fit."""
    if not isinstance(tree, dict):
        raise TopologyError(f"expected a mapping, found {_show(tree)}", where=where)
    hints = _hints(typing.cast(type, cls))
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for key in tree:
        if key not in fields:
            raise TopologyError(f"unknown key {key!r}{did_you_mean(key, fields)}", where=where)
    values = {}
    for name, field in fields.items():
        if name in tree:
            values[name] = _decode(hints[name], tree[name], (*where, name))
        elif field.default is dataclasses.MISSING:
            raise TopologyError(f"key {name!r} is missing", where=where)
    try:
        return cls(**values)
    except TopologyError as error:
        error.where = (*where, *error.where)
        raise


def did_you_mean(word: object, known: typing.Iterable[str]) -> str:
    """`; did you mean 'x'?` for the nearest known word, else the list of known words."""
    words = sorted(known)
    near = difflib.get_close_matches(str(word), words, n=1)
    if near:
        return f"; did you mean {near[0]!r}?"
    return f"; known: {', '.join(words)}" if words else ""


def check_text(value: Any, where: Where = ()) -> None:
    """TopologyError unless every text in a dataclass tree is one printable line (so that YAML and JSON keep it)."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            check_text(getattr(value, field.name), (*where, field.name))
    elif isinstance(value, tuple):
        for i, item in enumerate(value):
            check_text(item, (*where, i))
    elif isinstance(value, str) and not value.isprintable():
        raise TopologyError(f"text must be one printable line, found {_show(value)}", where=where)


def canonical_json(tree: Any) -> str:
    """One text per tree: sorted keys, no spaces, shortest exact floats."""
    return json.dumps(tree, sort_keys=True, separators=(",", ":"), allow_nan=False)


def parse_json(text: str, origin: str | None = None) -> Any:
    """A tree from JSON text. Duplicate keys, NaN and infinities are TopologyErrors."""
    _check_size(text, origin)
    try:
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        raise TopologyError(f"not JSON: {error.msg} (column {error.colno})", origin=origin, line=error.lineno) from None
    except TopologyError as error:
        error.origin = origin
        raise
    except (ValueError, RecursionError) as error:
        raise TopologyError(f"not JSON: {error}", origin=origin) from None


def parse_yaml(text: str, origin: str | None = None) -> tuple[Any, dict[Where, int]]:
    """A tree from YAML text, and the line of every place in it.

    Plain scalars only (no dates, no tags); anchors and aliases are fine, duplicate keys are errors.
    """
    _check_size(text, origin)
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        lines: dict[Where, int] = {}
        return _plain(root, (), lines, set()) if root is not None else None, lines
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark is not None else None
        raise TopologyError(f"not YAML: {error.problem or error.context}", origin=origin, line=line) from None
    except TopologyError as error:
        error.origin = origin
        raise
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise TopologyError(f"not YAML: {' '.join(str(error).split())}", origin=origin) from None


def dump_yaml(tree: Any) -> str:
    """YAML text with leaf collections on one line, keys in the order of the tree."""
    return yaml.safe_dump(tree, sort_keys=False, default_flow_style=None, width=160, allow_unicode=True)


def line_of(where: Where, lines: dict[Where, int]) -> int | None:
    """The line of a place, or of the nearest enclosing one."""
    while where and where not in lines:
        where = where[:-1]
    return lines.get(where)


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _decode(hint: Any, tree: Any, where: Where) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType) and hint != Scalar:
        if tree is None:
            return None
        return _decode(next(arg for arg in args if arg is not type(None)), tree, where)
    if hint == Table:
        if not isinstance(tree, dict):
            raise TopologyError(f"expected a mapping, found {_show(tree)}", where=where)
        return tuple((key, _decode(Scalar, item, (*where, key))) for key, item in tree.items())
    if origin is tuple:
        if not isinstance(tree, list):
            raise TopologyError(f"expected a list, found {_show(tree)}", where=where)
        return tuple(_decode(args[0], item, (*where, i)) for i, item in enumerate(tree))
    if hint == Scalar:
        if tree is None or isinstance(tree, (str, int, float, bool)):
            return tree
        raise TopologyError(f"expected a plain value, found {_show(tree)}", where=where)
    if dataclasses.is_dataclass(hint):
        return from_tree(hint, tree, where)  # type: ignore[arg-type]
    if issubclass(hint, Enum):
        words = [member.value for member in hint]
        if not isinstance(tree, str) or tree not in words:
            raise TopologyError(f"unknown value {_show(tree)}{did_you_mean(tree, words)}", where=where)
        return hint(tree)
    if hint is float and isinstance(tree, int) and not isinstance(tree, bool):
        try:
            tree = float(tree)
        except OverflowError:
            raise TopologyError("number out of range", where=where) from None
    if not isinstance(tree, hint) or (hint is int and isinstance(tree, bool)):
        want = {float: "a number", int: "a whole number", str: "text (in quotes?)", bool: "true or false"}[hint]
        raise TopologyError(f"expected {want}, found {_show(tree)}", where=where)
    if hint is float and not math.isfinite(tree):
        raise TopologyError(f"expected a finite number, found {tree}", where=where)
    return tree


def _plain(node: yaml.Node, where: Where, lines: dict[Where, int], open_nodes: set[int]) -> Any:
    line = node.start_mark.line + 1
    lines[where] = line
    if len(lines) > _MAX_VALUES:
        raise TopologyError("too many values (aliases expand too far)", where=where[:4], line=line)
    if id(node) in open_nodes:
        raise TopologyError("an alias contains itself", where=where[:4], line=line)
    if isinstance(node, yaml.ScalarNode):
        return _scalar(node, where, line)
    open_nodes.add(id(node))
    result: Any
    if isinstance(node, yaml.SequenceNode):
        result = [_plain(item, (*where, i), lines, open_nodes) for i, item in enumerate(node.value)]
    else:
        result = {}
        for key_node, item in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise TopologyError("keys must be plain words", where=where, line=key_node.start_mark.line + 1)
            key = key_node.value
            if key in result:
                raise TopologyError(f"key {key!r} appears twice", where=where, line=key_node.start_mark.line + 1)
            result[key] = _plain(item, (*where, key), lines, open_nodes)
    open_nodes.discard(id(node))
    return result


def _scalar(node: yaml.ScalarNode, where: Where, line: int) -> Scalar:
    kind = node.tag.rpartition(":")[2]
    if not node.tag.startswith("tag:yaml.org,2002:") or kind not in ("str", "int", "float", "bool", "null"):
        raise TopologyError(f"value {node.value!r}: only text, numbers, true, false and null", where=where, line=line)
    if kind == "str":
        return node.value
    try:
        return yaml.constructor.SafeConstructor().construct_object(node)
    except (ValueError, IndexError, KeyError, yaml.YAMLError):
        raise TopologyError(f"value {node.value!r} is not a number", where=where, line=line) from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, value in pairs:
        if key in tree:
            raise TopologyError(f"key {key!r} appears twice")
        tree[key] = value
    return tree


def _no_constant(word: str) -> None:
    raise TopologyError(f"{word} is not a number that a node may hold")


def _check_size(text: str, origin: str | None) -> None:
    if len(text) > _MAX_TEXT:
        raise TopologyError(f"{len(text)} characters; at most {_MAX_TEXT} are read", origin=origin)


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
