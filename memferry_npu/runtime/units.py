"""Units: which parameters are placed and moved together.

Owns: finding them in a model, or taking them from the policy, and resolving rules over
their names into a `Plan`. Must not touch a device.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import nn

from ..memory.store import StoreOptions, UnitSpec, sizes, unit_bytes
from ..schedule.plan import GradientPath, NumericsKey, Placement, Plan, UnitPlan
from .policy import OffloadPolicy

_V = TypeVar("_V", Placement, GradientPath)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitModule:
    """A unit as found in the model."""

    name: str
    module: nn.Module
    params: tuple[tuple[tuple[str, ...], nn.Parameter], ...]
    """(all names in the model, parameter) of the parameters it owns."""
    borrows: tuple[str, ...]
    """Units that own parameters which this one's modules use too (tied weights)."""
    own_slot: bool
    """It is in use together with other units: it contains or shares with another one."""


def find_units(model: nn.Module, names: tuple[str, ...] = ()) -> list[UnitModule]:
    """Units in registration order, which is forward order for most models.

    Without `names`: each child of a ModuleList or Sequential whose children repeat a class
    is a unit; every other module that owns parameters directly is a unit of its own
    (embeddings, final norm, head, parameters of the root). With `names`: those modules, and
    what they leave over as above.

    Raises:
        ValueError: a name that is not a module, or no parameters at all.
    """
    modules = dict(model.named_modules())
    for name in names:
        if name not in modules:
            near = [n for n in modules if n.split(".")[-1] == name.split(".")[-1]][:3]
            hint = f"; did you mean {', '.join(repr(n) for n in near)}?" if near else ""
            raise ValueError(f"units: the model has no module '{name}'{hint}")
    roots = {name: modules[name] for name in names} or _blocks(model)
    owner: dict[int, str] = {}
    for name in sorted(roots, key=lambda n: -n.count(".")):
        for module in roots[name].modules():
            owner.setdefault(id(module), name)
    found: dict[str, list[nn.Parameter]] = {}
    users: dict[nn.Parameter, list[str]] = {}
    param_names: dict[nn.Parameter, list[str]] = {}
    for module_name, module in model.named_modules():
        unit = owner.get(id(module), module_name)
        for leaf, param in module.named_parameters(recurse=False):
            found.setdefault(unit, [])
            if param not in users:
                found[unit].append(param)
            if unit not in users.setdefault(param, []):
                users[param].append(unit)
            param_names.setdefault(param, []).append(f"{module_name}.{leaf}" if module_name else leaf)
    if not found:
        raise ValueError("the model has no parameters")
    borrowed = {units[0] for units in users.values() if len(units) > 1}
    out = []
    for unit in found:
        borrows = tuple(dict.fromkeys(us[0] for us in users.values() if unit in us[1:]))
        contains = any(other != unit and (unit == "" or other.startswith(unit + ".")) for other in found)
        out.append(
            UnitModule(
                name=unit or "(root)",
                module=modules[unit],
                params=tuple((tuple(param_names[p]), p) for p in found[unit]),
                borrows=tuple(b or "(root)" for b in borrows),
                own_slot=contains or unit in borrowed,
            )
        )
    return out


def _blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Children of repeated-block containers, outermost containers only."""
    out: dict[str, nn.Module] = {}
    inside: list[str] = []
    for name, module in model.named_modules():
        if any(name.startswith(prefix) for prefix in inside):
            continue
        if isinstance(module, nn.ModuleList | nn.Sequential):
            children = [(n, c) for n, c in module.named_children() if any(True for _ in c.parameters())]
            kinds = [type(c) for _, c in children]
            if len(children) > len(set(kinds)):
                inside.append(f"{name}." if name else "")
                out.update({f"{name}.{n}" if name else n: c for n, c in children})
    return out


def store_options(policy: OffloadPolicy) -> StoreOptions:
    return StoreOptions(
        split_master=policy.split_master,
        accumulate=policy.accumulation_steps > 1,
        compute_dtype=None if policy.compute_dtype is None else getattr(torch, policy.compute_dtype),
    )


def plan_by_hand(units: list[UnitModule], trainable: set[nn.Parameter], policy: OffloadPolicy) -> Plan:
    """The plan that the policy's rules spell out. Streamed units take the slots in turn.

    Raises:
        ValueError: a rule that matches no unit, or a value that is not a placement or path.
    """
    options = store_options(policy)
    placements = {
        u.name: _rule("placement", policy.placement, u.name, Placement, Placement.STREAM) for u in units
    }
    gradients = {u.name: _rule("gradient", policy.gradient, u.name, GradientPath, GradientPath.COPY) for u in units}
    for option, rules in (("placement", policy.placement), ("gradient", policy.gradient)):
        for pattern in rules:
            if pattern != "default" and not any(fnmatch.fnmatchcase(u.name, pattern) for u in units):
                raise ValueError(
                    f"{option}: pattern '{pattern}' matches no unit; units are {', '.join(u.name for u in units)}"
                )
    slots: dict[str, int] = {}
    streamed = [u for u in units if placements[u.name] is Placement.STREAM and u.params]
    shared = [u for u in streamed if not u.own_slot]
    turns = min(policy.slots, len(shared))
    for i, unit in enumerate(shared):
        slots[unit.name] = i % turns
    for unit in streamed:
        if unit.own_slot:
            slots[unit.name] = turns
            turns += 1
    specs = [
        UnitSpec(
            name=u.name,
            params=u.params,
            # A unit that owns nothing (a tied head) has nothing to move.
            placement=(placements[u.name] if u.params else Placement.DHA).value,
            gradient=gradients[u.name].value,
            slot=slots.get(u.name),
        )
        for u in units
    ]
    total = sizes(specs, trainable, options)
    return Plan(
        units=tuple(
            UnitPlan(
                name=spec.name,
                params=tuple(names[0] for names, _ in spec.params),
                working_bytes=unit_bytes(spec, options),
                placement=Placement(spec.placement),
                gradient=GradientPath(spec.gradient),
                slot=spec.slot,
            )
            for spec in specs
        ),
        slot_bytes=total.slots,
        device_static_bytes=total.device,
        host_bytes=total.host,
        accumulation_steps=policy.accumulation_steps,
        split_master=policy.split_master,
        numerics=NumericsKey(compute_dtype=policy.compute_dtype),
    )


def _rule(option: str, rules: Mapping[str, _V], name: str, kind: type[_V], default: _V) -> _V:
    value: object = rules.get("default", default)
    for pattern, candidate in rules.items():
        if pattern != "default" and fnmatch.fnmatchcase(name, pattern):
            value = candidate
            break
    try:
        return kind(value)
    except ValueError:
        raise ValueError(
            f"{option}: {value!r} for unit '{name}' is not one of {', '.join(m.value for m in kind)}"
        ) from None


def unit_specs(units: list[UnitModule], plan: Plan) -> list[UnitSpec]:
    """The plan applied to a model.

    Raises:
        ValueError: the plan is for another model.
    """
    by_name = {u.name: u for u in units}
    if [u.name for u in plan.units if u.name in by_name] != [u.name for u in plan.units] or len(units) != len(
        plan.units
    ):
        raise ValueError(
            f"the plan's units ({', '.join(u.name for u in plan.units)}) are not the model's ({', '.join(by_name)})"
        )
    specs = []
    for unit in plan.units:
        found = by_name[unit.name]
        names = tuple(names[0] for names, _ in found.params)
        if names != unit.params:
            raise ValueError(f"unit '{unit.name}' owns {names} in the model and {unit.params} in the plan")
        specs.append(
            UnitSpec(
                name=unit.name,
                params=found.params,
                placement=unit.placement.value,
                gradient=unit.gradient.value,
                slot=unit.slot,
            )
        )
    return specs
