"""A strict reader of YAML into dataclasses, which says where an error is.

Owns: YAML text as a tree that remembers lines, `section.key=value` overrides
written into that tree, and reading it into any dataclass whose fields carry
min, max, exclusive_min, exclusive_max, choices, unit and yaml (the option's
name) in their metadata. Knows no option by name. Must not import torch.
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
import math
import re
import types
import typing
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import yaml

COMMAND_LINE = "command line"
_MAX_DEPTH = 8  # deepest valid nesting is 3; the bound also ends a recursive alias


class ConfigError(ValueError):
    """A mistake in a run file or an override. The text is one line: place, option, what to do."""


def read(cls: Any, text: str, name: str, overrides: Iterable[str] = ()) -> tuple[Any, Callable[[str], str]]:
    """Read `text` into the dataclass `cls`, whose fields are sections (dataclasses too).

    Overrides apply in order. Returns the value and a function from a dotted option to the place
    where it was written. Raises ConfigError; `name` is what its text calls the file.
    """
    root = _parse_yaml(text, name)
    if root.value is None:
        root = _Node({}, name, quoted=False)
    for word in overrides:
        _apply_override(cls, root, word)
    return _read_dataclass(cls, root, ""), lambda option: _place_of(root, option)


def to_plain(value: Any) -> Any:
    """The dicts, lists and scalars that `read` reads back to an equal value."""
    if dataclasses.is_dataclass(value):
        return {name: to_plain(getattr(value, f.name)) for name, f in _fields_by_name(value).items()}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, dict):
        return {key: to_plain(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return [to_plain(item) for item in value]
    return value


# The YAML text as a tree that remembers places.


@dataclass(slots=True)
class _Node:
    """One YAML value: text of a scalar (None for null), a list, or a mapping; and where it was written."""

    value: str | None | list[_Node] | dict[str, _Node]
    place: str
    quoted: bool

    def describe(self) -> str:
        if isinstance(self.value, dict):
            return "a mapping"
        if isinstance(self.value, list):
            return "a list"
        if self.value is None:
            return "null"
        return f"'{self.value}'"


def _parse_yaml(text: str, name: str) -> _Node:
    on_line = name != COMMAND_LINE
    try:
        tree = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{name}:{mark.line + 1}" if mark is not None and on_line else name
        detail = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise ConfigError(f"{place}: not valid YAML: {detail}") from error
    if tree is None:
        return _Node(None, name, quoted=False)
    return _convert(tree, name, on_line, "", 0)


def _convert(tree: yaml.Node, name: str, on_line: bool, prefix: str, depth: int) -> _Node:
    place = f"{name}:{tree.start_mark.line + 1}" if on_line else name
    if depth > _MAX_DEPTH:
        raise ConfigError(f"{place}: nested too deeply")
    if not tree.tag.startswith("tag:yaml.org,2002:") or "python" in tree.tag:
        raise ConfigError(f"{place}: YAML tags are not used in run files: {tree.tag}")
    if isinstance(tree, yaml.MappingNode):
        items: dict[str, _Node] = {}
        for key, child in tree.value:
            where = f"{name}:{key.start_mark.line + 1}" if on_line else name
            if not isinstance(key, yaml.ScalarNode):
                raise ConfigError(f"{where}: an option's name must be a word")
            if key.value in items:
                first = items[key.value].place
                raise ConfigError(f"{where}: {prefix}{key.value}: given twice; the first is at {first}")
            node = _convert(child, name, on_line, f"{prefix}{key.value}.", depth + 1)
            node.place = where  # the key's line: a value may start further down
            items[key.value] = node
        return _Node(items, place, quoted=False)
    if isinstance(tree, yaml.SequenceNode):
        return _Node([_convert(child, name, on_line, prefix, depth + 1) for child in tree.value], place, quoted=False)
    # Scalars keep their text: YAML 1.1 would read 1e-4 as a string, 010 as 8, 1:30 as 90 and `no` as False.
    null = tree.tag.endswith(":null")
    return _Node(None if null else tree.value, place, quoted=tree.style is not None)


def _apply_override(cls: Any, root: _Node, word: str) -> None:
    """Write one `section.key=value` into the tree; keys of a mapping follow after another dot."""
    dotted, equals, text = word.partition("=")
    names = dotted.strip().split(".")
    if not equals or len(names) < 2 or not all(names):
        raise ConfigError(f"{COMMAND_LINE}: '{word}': expected section.key=value")
    value = _parse_yaml(text, COMMAND_LINE)
    section, key, rest = names[0], names[1], ".".join(names[2:])
    sections = _fields_by_name(cls)
    if section not in sections:
        raise ConfigError(_unknown(COMMAND_LINE, "", section, sections))
    options = _fields_by_name(_hints(cls)[section])
    if key not in options:
        raise ConfigError(_unknown(COMMAND_LINE, section, key, options))
    if not isinstance(root.value, dict):
        return  # reading the file itself fails with a better message
    parent = root.value.setdefault(section, _Node({}, COMMAND_LINE, quoted=False))
    if parent.value is None:
        parent.value = {}
    if not isinstance(parent.value, dict):
        return
    if not rest:
        parent.value[key] = value
        return
    if typing.get_origin(_hints(_hints(cls)[section])[options[key].name]) is not dict:
        raise ConfigError(f"{COMMAND_LINE}: {dotted}: {section}.{key} is not a mapping")
    rules = parent.value.get(key)
    if rules is None or rules.value is None:
        old: dict[str, _Node] = {}
    elif isinstance(rules.value, dict):
        old = rules.value
    else:
        old = {"default": rules}
    # In front: the first pattern that matches wins, and the command line wins over the file.
    merged = {rest: value} | {k: v for k, v in old.items() if k != rest}
    parent.value[key] = _Node(merged, COMMAND_LINE, quoted=False)


# From the tree to dataclasses, checked against types and field metadata.


def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _fields_by_name(cls: Any) -> dict[str, dataclasses.Field[Any]]:
    return {f.metadata.get("yaml", f.name): f for f in dataclasses.fields(cls)}


def _unknown(place: str, prefix: str, name: str, known: Iterable[str]) -> str:
    full = f"{prefix}.{name}" if prefix else name
    options = sorted(known)
    close = difflib.get_close_matches(name, options, n=1)
    hint = f"did you mean '{close[0]}'?" if close else f"known: {', '.join(options)}"
    return f"{place}: {full}: unknown option; {hint}"


def _place_of(root: _Node, option: str) -> str:
    """Where an option was written, or where it could be if it is a default."""
    node = root
    for name in option.split("."):
        if not isinstance(node.value, dict) or name not in node.value:
            break
        node = node.value[name]
    return node.place


def _read_dataclass(cls: Any, node: _Node, prefix: str) -> Any:
    if node.value is None:
        return cls()  # `section:` with nothing below it
    if not isinstance(node.value, dict):
        raise ConfigError(f"{node.place}: {prefix or 'run file'}: expected a mapping of options, got {node.describe()}")
    known, hints, values = _fields_by_name(cls), _hints(cls), {}
    for name, child in node.value.items():
        if name not in known:
            raise ConfigError(_unknown(child.place, prefix, name, known))
        option = f"{prefix}.{name}" if prefix else name
        entry = known[name]
        values[entry.name] = _read(hints[entry.name], child, option, entry.metadata)
    return cls(**values)


def _read(hint: Any, node: _Node, option: str, meta: Any) -> Any:
    """The value of one option. Raises ConfigError if its type, range or choice is wrong."""
    if dataclasses.is_dataclass(hint):
        return _read_dataclass(hint, node, option)
    if isinstance(hint, types.UnionType):  # X | None
        if node.value is None:
            return None
        (hint,) = [arg for arg in typing.get_args(hint) if arg is not type(None)]
        return _read(hint, node, option, {**meta, "nullable": True})
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is dict:
        if isinstance(node.value, str):  # one word for everything
            return {"default": _read(args[1], node, option, meta)}
        if node.value is None:
            return {}
        if not isinstance(node.value, dict):
            raise _wrong(node, option, "a word or a mapping from pattern to word", meta)
        return {key: _read(args[1], child, f"{option}.{key}", meta) for key, child in node.value.items()}
    if origin is tuple:
        any_length = len(args) == 2 and args[1] is Ellipsis
        expected = "a list" if any_length else f"a list of {len(args)}"
        if not isinstance(node.value, list) or (not any_length and len(node.value) != len(args)):
            raise _wrong(node, option, expected, meta)
        kinds = [args[0]] * len(node.value) if any_length else list(args)
        return tuple(
            _read(kind, child, f"{option}[{i}]", meta)
            for i, (kind, child) in enumerate(zip(kinds, node.value, strict=True))
        )
    return _read_scalar(hint, node, option, meta)


def _read_scalar(hint: Any, node: _Node, option: str, meta: Any) -> Any:
    text = node.value if isinstance(node.value, str) else None
    plain = text if not node.quoted else None  # "5" in quotes is a string
    value: Any
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        words = [str(member.value) for member in hint]
        if text not in words:
            raise _wrong(node, option, _one_of(text, words), meta)
        return hint(text)
    if hint is bool:
        if plain not in ("true", "false", "True", "False"):
            raise _wrong(node, option, "true or false", meta)
        return plain.lower() == "true"
    if hint is str:
        if text is None or (not node.quoted and text in ("true", "false")):
            raise _wrong(node, option, "a word", meta)
        value = text
    elif hint is int and meta.get("unit") == "bytes":
        value = parse_bytes(text or "")
        if value is None:
            raise _wrong(node, option, "bytes such as 64MiB, 1.5GiB or an integer", meta)
    elif hint is int:
        if plain is None or not re.fullmatch(r"[+-]?[0-9][0-9_]{0,30}", plain):
            raise _wrong(node, option, "an integer", meta)
        value = int(plain.replace("_", ""))
    elif hint is float:
        try:
            value = float(plain or "")
        except ValueError:
            raise _wrong(node, option, "a number", meta) from None
        if not math.isfinite(value):
            raise _wrong(node, option, "a finite number", meta)
    else:
        raise TypeError(f"option {option}: the loader does not know the type {hint}")
    if meta.get("choices") and value not in meta["choices"]:
        raise _wrong(node, option, _one_of(text, meta["choices"]), meta)
    _check_range(value, node, option, meta)
    return value


def _check_range(value: Any, node: _Node, option: str, meta: Any) -> None:
    low, high = meta.get("min"), meta.get("max")
    unit = f" {meta['unit']}" if "unit" in meta else ""
    if low is not None and (value <= low if meta.get("exclusive_min") else value < low):
        bound = f"above {low}" if meta.get("exclusive_min") else f"at least {low}"
        raise ConfigError(f"{node.place}: {option}: must be {bound}{unit}, got {value}")
    if high is not None and (value >= high if meta.get("exclusive_max") else value > high):
        bound = f"below {high}" if meta.get("exclusive_max") else f"at most {high}"
        raise ConfigError(f"{node.place}: {option}: must be {bound}{unit}, got {value}")


def _one_of(text: str | None, words: Iterable[str]) -> str:
    words = list(words)
    close = difflib.get_close_matches(text or "", words, n=1)
    hint = f" (did you mean '{close[0]}'?)" if close else ""
    return f"one of {', '.join(words)}{hint}"


def _wrong(node: _Node, option: str, expected: str, meta: Any) -> ConfigError:
    if meta.get("nullable"):
        expected += ", or null"
    got = f"the quoted string {node.describe()}" if node.quoted else node.describe()
    return ConfigError(f"{node.place}: {option}: expected {expected}; got {got}")


_UNITS = {"": 1, "b": 1} | {
    f"{prefix}{suffix}": base ** (i + 1)
    for suffix, base in (("ib", 1024), ("b", 1000))
    for i, prefix in enumerate("kmgt")
}


def parse_bytes(text: str) -> int | None:
    """Bytes in "64MiB", "1.5 GiB", "200MB" (decimal) or "4096"; a fraction of a byte is dropped. None: not a size."""
    match = re.fullmatch(r"([0-9][0-9_]{0,30}(?:\.[0-9]+)?)\s*([A-Za-z]*)", text.strip())
    if match is None or match[2].lower() not in _UNITS or ("." in match[1] and not match[2]):
        return None
    number = match[1].replace("_", "")
    scale = _UNITS[match[2].lower()]
    return int(float(number) * scale) if "." in number else int(number) * scale
