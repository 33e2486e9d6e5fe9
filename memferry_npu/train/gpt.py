"""A byte-level GPT as plain torch modules.

Owns: the model of the run files. Knows nothing of offload and must not import
the rest of the framework, except the options it is built from.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from memferry_npu.config import ModelConfig

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class Attention(nn.Module):
    """Causal self-attention over (batch, tokens, width)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.proj = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        q, k, v = self.qkv(x).view(batch, tokens, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(batch, tokens, width))


class MLP(nn.Module):
    """Two linear layers, four times as wide inside."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    """Attention and MLP, each behind a norm and added to the residual stream."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = MLP(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Bytes in, logits of the next byte out. Weights are in `config.dtype`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.context = config.context
        self.checkpointing = config.checkpointing
        self.wte = nn.Embedding(config.vocab, config.width)
        self.wpe = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config.width, config.heads) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab, bias=False)
        self._init_weights(config.layers)
        if config.tie_weights:
            self.head.weight = self.wte.weight
        self.to(DTYPES[config.dtype])

    def _init_weights(self, layers: int) -> None:
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # Layers that write to the residual stream start smaller, so that its size does not grow with depth.
                writes = name.endswith(("proj.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if writes else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (batch, tokens, vocab) for int64 tokens (batch, tokens); at most `context` tokens."""
        if tokens.shape[1] > self.context:
            raise ValueError(f"{tokens.shape[1]} tokens are more than the model's context of {self.context}")
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            if self.checkpointing == "none" or not torch.is_grad_enabled():
                x = block(x)
            else:
                # No block draws random numbers, so there is no generator state to keep.
                reentrant = self.checkpointing == "reentrant"
                x = checkpoint(block, x, use_reentrant=reentrant, preserve_rng_state=False)
        return self.head(self.norm(x))


def build_model(config: ModelConfig, seed: int) -> GPT:
    """The model with weights fixed by `seed`; torch's global generator is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return GPT(config)


def next_byte_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy in nats per byte, in fp32."""
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
