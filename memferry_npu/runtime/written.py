"""Weights that the user wrote in place between steps.

Owns: noticing it (the version counter of the parameter moved) and taking the written
weights over into the master. Writes through `p.data` leave no trace and are not seen.
"""

from __future__ import annotations

import warnings

import torch

from ..backend.base import Backend, Span
from ..memory.shadow import ShadowParam, Unit
from ..memory.store import Store, memory_order
from ..transfer.direct import store


def import_written(backend: Backend, store_: Store, *, warn: bool = True) -> list[Unit]:
    """Make the master of every parameter that was written equal to its working weights.

    The whole parameter is re-seeded: what was written is the weight, and low bits that the
    master had beyond the working dtype are gone. Returns the units concerned.
    """
    found = [(unit, s) for unit in store_.units for s in unit.params if s.written_by_user()]
    if not found:
        return []
    touched = []
    for unit, shadow in found:
        if unit.resident is not None:
            at = shadow.working.offset - unit.working.offset
            device = Span(unit.resident.buffer, unit.resident.offset + at, shadow.working.nbytes)
            store(backend, [(shadow.working, device)], device.nbytes, backend.compute.record()).synchronize()
        if unit not in touched:
            touched.append(unit)
    backend.compute.record().synchronize()
    for _, shadow in found:
        if shadow.master is not None or shadow.low is not None:
            backend.host_access("import weights", reads=(shadow.working,), writes=shadow.state_spans[:1])
            with backend.internal():
                store_.seed(shadow, shadow.working_cpu.clone())
        shadow.mark_seen()
    if warn:
        names = ", ".join(s.name for _, s in found[:3]) + (" and others" if len(found) > 3 else "")
        message = f"{names}: written in place since the last step; the master follows"
        warnings.warn(message, RuntimeWarning, stacklevel=4)
    return touched


class LoadedWeights:
    """Around `model.load_state_dict`: keep the master's low bits where the weights stay the same.

    State over time: between `before` and `after`, the masters of parameters that will change.
    """

    def __init__(self, backend: Backend, store_: Store) -> None:
        self._backend, self._store = backend, store_
        self._masters: dict[ShadowParam, tuple[torch.Tensor, torch.Tensor]] = {}
        self._same: list[ShadowParam] = []

    def before(self, state_dict: dict[str, torch.Tensor], prefix: str) -> None:
        """Remember master and working weights of the parameters that `state_dict` names."""
        self._masters.clear()
        self._same.clear()
        for shadow in self._store.shadows.values():
            if shadow.master is None and shadow.low is None:
                continue
            names = [prefix + name for name in shadow.names if prefix + name in state_dict]
            if not names:
                continue
            self._backend.host_access("read master", reads=(*shadow.state_spans[:1], shadow.working))
            with self._backend.internal(), torch.no_grad():
                loaded = state_dict[names[-1]]
                if tuple(loaded.shape) != shadow.shape.size:
                    continue
                new = memory_order(loaded.detach().to(shadow.shape.dtype), shadow.shape)
                if torch.equal(new.view(torch.int16), shadow.working_cpu.view(torch.int16)):
                    self._same.append(shadow)
                else:
                    self._masters[shadow] = (self._store.master_values(shadow).clone(), shadow.working_cpu.clone())

    def after(self) -> None:
        """Masters: as before where the working weight is as before, else the loaded weight."""
        for shadow in self._same:
            shadow.mark_seen()
        import_written(self._backend, self._store, warn=False)
        for shadow, (master, old) in self._masters.items():
            self._backend.host_access(
                "keep master", reads=(shadow.working,), writes=(*shadow.state_spans[:1], shadow.working)
            )
            with self._backend.internal(), torch.no_grad():
                new = shadow.working_cpu.clone()
                same = new.view(torch.int16) == old.view(torch.int16)
                self._store.seed(shadow, torch.where(same, master, new.to(torch.float32)))
        self._masters.clear()
