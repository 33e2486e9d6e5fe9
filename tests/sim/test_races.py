"""Each kind of missing wait, planted into the runtime, is caught; and without the checker it breaks the result."""

from __future__ import annotations

import contextlib
import threading
import time
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from memferry_npu.api import OffloadPolicy
from memferry_npu.backend.base import BackendError, RaceError, Span
from memferry_npu.backend.sim import SimBackend
from memferry_npu.backend.sim.checker import Checker
from memferry_npu.optim.update import UpdateJob
from memferry_npu.runtime import gradients
from memferry_npu.runtime.executor import Executor
from memferry_npu.schedule.plan import GradientPath, Placement
from memferry_npu.transfer import direct

from .models import Tower, assert_same_bits, offloaded, train


class _Nothing:
    """A step of the runtime that has been left out."""

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        return None


def use_before_load(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(direct.DirectTicket, "wait", _Nothing())


def overwrite_before_read(patch: pytest.MonkeyPatch) -> None:
    real = direct._move
    patch.setattr(
        direct, "_move", lambda b, s, pairs, n, after: real(b, s, pairs, n, None if s.name == "h2d" else after)
    )


def gradient_read_before_written(patch: pytest.MonkeyPatch) -> None:
    real = direct._move
    patch.setattr(
        direct, "_move", lambda b, s, pairs, n, after: real(b, s, pairs, n, None if s.name == "d2h" else after)
    )


def free_before_copy_ends(patch: pytest.MonkeyPatch) -> None:
    def let_go(self: Any) -> None:
        self._held.popleft()

    patch.setattr(gradients.GradientFlow, "_let_go", let_go)


def device_before_host_worker(patch: pytest.MonkeyPatch) -> None:
    """Kernels read weights that the host worker has yet to update."""
    patch.setattr(Executor, "wait_updated", _Nothing())


def host_worker_before_device(patch: pytest.MonkeyPatch) -> None:
    """The host worker updates without waiting for the step's kernels and gradients."""
    real = UpdateJob.run

    class Ready:
        def synchronize(self) -> None:
            return None

    def run(self: UpdateJob) -> None:
        self.ready = Ready()  # type: ignore[assignment]
        real(self)

    patch.setattr(UpdateJob, "run", run)


STREAM = OffloadPolicy(max_grad_norm=1.0)
DHA = OffloadPolicy(placement={"default": Placement.DHA}, gradient={"default": GradientPath.DHA_WRITE})

PLANTED = [
    (use_before_load, STREAM, r"read of slot \d.*'aten\..*not ordered after the write by 'H2D working -> slot"),
    (overwrite_before_read, STREAM, r"write to slot \d.*'H2D working -> slot.*not ordered after the read by 'aten"),
    (gradient_read_before_written, STREAM, r"read of tensor of .*'D2H .*not ordered after the write by 'aten\."),
    (free_before_copy_ends, STREAM, r"was freed before 'D2H .*hold the tensor until its event"),
    (device_before_host_worker, DHA, r"working.* not ordered after the (read|write) by '(aten\..*|adamw .*)'"),
    (host_worker_before_device, DHA, r"not ordered after the write by 'mf_grad_write' \(compute\)"),
]


def run(policy: OffloadPolicy, steps: int = 4) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = Tower().to(torch.bfloat16)
    with offloaded(model, policy) as (optimizer, _):
        train(model, optimizer, steps)
        optimizer.synchronize()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize(("plant", "policy", "message"), PLANTED, ids=lambda v: getattr(v, "__name__", ""))
def test_a_planted_missing_wait_is_caught(
    plant: Any, policy: OffloadPolicy, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(policy)  # nothing is found without it
    plant(monkeypatch)
    # A race in the worker surfaces at the training thread's next call, with the race as its text.
    with pytest.raises((RaceError, RuntimeError), match=message):
        run(policy)


def test_without_the_checker_a_missing_wait_breaks_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots are NaN until their load runs, and loads run only when something waits."""
    expected = run(STREAM)
    use_before_load(monkeypatch)
    monkeypatch.setattr(Checker, "access", _Nothing())
    monkeypatch.setattr(Checker, "unordered_readers", _Nothing())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # every step is skipped: the loss is NaN
        got = run(STREAM)
    with pytest.raises(AssertionError):
        for name, value in expected.items():
            assert_same_bits(name, got[name], value)


def test_a_read_before_the_worker_writes_surfaces_at_the_next_call() -> None:
    model = Tower()
    with offloaded(model, OffloadPolicy()) as (optimizer, _):
        train(model, optimizer, 1)
        gate = threading.Event()
        optimizer.worker.submit(gate.wait, lambda _: None)
        train_loss = model(torch.zeros(1, 3, dtype=torch.int64)).sum()
        train_loss.backward()
        optimizer.step()
        with torch.no_grad():
            model.head.weight.sum()  # unordered, but the update has not begun
        gate.set()
        with pytest.raises(RuntimeError, match="adamw head.*not ordered after the read by 'aten.sum"):
            optimizer.synchronize()
        with pytest.raises(RuntimeError, match="the host optimizer failed"):
            optimizer.step()


# The backend by itself ---------------------------------------------------------------------


@contextlib.contextmanager
def backend() -> Iterator[SimBackend]:
    made = SimBackend()
    with made.session():
        yield made
    made.close()


def test_copies_run_late_and_poison_their_target() -> None:
    with backend() as b:
        host, device = b.host_buffer(64, "weights"), b.device_buffer(64, "slot")
        b.host_access("fill", writes=(Span(host, 0, 64),))
        host.cpu().view(torch.float32).fill_(1.5)
        b.copy(b.h2d, [(Span(device, 0, 64), Span(host, 0, 64))])
        with b.internal():
            assert device.tensor().view(torch.float32).isnan().all()
        event = b.h2d.record()
        with pytest.raises(RaceError):
            device.tensor().view(torch.float32).sum()
        b.compute.wait(event)
        assert float(device.tensor().view(torch.float32).sum()) == 24.0


def test_reading_what_nobody_wrote_is_caught() -> None:
    with backend() as b:
        device = b.device_buffer(64, "slot")
        with pytest.raises(RaceError, match="nothing has been written there yet"):
            device.tensor().view(torch.float32).sum()


def test_the_two_addresses_of_host_memory_are_not_interchangeable() -> None:
    with backend() as b:
        host = b.host_buffer(64, "weights")
        assert host.cpu().data_ptr() != host.mapped().data_ptr()
        b.host_access("fill", writes=(Span(host, 0, 64),))
        host.mapped().view(torch.float32).add(1.0)
        values = torch.ones(16) * 2.0
        with pytest.raises(BackendError, match="mixes the CPU tensor 'weights' with device tensors"):
            host.cpu().view(torch.float32).add(values)


def test_disjoint_ranges_do_not_race() -> None:
    with backend() as b:
        host, device = b.host_buffer(128, "weights"), b.device_buffer(128, "slot")
        b.host_access("fill", writes=(Span(host, 0, 128),))
        b.copy(b.h2d, [(Span(device, 0, 64), Span(host, 0, 64))])
        b.compute.wait(b.h2d.record())
        b.copy(b.h2d, [(Span(device, 64, 64), Span(host, 64, 64))])
        device.tensor()[:64].sum()
        with pytest.raises(RaceError):
            device.tensor()[60:68].sum()


def test_copies_are_checked() -> None:
    with backend() as b:
        host, device = b.host_buffer(64, "weights"), b.device_buffer(64, "slot")
        for pair, message in (
            ((Span(device, 0, 32), Span(host, 0, 64)), "copy of 64 bytes into 32"),
            ((Span(device, 32, 64), Span(host, 0, 64)), "outside 'slot'"),
            ((Span(host, 0, 64), Span(host, 0, 64)), "one end must be host memory"),
        ):
            with pytest.raises(BackendError, match=message):
                b.copy(b.h2d, [pair])


def test_a_freed_source_poisons_the_copy_as_well() -> None:
    with backend() as b:
        host = b.host_buffer(64, "gradients")
        source = torch.ones(16)
        product = source * 1.0
        b.d2h.wait(b.compute.record())
        b.copy(b.d2h, [(Span(host, 0, 64), product)])
        del product
        with pytest.raises(RaceError, match="freed before"):
            torch.ones(1)
        b.d2h.record().synchronize()
        assert bool(host.cpu().view(torch.float32).isnan().all())


def test_flags_order_threads() -> None:
    with backend() as b:
        host, flag = b.host_buffer(64, "weights"), b.host_flag()

        def work() -> None:
            b.host_access("write", writes=(Span(host, 0, 64),))
            time.sleep(0.01)
            flag.set()

        thread = threading.Thread(target=work, name="worker")
        thread.start()
        flag.wait()
        b.host_access("read", reads=(Span(host, 0, 64),))
        thread.join()
        assert flag.is_set()
