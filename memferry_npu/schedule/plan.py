"""The plan: per unit where its weights lie, how its gradients leave, who updates it.

Owns: the `Plan` value, its JSON form and its hash. A plan is made by a planner or by
hand, validated once, and replayed by the runtime; it holds no tensors and no device.
Must not import torch.

JSON: first key `schema: memferry.plan/1`; unknown keys and other major versions are errors.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
from dataclasses import dataclass
from typing import Any

SCHEMA = "memferry.plan/1"
ARITHMETIC = "memferry.arithmetic/1"
"""Version of docs/arithmetic.md that the results follow."""


class PlanError(ValueError):
    """A plan that contradicts itself, or text that is not a plan."""


class Placement(str, enum.Enum):
    """Where a unit's working weights lie while the accelerator computes."""

    RESIDENT = "resident"
    """In device memory for the whole run; uploaded once per update."""
    STREAM = "stream"
    """In host memory; transmitted into a device slot before each use."""
    DHA = "dha"
    """In host memory; kernels read them there (Direct Host Access)."""


class GradientPath(str, enum.Enum):
    """How a unit's gradients leave the device during backward."""

    KEEP = "keep"
    """They stay in device memory until `step()`."""
    COPY = "copy"
    """A copy engine moves them to host memory as they appear (D2H)."""
    DHA_WRITE = "dha_write"
    """A kernel writes them to mapped host memory and takes their norm."""


class UpdateSite(str, enum.Enum):
    """Who runs the optimizer on a unit."""

    HOST = "host"


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitPlan:
    """Decisions for one unit."""

    name: str
    params: tuple[str, ...]
    """Names of the parameters that the unit owns (a tied parameter is owned once)."""
    working_bytes: int
    """Working weights with alignment: the bytes of one load."""
    placement: Placement
    gradient: GradientPath
    update: UpdateSite = UpdateSite.HOST
    slot: int | None = None
    """Device slot of a STREAM unit; None for the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NumericsKey:
    """What may change results. Fixed for a run and stored in checkpoints."""

    arithmetic: str = ARITHMETIC
    compute_dtype: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A whole run, units in forward order. Everything but `numerics` changes speed only."""

    units: tuple[UnitPlan, ...]
    slot_bytes: tuple[int, ...]
    """Size of each device slot."""
    device_static_bytes: int
    """Device memory reserved at start: resident weights, slots, kept accumulators."""
    host_bytes: int
    """Pinned host memory reserved at start."""
    accumulation_steps: int = 1
    split_master: bool = False
    numerics: NumericsKey = NumericsKey()

    def __post_init__(self) -> None:
        seen: set[str] = set()
        owned: set[str] = set()
        for unit in self.units:
            if unit.name in seen:
                raise PlanError(f"unit '{unit.name}' appears twice")
            seen.add(unit.name)
            for name in unit.params:
                if name in owned:
                    raise PlanError(f"parameter '{name}' is owned by two units")
                owned.add(name)
            if (unit.placement is Placement.STREAM) != (unit.slot is not None):
                raise PlanError(f"unit '{unit.name}': exactly the streamed units have a slot")
            if unit.slot is not None:
                if not 0 <= unit.slot < len(self.slot_bytes):
                    raise PlanError(f"unit '{unit.name}': slot {unit.slot} of {len(self.slot_bytes)}")
                if unit.working_bytes > self.slot_bytes[unit.slot]:
                    raise PlanError(
                        f"unit '{unit.name}': {unit.working_bytes} bytes do not fit slot {unit.slot} "
                        f"of {self.slot_bytes[unit.slot]} bytes"
                    )

    def to_json(self) -> str:
        """Indented JSON; `from_json` gives the same value back."""
        return json.dumps({"schema": SCHEMA, **_plain(self)}, indent=1)

    @staticmethod
    def from_json(text: str) -> Plan:
        """Raises PlanError naming what is wrong."""
        try:
            tree = json.loads(text)
        except json.JSONDecodeError as error:
            raise PlanError(f"line {error.lineno}: not JSON: {error.msg}") from None
        if not isinstance(tree, dict):
            raise PlanError("a plan is a JSON object")
        schema = tree.pop("schema", None)
        if schema != SCHEMA:
            raise PlanError(f"schema is {schema!r}; this version reads '{SCHEMA}'")
        return _build(tree)

    def hash(self) -> str:
        """sha256 over canonical JSON: equal on all ranks that run the same plan."""
        canonical = json.dumps({"schema": SCHEMA, **_plain(self)}, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()


def _plain(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.value
    if dataclasses.is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, tuple):
        return [_plain(v) for v in value]
    return value


def _take(cls: type, tree: Any, where: str) -> dict[str, Any]:
    if not isinstance(tree, dict):
        raise PlanError(f"{where}: expected an object, found {type(tree).__name__}")
    fields = {f.name: f for f in dataclasses.fields(cls)}
    for key in tree:
        if key not in fields:
            raise PlanError(f"{where}: unknown key '{key}'")
    for name, f in fields.items():
        if name not in tree and f.default is dataclasses.MISSING:
            raise PlanError(f"{where}: '{name}' is missing")
    return dict(tree)


def _int(value: Any, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise PlanError(f"{where}: {value!r} is not a whole number of at least 0")
    return value


def _member(kind: type[enum.Enum], value: Any, where: str) -> Any:
    try:
        return kind(value)
    except ValueError:
        raise PlanError(f"{where}: {value!r} is not one of {', '.join(str(m.value) for m in kind)}") from None


def _strings(value: Any, where: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
        raise PlanError(f"{where}: expected a list of names")
    return tuple(value)


def _build(tree: dict[str, Any]) -> Plan:
    plan = _take(Plan, tree, "plan")
    if not isinstance(plan["units"], list) or not isinstance(plan["slot_bytes"], list):
        raise PlanError("plan: 'units' and 'slot_bytes' are lists")
    units = []
    for index, raw in enumerate(plan["units"]):
        where = f"units[{index}]"
        unit = _take(UnitPlan, raw, where)
        if not isinstance(unit["name"], str):
            raise PlanError(f"{where}.name: {unit['name']!r} is not a name")
        unit["params"] = _strings(unit["params"], f"{where}.params")
        unit["working_bytes"] = _int(unit["working_bytes"], f"{where}.working_bytes")
        unit["placement"] = _member(Placement, unit["placement"], f"{where}.placement")
        unit["gradient"] = _member(GradientPath, unit["gradient"], f"{where}.gradient")
        unit["update"] = _member(UpdateSite, unit.get("update", "host"), f"{where}.update")
        if unit.get("slot") is not None:
            unit["slot"] = _int(unit["slot"], f"{where}.slot")
        units.append(UnitPlan(**unit))
    plan["units"] = tuple(units)
    plan["slot_bytes"] = tuple(_int(v, f"slot_bytes[{i}]") for i, v in enumerate(plan["slot_bytes"]))
    for name in ("device_static_bytes", "host_bytes", "accumulation_steps"):
        if name in plan:
            plan[name] = _int(plan[name], name)
    if not isinstance(plan.get("split_master", False), bool):
        raise PlanError(f"split_master: {plan['split_master']!r} is not true or false")
    if "numerics" in plan:
        numerics = _take(NumericsKey, plan["numerics"], "numerics")
        for key, value in numerics.items():
            if not (isinstance(value, str) or (value is None and key == "compute_dtype")):
                raise PlanError(f"numerics.{key}: {value!r} is not text")
        plan["numerics"] = NumericsKey(**numerics)
    return Plan(**plan)
