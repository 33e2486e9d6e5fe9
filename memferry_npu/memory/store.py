"""All storages of an offloaded model: slabs, slots and shadow parameters, made once.

Owns: sizing, reserving and releasing them, and putting parameters back when a run ends.
Must not import transfer, schedule, optim or runtime.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from ..backend.base import ALIGN_BYTES, Backend, Buffer, DeviceBuffer, HostBuffer, Span, align_up
from ..backend.hostops import HostOps
from .gradients import GradSlot
from .layout import Shape, flat, pack, shape_of
from .shadow import ShadowParam, Slot, Unit, bind_resident, bind_slot, slab_view

CHUNK_ELEMENTS = 65_536
"""Chunk of the squared norm (docs/arithmetic.md)."""

SUPPORTED = (torch.float32, torch.bfloat16)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitSpec:
    """What the runtime asks for one unit. `params` are (names, parameter), owner first."""

    name: str
    params: tuple[tuple[tuple[str, ...], nn.Parameter], ...]
    placement: str
    gradient: str
    slot: int | None
    """Index into the slots for streamed units."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreOptions:
    split_master: bool
    accumulate: bool
    """Reserve fp32 accumulators at start."""
    compute_dtype: torch.dtype | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Bytes that a store reserves, by what they are for."""

    working: int
    master: int
    moments: int
    gradients: int
    accumulators: int
    statistics: int
    resident: int
    slots: tuple[int, ...]
    kept: int

    @property
    def device(self) -> int:
        return self.resident + sum(self.slots) + self.kept

    @property
    def host(self) -> int:
        return self.working + self.master + self.moments + self.gradients + self.accumulators + self.statistics


def working_dtype(param: torch.Tensor, options: StoreOptions) -> torch.dtype:
    return options.compute_dtype or param.dtype


def unit_bytes(spec: UnitSpec, options: StoreOptions) -> int:
    """Bytes of a unit's working weights with the alignment of every parameter."""
    return sum(align_up(p.numel() * working_dtype(p, options).itemsize) for _, p in spec.params)


def sizes(specs: list[UnitSpec], trainable: set[nn.Parameter], options: StoreOptions) -> Sizes:
    """What `Store` will reserve. Pure."""
    total = dict.fromkeys(("working", "master", "moments", "gradients", "accumulators", "statistics", "kept"), 0)
    slots: dict[int, int] = {}
    resident = 0
    for spec in specs:
        nbytes = unit_bytes(spec, options)
        total["working"] += nbytes
        if spec.placement == "resident":
            resident += nbytes
        elif spec.placement == "stream":
            assert spec.slot is not None
            slots[spec.slot] = max(slots.get(spec.slot, 0), nbytes)
        for _, param in spec.params:
            if param not in trainable:
                continue
            n, dtype = param.numel(), working_dtype(param, options)
            if dtype is torch.bfloat16:
                total["master"] += align_up(n * (2 if options.split_master else 4))
            total["moments"] += 2 * align_up(n * 4)
            total["gradients"] += align_up(n * dtype.itemsize)
            total["statistics"] += align_up(-(-n // CHUNK_ELEMENTS) * 4) + ALIGN_BYTES
            if options.accumulate:
                total["accumulators"] += align_up(n * 4)
                if spec.gradient == "keep":
                    total["kept"] += align_up(n * 4)
    return Sizes(resident=resident, slots=tuple(slots.get(i, 0) for i in range(max(slots, default=-1) + 1)), **total)


class _Slab:
    """Hands out aligned ranges of one host buffer in order."""

    def __init__(self, buffer: HostBuffer) -> None:
        self.buffer, self.at = buffer, 0

    def take(self, nbytes: int) -> int:
        offset, self.at = self.at, align_up(self.at + nbytes)
        return offset

    def array(self, numel: int, dtype: torch.dtype) -> tuple[torch.Tensor, Span]:
        return slab_view(self.buffer, self.take(numel * dtype.itemsize), numel, dtype)


class Store:
    """Slabs, slots, units and gradient places of one model. State over time: open or closed.

    Building it moves the model's weights into the slabs; when anything fails, the model is
    as it was and nothing stays reserved.

    Raises:
        OutOfMemoryError: a tier cannot hold it.
    """

    def __init__(
        self,
        backend: Backend,
        ops: HostOps,
        specs: list[UnitSpec],
        trainable: set[nn.Parameter],
        options: StoreOptions,
    ) -> None:
        self.backend, self.ops, self.options = backend, ops, options
        self.sizes = sizes(specs, trainable, options)
        self.units: list[Unit] = []
        self.slots: list[Slot] = []
        self.shadows: dict[nn.Parameter, ShadowParam] = {}
        self.grads: dict[nn.Parameter, GradSlot] = {}
        self._buffers: list[Buffer] = []
        try:
            slabs = {
                name: _Slab(self._host(getattr(self.sizes, name), name))
                for name in ("working", "master", "moments", "gradients", "accumulators", "statistics")
            }
            resident = self._device(self.sizes.resident, "resident weights") if self.sizes.resident else None
            for i, nbytes in enumerate(self.sizes.slots):
                buffer = self._device(nbytes, f"slot {i}")
                self.slots.append(Slot(buffer, Span(buffer, 0, nbytes)))
            kept = self._device(self.sizes.kept, "kept gradients") if self.sizes.kept else None
        except BaseException:
            self._release()
            raise
        resident_at = kept_at = 0
        for index, spec in enumerate(specs):
            unit = self._make_unit(index, spec, slabs["working"], trainable)
            for shadow in unit.params:
                if shadow.trainable:
                    self._make_state(shadow, slabs)
                    kept_at = self._make_gradient(shadow, slabs, spec.gradient, kept, kept_at)
            if spec.placement == "resident" and resident is not None:
                bind_resident(backend, unit, resident, resident_at)
                resident_at += unit.working.nbytes
            elif spec.placement == "stream":
                assert spec.slot is not None
                bind_slot(backend, unit, self.slots[spec.slot])
        self._fill([slabs[name] for name in ("working", "master", "moments")])

    def _host(self, nbytes: int, label: str) -> HostBuffer:
        buffer = self.backend.host_buffer(nbytes, label)
        self._buffers.append(buffer)
        return buffer

    def _device(self, nbytes: int, label: str) -> DeviceBuffer:
        buffer = self.backend.device_buffer(nbytes, label)
        self._buffers.append(buffer)
        return buffer

    def _make_unit(self, index: int, spec: UnitSpec, slab: _Slab, trainable: set[nn.Parameter]) -> Unit:
        shapes = [shape_of(p, working_dtype(p, self.options)) for _, p in spec.params]
        offsets, total = pack([s.nbytes for s in shapes])
        base = slab.take(total)
        shadows = [
            self._make_shadow(names, param, shape, slab.buffer, base + offset, param in trainable)
            for (names, param), shape, offset in zip(spec.params, shapes, offsets, strict=True)
        ]
        unit = Unit(
            index=index,
            name=spec.name,
            placement=spec.placement,
            gradient=spec.gradient,
            params=shadows,
            working=Span(slab.buffer, base, total),
            updated=self.backend.host_flag(),
        )
        self.units.append(unit)
        return unit

    def _make_shadow(
        self, names: tuple[str, ...], param: nn.Parameter, shape: Shape, slab: HostBuffer, offset: int, trainable: bool
    ) -> ShadowParam:
        cpu, span = slab_view(slab, offset, shape.numel, shape.dtype)
        with self.backend.internal():
            host_view = shape.view(slab.mapped(), offset)
        shadow = ShadowParam(
            param=param, names=names, shape=shape, trainable=trainable, working=span, working_cpu=cpu,
            host_view=host_view,
        )
        self.shadows[param] = shadow
        return shadow

    def _make_state(self, shadow: ShadowParam, slabs: dict[str, _Slab]) -> None:
        n = shadow.shape.numel
        spans = []
        if shadow.shape.dtype is torch.bfloat16:
            if self.options.split_master:
                shadow.low, span = slabs["master"].array(n, torch.int16)
            else:
                shadow.master, span = slabs["master"].array(n, torch.float32)
            spans.append(span)
        shadow.exp_avg, first = slabs["moments"].array(n, torch.float32)
        shadow.exp_avg_sq, second = slabs["moments"].array(n, torch.float32)
        shadow.state_spans = (*spans, first, second)

    def _make_gradient(
        self, shadow: ShadowParam, slabs: dict[str, _Slab], path: str, kept: DeviceBuffer | None, kept_at: int
    ) -> int:
        n, shape = shadow.shape.numel, shadow.shape
        landing, landing_span = slabs["gradients"].array(n, shape.dtype)
        sums, sums_span = slabs["statistics"].array(-(-n // CHUNK_ELEMENTS), torch.float32)
        flag, flag_span = slabs["statistics"].array(1, torch.int32)
        grads = slabs["gradients"].buffer.mapped()
        stats = slabs["statistics"].buffer.mapped()
        with self.backend.internal():
            slot = GradSlot(
                landing=landing,
                landing_span=landing_span,
                landing_mapped=flat(grads, landing_span.offset, n, shape.dtype),
                landing_shaped=shape.view(grads, landing_span.offset),
                chunk_sums=sums,
                chunk_sums_mapped=flat(stats, sums_span.offset, sums.numel(), torch.float32),
                nonfinite=flag,
                nonfinite_mapped=flat(stats, flag_span.offset, 1, torch.int32),
                stats_spans=(sums_span, flag_span),
            )
        self.grads[shadow.param] = slot
        if self.options.accumulate:
            self._bind_accumulator(shadow, slot, slabs["accumulators"])
            if path == "keep" and kept is not None:
                with self.backend.internal():
                    slot.keep_accum = flat(kept.tensor(), kept_at, n, torch.float32)
                    slot.keep_accum_shaped = _fp32(shape).view(kept.tensor(), kept_at)
                slot.keep_accum_span = Span(kept, kept_at, n * 4)
                return align_up(kept_at + n * 4)
        return kept_at

    def _bind_accumulator(self, shadow: ShadowParam, slot: GradSlot, slab: _Slab) -> None:
        slot.accum, slot.accum_span = slab.array(shadow.shape.numel, torch.float32)
        with self.backend.internal():
            raw = slab.buffer.mapped()
            slot.accum_mapped = flat(raw, slot.accum_span.offset, shadow.shape.numel, torch.float32)
            slot.accum_shaped = _fp32(shadow.shape).view(raw, slot.accum_span.offset)

    def add_accumulator(self, shadow: ShadowParam, *, on_device: bool) -> None:
        """Reserve a late fp32 accumulator: a second arrival came and none was declared.

        Raises:
            OutOfMemoryError: the tier is full.
        """
        slot, n = self.grads[shadow.param], shadow.shape.numel
        if slot.accum is None:
            buffer = self._host(align_up(n * 4), f"accumulator of {shadow.name}")
            self._bind_accumulator(shadow, slot, _Slab(buffer))
        if on_device and slot.keep_accum is None:
            device = self._device(align_up(n * 4), f"kept accumulator of {shadow.name}")
            with self.backend.internal():
                slot.keep_accum = flat(device.tensor(), 0, n, torch.float32)
                slot.keep_accum_shaped = _fp32(shadow.shape).view(device.tensor(), 0)
            slot.keep_accum_span = Span(device, 0, n * 4)

    # Weights in and out ---------------------------------------------------------------

    def _fill(self, state_slabs: list[_Slab]) -> None:
        """Move the model's weights into the slabs and let the parameters show them."""
        # Whole slabs, gaps between parameters too: copies of a storage (deepcopy, torch.save) read them.
        spans = [Span(slab.buffer, 0, slab.buffer.nbytes) for slab in state_slabs]
        self.backend.host_access("fill", writes=spans)
        for unit in self.units:
            for shadow in unit.params:
                with self.backend.internal():
                    self.seed(shadow, memory_order(shadow.param.detach(), shadow.shape))
                    shadow.show(shadow.host_view)
                if shadow.exp_avg is not None and shadow.exp_avg_sq is not None:
                    shadow.exp_avg.zero_()
                    shadow.exp_avg_sq.zero_()
                shadow.mark_seen()
            unit.updated.set()

    def seed(self, shadow: ShadowParam, values: torch.Tensor) -> None:
        """Set master and working weights from 1-D CPU `values` (any floating dtype, memory order)."""
        values = values.to(torch.float32)
        if shadow.shape.dtype is torch.float32:
            shadow.working_cpu.copy_(values)
        elif shadow.low is not None:
            self.ops.split(values, shadow.working_cpu, shadow.low)
        else:
            self.ops.round_bf16(values, shadow.working_cpu)
            if shadow.master is not None:
                shadow.master.copy_(values)

    def master_values(self, shadow: ShadowParam) -> torch.Tensor:
        """fp32 [numel] on the CPU: the master; the storage itself where there is one, else a new tensor."""
        if shadow.master is not None:
            return shadow.master
        if shadow.low is not None:
            out = torch.empty(shadow.shape.numel, dtype=torch.float32)
            self.ops.join(shadow.working_cpu, shadow.low, out)
            return out
        return shadow.working_cpu.to(torch.float32)

    def restore(self) -> None:
        """Give every parameter ordinary memory with its current weights (device synchronised)."""
        with self.backend.internal():
            for shadow in self.shadows.values():
                plain = torch.empty_strided(
                    shadow.shape.size, shadow.shape.stride, dtype=shadow.shape.dtype, device=self.backend.device
                )
                if shadow.shape.numel:
                    plain.as_strided((shadow.shape.numel,), (1,)).copy_(shadow.working_cpu)
                shadow.show(plain)

    def _release(self) -> None:
        for buffer in self._buffers:
            buffer.close()
        self._buffers.clear()

    def close(self) -> None:
        self._release()


def memory_order(tensor: torch.Tensor, shape: Shape) -> torch.Tensor:
    """1-D CPU copy of `tensor` with its elements in the memory order of `shape`."""
    staged = torch.empty_strided(shape.size, shape.stride, dtype=tensor.dtype)
    staged.copy_(tensor)
    return staged.as_strided((shape.numel,), (1,))


def _fp32(shape: Shape) -> Shape:
    return Shape(size=shape.size, stride=shape.stride, dtype=torch.float32)
