"""Models that make an offload runtime stumble: views, recomputation, in-place, odd shapes, exceptions."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from memferry_npu.api import OffloadPolicy
from memferry_npu.optim.reference import SerialAdamW
from memferry_npu.runtime.executor import SlotConflict
from memferry_npu.schedule.plan import GradientPath, Placement

from .models import Block, Tower, adamw, assert_equal_training, compare, offloaded, tokens, tower_loss, train


def randn(step: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(step))


def square_loss(*shape: int) -> Any:
    def loss(model: nn.Module, step: int, micro: int) -> torch.Tensor:
        return model(randn(100 * step + micro, *shape)).square().mean()

    return loss


def every_way(model: nn.Module, loss: Any, steps: int = 5, **options: Any) -> None:
    """All placements and gradient paths, fresh copies of the model."""
    for placement in Placement:
        for path in GradientPath:
            policy = OffloadPolicy(placement={"default": placement}, gradient={"default": path}, **options)
            compare(copy.deepcopy(model), policy, steps=steps, loss=loss)


# Saved views -----------------------------------------------------------------------------


class Views(nn.Module):
    """Backward needs views and products of the weight that were made in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6) / 3)
        self.scale = nn.Parameter(torch.rand(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        halves = self.weight.t()[:3], self.weight.view(36)[18:].view(3, 6)
        return x + torch.cat([x @ h.t() for h in halves], -1) @ (self.weight * self.scale) + (x @ self.weight).sin()


def test_views_of_weights_saved_for_backward() -> None:
    torch.manual_seed(0)
    every_way(nn.Sequential(*[Views() for _ in range(5)]), square_loss(4, 6))


def test_attention_blocks() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(8, 24)
            self.out = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, 4).unbind(2)
            y = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True)
            return x + self.out(y.transpose(1, 2).reshape(x.shape))

    torch.manual_seed(0)
    every_way(nn.Sequential(*[Attention() for _ in range(3)]), square_loss(2, 5, 8), steps=3)


# Activation checkpointing ----------------------------------------------------------------


class Checkpointed(Tower):
    """`group` blocks per checkpointed region."""

    def __init__(self, reentrant: bool, group: int, blocks: int = 4, *, inside: bool = False) -> None:
        super().__init__(blocks=blocks)
        self.reentrant, self.group, self.inside = reentrant, group, inside

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        def run(first: int, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks[first : first + self.group]:
                x = block(x)
            return x

        x = self.embed(batch)
        for first in range(0, len(self.blocks), self.group):
            x = checkpoint(run, first, x, use_reentrant=self.reentrant)
        return self.head(self.norm(x))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("group", [1, 2, 3, 4])
@pytest.mark.parametrize("slots", [2, 3])
def test_checkpointed_regions(reentrant: bool, group: int, slots: int) -> None:
    torch.manual_seed(0)
    model = Checkpointed(reentrant, group).to(torch.bfloat16)
    for path in GradientPath:
        policy = OffloadPolicy(slots=slots, gradient={"default": path}, max_grad_norm=0.1, accumulation_steps=2)
        compare(copy.deepcopy(model), policy, steps=4)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_inside_units(reentrant: bool) -> None:
    class Inner(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + checkpoint(lambda y: self.down(F.gelu(self.up(y))), self.norm(x), use_reentrant=reentrant)

    torch.manual_seed(0)
    model = Tower(blocks=1)
    model.blocks = nn.ModuleList(Inner(16) for _ in range(4))
    every_way(model, tower_loss, steps=3)


@pytest.mark.parametrize("reentrant", [False, True])
def test_frozen_layers_under_checkpointing(reentrant: bool) -> None:
    torch.manual_seed(0)
    model = Checkpointed(reentrant, 2)
    model.blocks[1].requires_grad_(False)
    model.blocks[2].up.requires_grad_(False)
    compare(model, OffloadPolicy(), steps=3)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_module_used_twice_in_one_checkpointed_forward(reentrant: bool) -> None:
    class Twice(Checkpointed):
        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            x = self.embed(batch)
            for _ in range(2):
                for block in self.blocks:
                    x = checkpoint(block, x, use_reentrant=self.reentrant)
            return self.head(self.norm(x))

    torch.manual_seed(0)
    model = Twice(reentrant, 1, blocks=3).to(torch.bfloat16)
    # Reentrant: each use delivers its own gradient, so the sum is fp32 and is best declared.
    compare(model, OffloadPolicy(accumulation_steps=2 if reentrant else 1), steps=4)


# Structure -------------------------------------------------------------------------------


def test_a_module_called_twice() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for index in (0, 1, 0, 2, 1, 0):
                x = self.layers[index](x).tanh()
            return x

    torch.manual_seed(0)
    every_way(Twice(), square_loss(3, 6))


def test_an_in_place_module() -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x.mul_(0.9)  # the input of this unit is the output of the one before
            return F.relu(self.linear(x), inplace=True)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(6, 6)
            self.blocks = nn.ModuleList(InPlace() for _ in range(4))
            self.act = nn.ReLU(inplace=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            for block in self.blocks:
                x = block(x + 0.0)
            return self.act(x * 1.0)

    torch.manual_seed(0)
    every_way(Model(), square_loss(3, 6))


def test_outputs_in_containers_and_side_outputs() -> None:
    @dataclass
    class Out:
        hidden: torch.Tensor
        extra: dict[str, Any]

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(5, 5), nn.Linear(5, 2)
            self.aux: torch.Tensor | None = None

        def forward(self, x: torch.Tensor, *, scale: float) -> Out:
            self.aux = self.b(x).square().mean()
            return Out((self.a(x) * scale).relu(), {"gate": [self.b(x).sigmoid()], "name": "layer"})

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Layer() for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            total = torch.zeros(())
            for layer in self.layers:
                out = layer(x, scale=0.5)
                x = x + out.hidden
                total = total + layer.aux + out.extra["gate"][0].mean()
            return x.square().mean() + total

    torch.manual_seed(0)
    every_way(Model(), lambda model, step, micro: model(randn(step, 3, 5)))


def test_an_output_that_may_hide_tensors_is_refused() -> None:
    class Box:
        def __init__(self, value: torch.Tensor) -> None:
            self.value = value

    class Layer(nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            return Box(super().forward(x))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Layer(4, 4) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x).value
            return x

    model = Model()
    with offloaded(model, OffloadPolicy()), pytest.raises(TypeError, match="'layers.0' returned a Box"):
        model(torch.zeros(1, 4))
    every_way_resident = OffloadPolicy(placement={"default": Placement.RESIDENT})
    compare(Model(), every_way_resident, steps=2, loss=square_loss(2, 4))


def test_weights_used_outside_their_module() -> None:
    """A root parameter, a functional head over the embedding, a module that is never called."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(37, 8)
            self.position = nn.Parameter(torch.randn(6, 8) / 8)
            self.blocks = nn.ModuleList(Block(8) for _ in range(3))
            self.scale = nn.ParameterList([nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(()))])

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            x = self.embed(batch) + self.position
            for block in self.blocks:
                x = block(x)
            return F.linear(x * self.scale[0] * self.scale[1], self.embed.weight)

    torch.manual_seed(0)
    every_way(Model(), tower_loss, steps=4)


def test_units_named_in_the_policy_may_nest() -> None:
    torch.manual_seed(0)
    policy = OffloadPolicy(units=("blocks.0", "blocks.1.up", "blocks.1", "norm"))
    compare(Tower(), policy, steps=4)


def test_two_streamed_units_needed_at_once_is_a_clear_error() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
            for i in range(2):
                self.layers[i].inner = [self.layers[i + 1]]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers[0](x)

    class Calls(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            return self.inner[0](y) if hasattr(self, "inner") else y

    model = Model()
    for layer in model.layers:
        layer.__class__ = Calls
    before = [p.detach().clone() for p in model.parameters()]
    with offloaded(model, OffloadPolicy()) as (_, _backend):
        with pytest.raises(SlotConflict, match="'layers.2' needs the slot that unit 'layers.0' is using"):
            model(torch.zeros(1, 4))
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    compare(model, OffloadPolicy(slots=3), steps=2, loss=square_loss(2, 4))


# Shapes and strides ----------------------------------------------------------------------


def test_non_contiguous_parameters() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3, padding=1).to(memory_format=torch.channels_last)
            self.turned = nn.Parameter(torch.randn(5, 4).t())
            self.strided = nn.Parameter(torch.randn(8, 5)[::2])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.conv(x.to(memory_format=torch.channels_last)).mean((2, 3))
            return x @ self.turned + x @ self.strided

    torch.manual_seed(0)
    model = Model()
    assert not model.turned.is_contiguous() and not model.strided.is_contiguous()
    every_way(model, square_loss(2, 3, 4, 4), steps=4)
    with offloaded(model, OffloadPolicy()):
        assert model.turned.stride() == (1, 4)
        assert model.conv.weight.is_contiguous(memory_format=torch.channels_last)


def test_empty_single_and_scalar_parameters() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.empty = nn.Parameter(torch.zeros(0))
            self.none = nn.Parameter(torch.zeros(3, 0))
            self.one = nn.Parameter(torch.ones(1))
            self.scalar = nn.Parameter(torch.tensor(0.5))
            self.linear = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) * self.one + self.scalar + self.empty.sum() + (x @ self.none).sum()

    torch.manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        every_way(
            Model().to(dtype), lambda m, s, i, d=dtype: m(randn(s, 2, 3).to(d)).square().mean(), accumulation_steps=2
        )


def test_mixed_dtypes_in_one_unit() -> None:
    torch.manual_seed(0)
    model = Tower().to(torch.bfloat16)
    for block in model.blocks:
        block.norm.float()
        block.norm.register_forward_pre_hook(lambda _, args: (args[0].float(),))
        block.norm.register_forward_hook(lambda _, args, out: out.to(torch.bfloat16))
    every_way(model, tower_loss, steps=3, split_master=True)


# Refusals and exceptions -----------------------------------------------------------------


def test_autocast_over_streamed_fp32_parameters_names_the_way_out() -> None:
    model = Tower()
    with offloaded(model, OffloadPolicy()) as (optimizer, _):
        remedy = "policy.compute_dtype='bfloat16'"
        with torch.autocast("cpu", torch.bfloat16), pytest.raises(RuntimeError, match=remedy):
            model(tokens(0))
        train(model, optimizer, 1)  # nothing is left half done
    resident = OffloadPolicy(placement={"default": Placement.RESIDENT})
    with offloaded(model, resident), torch.autocast("cpu", torch.bfloat16):
        model(tokens(0))


class Bomb(Exception):
    pass


@pytest.mark.parametrize("where", ["pre-hook", "forward", "backward", "recompute"])
@pytest.mark.parametrize("placement", list(Placement))
def test_an_exception_in_the_middle_leaves_training_exact(where: str, placement: Placement) -> None:
    torch.manual_seed(0)
    model = Checkpointed(False, 1) if where == "recompute" else Tower()
    plain = copy.deepcopy(model)
    reference = SerialAdamW(adamw(plain), max_grad_norm=0.5)
    train(plain, reference, 6)
    calls = [0]

    def explode(*_: Any) -> None:
        calls[0] += 1
        if calls[0] == (2 if where == "recompute" else 1):
            raise Bomb

    def fail(m: nn.Module, step: int) -> None:
        calls[0] = 0
        block = m.blocks[1]
        if where == "pre-hook":
            handle = block.register_forward_pre_hook(explode)
        elif where == "backward":
            handle = block.up.weight.register_hook(explode)
        else:
            handle = block.up.register_forward_hook(explode)
        with pytest.raises(Bomb):
            tower_loss(m, step, 0).backward()
        handle.remove()

    policy = OffloadPolicy(placement={"default": placement}, max_grad_norm=0.5)
    with offloaded(model, policy) as (optimizer, _):
        for step in range(6):
            if step in (1, 4):
                fail(model, 50 + step)
                optimizer.zero_grad()
            train(model, optimizer, 1, first=step)
        assert_equal_training(model, optimizer, plain, reference)


def test_what_is_not_supported_says_so_before_anything_changes() -> None:
    model = Tower()
    with offloaded(model, OffloadPolicy()) as (optimizer, _):
        with pytest.raises(RuntimeError, match="double backward"):
            tower_loss(model, 0, 0).backward(create_graph=True)
        optimizer.zero_grad()
        train(model, optimizer, 1)
    sparse = Tower()
    sparse.embed = nn.Embedding(37, 16, sparse=True)
    with offloaded(sparse, OffloadPolicy()) as (optimizer, _):
        with pytest.raises(RuntimeError, match="'embed.weight' is sparse"):
            tower_loss(sparse, 0, 0).backward()


def test_autograd_grad_leaves_p_grad_alone() -> None:
    model = Tower()
    plain = copy.deepcopy(model)

    def probe(m: nn.Module, optimizer: Any, step: int) -> None:
        value = tower_loss(m, 70 + step, 0)
        (grad,) = torch.autograd.grad(value, [m.blocks[0].up.weight])
        assert grad.abs().sum() > 0

    compare(plain, OffloadPolicy(), steps=4, between=probe)


def test_retain_graph_and_two_losses() -> None:
    def loss(model: nn.Module, step: int, micro: int) -> torch.Tensor:
        out = model(tokens(step)).float()
        first, second = out.square().mean(), out.sin().mean()
        first.backward(retain_graph=True)
        return second

    compare(Tower(), OffloadPolicy(accumulation_steps=2), steps=4, loss=loss)
