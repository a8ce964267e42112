"""A small transformer with the switches that the kinds need."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.benchmarks.collapse.data import VOCABULARY
from tests.benchmarks.collapse.kinds import Run


class Attention(nn.Module):
    """Self-attention. `bias` is added to the logits of key `bias_at`, `scale` multiplies all."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run, self.heads, self.groups = run, run.heads, run.groups or run.heads
        self.size = run.width // run.heads
        self.query = nn.Linear(run.width, run.width, bias=False)
        self.key = nn.Linear(run.width, self.groups * self.size, bias=False)
        self.value = nn.Linear(run.width, self.groups * self.size, bias=False)
        self.out = nn.Linear(run.width, run.width, bias=False)
        self.norms = (
            nn.ModuleList([nn.RMSNorm(self.size), nn.RMSNorm(self.size)]) if run.qk_norm else None
        )
        self.scale, self.bias, self.bias_at = 1.0, 0.0, 0

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q = self.query(x).view(batch, length, self.heads, self.size).transpose(1, 2)
        k = self.key(x).view(batch, length, self.groups, self.size).transpose(1, 2)
        v = self.value(x).view(batch, length, self.groups, self.size).transpose(1, 2)
        if self.norms is not None:
            q, k = self.norms[0](q), self.norms[1](k)
        if self.run.position == "rope":
            q, k = rotate(q), rotate(k)
        q = q * self.scale
        if self.groups != self.heads:
            k, v = (part.repeat_interleave(self.heads // self.groups, dim=1) for part in (k, v))
        mask = self._mask(length, x)
        drop = self.run.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=self.run.causal and mask is None, dropout_p=drop
        )
        return self.out(mixed.transpose(1, 2).reshape(batch, length, -1))

    def _mask(self, length: int, x: Tensor) -> Tensor | None:
        if not self.run.window and not self.bias:
            return None
        ahead = torch.arange(length)[None, :] - torch.arange(length)[:, None]
        mask = torch.zeros(length, length)
        if self.run.causal:
            mask[ahead > 0] = -math.inf
        if self.run.window:
            mask[ahead <= -self.run.window] = -math.inf
        if self.bias:
            mask[:, self.bias_at] += self.bias
        return mask.to(x.dtype)


def rotate(x: Tensor) -> Tensor:
    """Rotary position embedding."""
    length, size = x.shape[-2:]
    angle = torch.arange(length)[:, None] * 10_000.0 ** (-torch.arange(0, size, 2) / size)
    cos, sin = angle.cos(), angle.sin()
    first, second = x[..., ::2], x[..., 1::2]
    return torch.stack([first * cos - second * sin, first * sin + second * cos], dim=-1).flatten(-2)


class Block(nn.Module):
    """Attention and MLP, pre- or post-norm."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.post = run.norm == "post"
        self.first, self.second = nn.LayerNorm(run.width), nn.LayerNorm(run.width)
        self.attention = Attention(run)
        self.mlp = nn.Sequential(
            nn.Linear(run.width, 4 * run.width),
            nn.GELU(),
            nn.Linear(4 * run.width, run.width),
            nn.Dropout(run.dropout),
        )

    def forward(self, x: Tensor) -> Tensor:
        if self.post:
            x = self.first(x + self.attention(x))
            return self.second(x + self.mlp(x))
        x = x + self.attention(self.first(x))
        return x + self.mlp(self.second(x))


class Model(nn.Module):
    """Tokens to logits."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run = run
        self.embed = nn.Embedding(VOCABULARY, run.width)
        longest = max([run.length, *run.lengths])
        self.position = nn.Embedding(longest, run.width) if run.position == "learned" else None
        self.blocks = nn.ModuleList([Block(run) for _ in range(run.layers)])
        self.norm = nn.LayerNorm(run.width)
        self.head = nn.Linear(run.width, VOCABULARY, bias=False)
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                nn.init.normal_(weight, std=0.02)
            if ".query." in name or ".key." in name:
                # A large initialisation makes logits of order `init`, whatever the width.
                nn.init.normal_(
                    weight, std=0.02 if run.init == 1.0 else run.init / math.sqrt(run.width)
                )

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        if self.position is not None:
            x = x + self.position(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))
