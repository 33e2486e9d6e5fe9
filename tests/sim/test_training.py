"""What people do around a training step: bad batches, unused and frozen parameters, eval, checkpoints."""

from __future__ import annotations

import copy
import time
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from memferry_npu.api import OffloadPolicy, offload
from memferry_npu.backend.base import RaceError
from memferry_npu.backend.sim import SimBackend
from memferry_npu.optim.reference import SerialAdamW
from memferry_npu.schedule.plan import GradientPath, Placement

from .models import (
    Tower,
    adamw,
    assert_equal_training,
    assert_same_bits,
    compare,
    offloaded,
    tokens,
    tower_loss,
    train,
)

MIXED = {"embed": Placement.DHA, "blocks.1": Placement.RESIDENT, "head": Placement.RESIDENT}
PATHS = {"blocks.0": GradientPath.KEEP, "blocks.1": GradientPath.DHA_WRITE, "embed": GradientPath.DHA_WRITE}


def policy(**options: Any) -> OffloadPolicy:
    return OffloadPolicy(**{"placement": MIXED, "gradient": PATHS, "max_grad_norm": 0.5, **options})


def tower(dtype: torch.dtype = torch.bfloat16, **options: Any) -> Tower:
    torch.manual_seed(3)
    return Tower(**options).to(dtype)


def snapshot(optimizer: Any, model: nn.Module) -> dict[str, torch.Tensor]:
    optimizer.synchronize()
    state = optimizer.state_dict()["state"]
    out = {name: p.detach().clone() for name, p in model.named_parameters()}
    for i, entry in state.items():
        out |= {f"{i}.{key}": value.clone() for key, value in entry.items()}
    return out


# A non-finite gradient -------------------------------------------------------------------


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("path", list(GradientPath))
def test_one_bad_element_skips_the_step(value: float, clip: float | None, path: GradientPath) -> None:
    model = tower()
    clean = copy.deepcopy(model)
    options = policy(max_grad_norm=clip, gradient={"default": path})

    def poison(grad: torch.Tensor) -> torch.Tensor:
        grad = grad.clone()
        grad.view(-1)[5] = value
        return grad

    with offloaded(model, options) as (optimizer, _):
        train(model, optimizer, 2)
        before = snapshot(optimizer, model)
        handle = model.blocks[2].up.weight.register_hook(poison)
        tower_loss(model, 99, 0).backward()
        optimizer.step()
        with pytest.warns(RuntimeWarning, match="step skipped: the gradient of blocks.2.up.weight has NaN or Inf"):
            assert optimizer.step_applied is False
        after = snapshot(optimizer, model)
        for key, value_before in before.items():
            assert_same_bits(key, after[key].view(-1).float(), value_before.view(-1).float())
        optimizer.zero_grad()
        handle.remove()
        train(model, optimizer, 10, first=2)
        assert optimizer.step_applied is True
        reached = snapshot(optimizer, model)
    with offloaded(clean, options) as (optimizer, _):
        train(clean, optimizer, 12)
        for key, expected in snapshot(optimizer, clean).items():
            assert_same_bits(key, reached[key].view(-1).float(), expected.view(-1).float())


def test_twenty_bad_batches_are_twenty_warnings() -> None:
    model = tower()
    with offloaded(model, policy()) as (optimizer, _):
        for step in range(20):
            (tower_loss(model, step, 0) * float("inf")).backward()
            optimizer.step()
            with pytest.warns(RuntimeWarning, match="step skipped"):
                assert optimizer.step_applied is False
            optimizer.zero_grad()


def test_a_norm_that_overflows_skips_only_when_clipping() -> None:
    """Finite gradients whose squares overflow: plain AdamW would take the step, clipping cannot."""
    for clip, applied in ((None, True), (1.0, False)):
        model = tower(torch.float32)
        with offloaded(model, policy(max_grad_norm=clip)) as (optimizer, _), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tower_loss(model, 0, 0).backward()
            with torch.no_grad():
                model.head.weight.grad.fill_(1e30)
            optimizer.step()
            assert optimizer.step_applied is applied
            assert optimizer.grad_norm == float("inf")


# Parameters without a gradient -----------------------------------------------------------


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 8)
        self.branches = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])

    def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:
        return self.branches[which](self.stem(x))


@pytest.mark.parametrize("path", list(GradientPath))
@pytest.mark.parametrize("placement", list(Placement))
def test_unused_parameters_do_not_move(path: GradientPath, placement: Placement) -> None:
    """Each branch gets a gradient in some steps only; moments and step counts follow."""

    def loss(model: nn.Module, step: int, micro: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(step)
        return model(torch.randn(4, 8, generator=generator), 0 if step % 3 else 1).square().mean()

    torch.manual_seed(0)
    options = OffloadPolicy(placement={"default": placement}, gradient={"default": path}, max_grad_norm=0.1)
    compare(Branches(), options, steps=9, loss=loss)
    model = Branches()
    with offloaded(model, options) as (optimizer, _):
        before = model.branches[1].weight.detach().clone()
        model(torch.randn(4, 8), 0).sum().backward()
        optimizer.step()
        optimizer.synchronize()
        assert_same_bits("unused", model.branches[1].weight.detach().clone(), before)
        assert int(optimizer.state[model.branches[1].weight]["step"]) == 0
        assert int(optimizer.state[model.branches[0].weight]["step"]) == 1


def test_zero_grad_without_none_steps_with_zeros_as_torch_does() -> None:
    def loss(model: nn.Module, step: int, micro: int) -> torch.Tensor:
        return model(torch.full((2, 8), 0.1 * (step + 1)), step % 2).square().mean()

    torch.manual_seed(0)
    model = Branches()
    plain = copy.deepcopy(model)
    reference = SerialAdamW(adamw(plain))
    for step in range(6):
        loss(plain, step, 0).backward()
        reference.step()
        reference.zero_grad(set_to_none=False)
    with offloaded(model, OffloadPolicy()) as (optimizer, _), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # sums onto zeros: accumulation_steps was not declared
        for step in range(6):
            loss(model, step, 0).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        assert_equal_training(model, optimizer, plain, reference)


@pytest.mark.parametrize("placement", list(Placement))
def test_frozen_parameters_have_no_state_and_do_not_move(placement: Placement) -> None:
    model = tower()
    for block in model.blocks[:2]:
        block.requires_grad_(False)
    model.embed.requires_grad_(False)
    frozen = {n: p.detach().clone() for n, p in model.named_parameters() if not p.requires_grad}
    compare(model, OffloadPolicy(placement={"default": placement}), steps=5)
    for name, param in model.named_parameters():
        if name in frozen:
            assert_same_bits(name, param.detach(), frozen[name])
    with offloaded(model, OffloadPolicy()) as (optimizer, _):
        assert sum(p in optimizer.state for p in model.parameters()) == sum(
            p.requires_grad for p in model.parameters()
        )


@pytest.mark.parametrize("placement", list(Placement))
@pytest.mark.parametrize("path", list(GradientPath))
def test_tied_parameters_once(placement: Placement, path: GradientPath) -> None:
    model = tower(tied=True)
    compare(model, OffloadPolicy(placement={"default": placement}, gradient={"default": path}), steps=8)
    assert model.head.weight is model.embed.weight


def test_parameters_outside_the_optimizer_keep_plain_gradients() -> None:
    model = tower()
    optimizer = torch.optim.AdamW(model.blocks.parameters(), lr=1e-2)
    with offloaded(model, OffloadPolicy(), optimizer=optimizer) as (wrapped, _):
        tower_loss(model, 0, 0).backward()
        assert model.head.weight.grad is not None
        wrapped.step()
        assert model.head.weight not in wrapped.state


# Groups, schedulers ----------------------------------------------------------------------


def test_groups_and_lr_schedules_reach_every_parameter() -> None:
    def groups(model: nn.Module) -> torch.optim.AdamW:
        decay = [p for p in model.parameters() if p.dim() > 1]
        rest = [p for p in model.parameters() if p.dim() <= 1]
        return torch.optim.AdamW(
            [{"params": rest, "weight_decay": 0.0, "lr": 3e-2}, {"params": decay, "betas": (0.8, 0.95)}], lr=1e-2
        )

    model = tower()
    plain = copy.deepcopy(model)
    reference_groups = groups(plain)
    reference = SerialAdamW(reference_groups, max_grad_norm=0.5)
    schedule = torch.optim.lr_scheduler.LambdaLR(reference_groups, lambda s: 1.0 / (1 + s))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the scheduler has not seen torch's own step()
        for step in range(6):
            tower_loss(plain, step, 0).backward()
            reference.step()
            reference.zero_grad()
            schedule.step()
    with offloaded(model, policy(), optimizer=groups(model)) as (optimizer, _):
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: 1.0 / (1 + s))
        for step in range(6):
            tower_loss(model, step, 0).backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        assert_equal_training(model, optimizer, plain, reference)


# Eval, state_dict, checkpoints -----------------------------------------------------------


def test_eval_and_no_grad_forwards_change_nothing() -> None:
    def look(model: nn.Module, optimizer: Any, step: int) -> None:
        with torch.no_grad():
            model(tokens(500 + step))
        model.eval()
        model(tokens(600 + step))
        model.train()

    compare(tower(), policy(), steps=6, between=look)


def test_eval_right_after_step_sees_the_new_weights() -> None:
    model = tower()
    plain = copy.deepcopy(model)
    reference = SerialAdamW(adamw(plain), max_grad_norm=0.5)
    with offloaded(model, policy()) as (optimizer, _):
        for step in range(4):
            for m, o in ((plain, reference), (model, optimizer)):
                tower_loss(m, step, 0).backward()
                o.step()
                o.zero_grad()
            with torch.no_grad():
                assert_same_bits("logits", model(tokens(7)), plain(tokens(7)))


def test_state_dict_has_plain_names_and_current_weights() -> None:
    model = tower()
    plain = copy.deepcopy(model)
    reference = SerialAdamW(adamw(plain), max_grad_norm=0.5)
    train(plain, reference, 3)
    with offloaded(model, policy()) as (optimizer, _):
        train(model, optimizer, 3)
        saved = model.state_dict()  # right after step(): it completes the update by itself
        assert list(saved) == list(plain.state_dict())
        for name, value in plain.state_dict().items():
            assert_same_bits(name, saved[name].clone(), value)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model_first", [True, False])
def test_save_load_continue_is_bit_equal(split: bool, dtype: torch.dtype, model_first: bool, tmp_path: Any) -> None:
    options = policy(split_master=split)
    model = tower(dtype)
    with offloaded(model, options) as (optimizer, _):
        train(model, optimizer, 4)
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "c.pt")
        train(model, optimizer, 4, first=4)
        unbroken = snapshot(optimizer, model)
    torch.manual_seed(99)
    other = Tower().to(dtype)
    saved = torch.load(tmp_path / "c.pt")
    # Another placement and another master layout: a checkpoint says nothing about where things lie.
    with offloaded(other, OffloadPolicy(max_grad_norm=0.5, split_master=not split)) as (optimizer, _):
        train(other, optimizer, 1)
        if model_first:
            other.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
        else:
            optimizer.load_state_dict(saved["optimizer"])
            other.load_state_dict(saved["model"])
        train(other, optimizer, 4, first=4)
        for key, value in snapshot(optimizer, other).items():
            assert_same_bits(key, value.view(-1).float(), unbroken[key].view(-1).float())


def test_loading_weights_reseeds_the_master_only_where_they_differ() -> None:
    for split in (False, True):
        model = tower()
        with offloaded(model, policy(split_master=split)) as (optimizer, _):
            train(model, optimizer, 3)
            masters = {i: s["master"].clone() for i, s in optimizer.state_dict()["state"].items()}
            weights = {k: v.clone() for k, v in model.state_dict().items()}
            weights["head.weight"][0, 0] += 1.0
            model.load_state_dict(weights)
            names = [n for n, _ in model.named_parameters()]
            for i, state in optimizer.state_dict()["state"].items():
                expected = masters[i]
                if names[i] == "head.weight":
                    expected[0, 0] = weights["head.weight"][0, 0].float()
                assert_same_bits(names[i], state["master"], expected)
            with torch.no_grad():
                assert_same_bits("head", model.head.weight.detach().clone(), weights["head.weight"])


def test_a_state_that_does_not_fit_changes_nothing() -> None:
    model = tower()
    with offloaded(model, policy()) as (optimizer, _):
        train(model, optimizer, 2)
        before = snapshot(optimizer, model)
        bad = copy.deepcopy(optimizer.state_dict())
        bad["state"][3]["exp_avg"] = torch.zeros(2, 2)
        with pytest.raises(ValueError, match=r"'exp_avg' of 'blocks.0.up.weight' has shape \(2, 2\)"):
            optimizer.load_state_dict(bad)
        bad = copy.deepcopy(optimizer.state_dict())
        bad["param_groups"][0]["params"].pop()
        with pytest.raises(ValueError, match="the state has 27 parameters, the optimizer 28"):
            optimizer.load_state_dict(bad)
        for key, value in snapshot(optimizer, model).items():
            assert_same_bits(key, value.view(-1).float(), before[key].view(-1).float())


def test_state_of_a_torch_optimizer_is_taken_over() -> None:
    """Training that began without offload goes on under it."""
    model = tower(torch.float32)
    inner = adamw(model, foreach=False)
    train(model, inner, 3)
    expected = {n: inner.state[p]["exp_avg_sq"].clone() for n, p in model.named_parameters()}
    with offloaded(model, OffloadPolicy(), optimizer=inner) as (optimizer, _):
        for name, param in model.named_parameters():
            assert_same_bits(name, optimizer.state[param]["exp_avg_sq"].clone(), expected[name])
            assert int(optimizer.state[param]["step"]) == 3
        train(model, optimizer, 1, first=3)


# Writes to weights and gradients ---------------------------------------------------------


@pytest.mark.parametrize("placement", list(Placement))
@pytest.mark.parametrize("split", [False, True])
def test_a_user_write_between_steps(placement: Placement, split: bool) -> None:
    model = tower()
    plain = copy.deepcopy(model)
    reference = SerialAdamW(adamw(plain))

    def write(m: nn.Module) -> None:
        with torch.no_grad():
            m.blocks[1].up.weight.mul_(0.5)
            m.embed.weight[3].fill_(0.25)

    for m, o in ((plain, reference),):
        train(m, o, 3)
        write(m)
        train(m, o, 3, first=3)
    options = OffloadPolicy(placement={"default": placement}, split_master=split)
    with offloaded(model, options) as (optimizer, _):
        train(model, optimizer, 3)
        optimizer.synchronize()
        write(model)
        with pytest.warns(RuntimeWarning, match="embed.weight, blocks.1.up.weight: written in place"):
            train(model, optimizer, 3, first=3)
        assert_equal_training(model, optimizer, plain, reference)


def test_reading_weights_before_the_step_is_complete_is_caught_here() -> None:
    model = tower()
    with offloaded(model, OffloadPolicy()) as (optimizer, _):
        train(model, optimizer, 1)
        while not optimizer._last.done.is_set():
            time.sleep(0.001)  # the update is over, but nothing orders this thread after it
        with pytest.raises(RaceError, match="a wait is missing"):
            model.head.weight.sum()
        optimizer.synchronize()
        model.head.weight.sum()


def test_step_returns_complete_makes_reads_safe() -> None:
    model = tower()
    with offloaded(model, OffloadPolicy(step_returns="complete")) as (optimizer, _):
        for step in range(3):
            train(model, optimizer, 1, first=step)
            model.head.weight.sum()


@pytest.mark.parametrize("path", list(GradientPath))
@pytest.mark.parametrize("accumulation", [1, 3])
def test_clip_grad_norm_called_by_the_user(path: GradientPath, accumulation: int) -> None:
    norms: list[float] = []

    def clip(model: nn.Module, optimizer: Any, step: int) -> None:
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.05)))

    compare(
        tower(),
        OffloadPolicy(gradient={"default": path}, accumulation_steps=accumulation),
        steps=5,
        between=clip,
    )
    assert norms[:5] == norms[5:] and min(norms) > 0.05


@pytest.mark.parametrize("path", list(GradientPath))
def test_gradients_that_the_user_sets_or_clears(path: GradientPath) -> None:
    def edit(model: nn.Module, optimizer: Any, step: int) -> None:
        with torch.no_grad():
            model.head.weight.grad = torch.full_like(model.head.weight, 0.01 * (step + 1))
            model.norm.weight.grad = None
            model.blocks[0].down.bias.grad.add_(0.125)

    compare(tower(), OffloadPolicy(gradient={"default": path}, max_grad_norm=0.2), steps=4, between=edit)


@pytest.mark.parametrize("path", list(GradientPath))
def test_several_backwards_without_declaring_them(path: GradientPath) -> None:
    def loss(model: nn.Module, step: int, micro: int) -> torch.Tensor:
        for extra in range(2):
            tower_loss(model, step, 10 + extra).backward()
        return tower_loss(model, step, micro)

    with pytest.warns(RuntimeWarning, match="policy.accumulation_steps"):
        compare(tower(), OffloadPolicy(gradient={"default": path}), steps=4, loss=loss)


def test_backward_after_step_without_zero_grad_adds_up() -> None:
    model = tower()
    plain = copy.deepcopy(model)
    reference = SerialAdamW(adamw(plain))
    with offloaded(model, OffloadPolicy(accumulation_steps=2)) as (optimizer, _):
        for m, o in ((plain, reference), (model, optimizer)):
            for step in range(4):
                tower_loss(m, step, 0).backward()
                o.step()
        assert_equal_training(model, optimizer, plain, reference)


# Closing ---------------------------------------------------------------------------------


def test_close_gives_an_ordinary_model_back() -> None:
    model = tower()
    optimizer = offload(model, adamw(model), policy=policy(), backend=SimBackend())
    train(model, optimizer, 2)
    optimizer.close()
    optimizer.close()
    with pytest.raises(RuntimeError, match="closed"):
        optimizer.step()
    train(model, adamw(model), 1)
    again = offload(model, adamw(model), policy=policy(), backend=SimBackend())
    train(model, again, 1)
    again.close()
    assert not model._forward_pre_hooks and not model.blocks[0]._forward_hooks


def test_a_closure() -> None:
    model = tower()
    with offloaded(model, OffloadPolicy()) as (optimizer, _):

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            value = tower_loss(model, 0, 0)
            value.backward()
            return value

        first = optimizer.step(closure)
        assert optimizer.step(closure) < first


