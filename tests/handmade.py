"""Attention as people write it: small modules that keep the weights they computed."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, HEADS = 16, 4


class Projected(nn.Module):
    """q, k, v (batch, heads, tokens, width) from one linear layer; keeps weights for the test."""

    def __init__(self, heads: int = HEADS, width: int = WIDTH) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.weights: Tensor | None = None

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        b, t, c = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        return q, k, v

    def merge(self, y: Tensor) -> Tensor:
        return self.out(y.transpose(1, 2).flatten(2))

    def keep(self, weights: Tensor) -> None:
        self.weights = weights.detach()


def causal(t: int) -> Tensor:
    return torch.ones(t, t, dtype=torch.bool).tril()


class NanoGPT(Projected):
    """karpathy/nanoGPT, the branch without flash attention; the mask is -inf."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x)
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(~causal(x.shape[1]), float("-inf"))
        att = F.softmax(att, dim=-1)
        self.keep(att)
        return self.merge(att @ v)


class Fused(Projected):
    """The same with the fused kernel."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x)
        logits = (q @ k.transpose(-2, -1)) / math.sqrt(k.size(-1))
        self.keep(logits.masked_fill(~causal(x.shape[1]), -torch.inf).softmax(-1))
        return self.merge(F.scaled_dot_product_attention(q, k, v, is_causal=True))


class Annotated(Projected):
    """The Annotated Transformer: the mask is -1e9."""

    fill = -1e9

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x)
        scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(q.size(-1))
        scores = scores.masked_fill(causal(x.shape[1]) == 0, self.fill)
        p = scores.softmax(dim=-1)
        self.keep(p * causal(x.shape[1]))
        return self.merge(torch.matmul(p, v))


class OldBert(Projected):
    """An added mask of -10000 where keys are hidden."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x)
        scores = (
            q @ k.mT / math.sqrt(q.size(-1)) + (1.0 - causal(x.shape[1]).to(x.dtype)) * -10000.0
        )
        p = scores.softmax(dim=-1)
        self.keep(p * causal(x.shape[1]))
        return self.merge(p @ v)


class FilledByWhere(Annotated):
    """`torch.where` with a constant that is no infinity."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x)
        scores = torch.einsum("bhqd,bhkd->bhqk", q, k) / math.sqrt(q.size(-1))
        p = torch.where(causal(x.shape[1]), scores, -1e4).softmax(-1)
        self.keep(p * causal(x.shape[1]))
        return self.merge(torch.einsum("bhqk,bhkd->bhqd", p, v))


class HeadsLast(Projected):
    """einsum in (batch, query, heads, key) order."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in self.project(x))
        p = torch.einsum("bqhd,bkhd->bqhk", q, k).softmax(-1)
        self.keep(p.transpose(1, 2))
        return self.out(torch.einsum("bqhk,bkhd->bqhd", p, v).flatten(2))


class KeysFirst(Projected):
    """Scores as k q^T, softmax over their second-last axis."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x)
        p = (k @ q.mT).softmax(-2)
        self.keep(p.mT)
        return self.merge(p.mT @ v)


class ValuesFirst(Projected):
    """SAGAN: v^T p^T instead of p v."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.flatten(0, 1) for t in self.project(x))
        p = torch.bmm(q, k.mT).softmax(-1)
        self.keep(p.unflatten(0, (-1, self.heads)))
        y = torch.bmm(v.mT, p.permute(0, 2, 1)).mT
        return self.merge(y.unflatten(0, (-1, self.heads)))


class Folded(Projected):
    """Batch and heads in one axis, as nn.MultiheadAttention has them."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.flatten(0, 1) for t in self.project(x))
        p = torch.baddbmm(torch.zeros(1, 1, 1, dtype=x.dtype), q, k.mT, alpha=0.5).softmax(-1)
        self.keep(p.unflatten(0, (-1, self.heads)))
        return self.merge(torch.bmm(F.dropout(p, 0.1), v).unflatten(0, (-1, self.heads)))


class GroupedByEinsum(Projected):
    """Grouped queries: heads and queries share an axis of the product."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x)
        k, v = k[:, :2], v[:, :2]
        q = q.unflatten(1, (2, -1))
        p = torch.einsum("bgnqd,bgkd->bgnqk", q, k).softmax(-1)
        self.keep(p.flatten(1, 2))
        return self.merge(torch.einsum("bgnqk,bgkd->bgnqd", p, v).flatten(1, 2))


class SingleHead(nn.Module):
    """One head, (batch, tokens, width), no head axis anywhere."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.weights: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        p = (self.query(x) @ self.key(x).transpose(1, 2)).softmax(-1)
        self.weights = p.detach()[:, None]
        return p @ self.value(x)


class Unbatched(nn.Module):
    """One head and one sequence: plain matrices."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.query, self.key, self.value = (
            nn.Parameter(torch.randn(width, width) / 4) for _ in range(3)
        )
        self.weights: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = x[0]
        p = torch.softmax((x @ self.query) @ (x @ self.key).T, dim=-1)
        self.weights = p.detach()[None, None]
        return p @ (x @ self.value)


class Autocast16(Projected):
    """Scores in float16, masked with its smallest number, softmax in float32."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.half() for t in self.project(x))
        scores = (q @ k.mT) + torch.zeros(1).half().masked_fill(
            ~causal(x.shape[1]), torch.finfo(torch.float16).min
        )
        p = F.softmax(scores, dim=-1, dtype=torch.float32)
        self.keep(p)
        return self.merge((p.half() @ v).to(x.dtype))


class TalkingHeads(Projected):
    """A 1 x 1 convolution mixes the heads before and after the softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = (nn.Conv2d(HEADS, HEADS, 1, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x)
        p = self.before(q @ k.mT).softmax(-1)
        self.keep(p)
        return self.merge(self.after(p) @ v)


class InPlace(Projected):
    """Operations in place before the softmax, weights written over after it."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x)
        scores = q @ k.mT
        scores.mul_(0.5)
        scores.masked_fill_(~causal(x.shape[1]), -torch.inf)
        p = scores.softmax(-1)
        self.keep(p)
        return self.merge(p @ v)


class PooledByQuery(nn.Module):
    """A learned query reads the sequence: one row per head, in training as well."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.heads = 2
        self.probe = nn.Parameter(torch.randn(1, 1, width))
        self.kv = nn.Linear(width, 2 * width)
        self.weights: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        k, v = self.kv(x).view(b, t, 2, 2, c // 2).permute(2, 0, 3, 1, 4)
        q = self.probe.expand(b, 1, c).view(b, 1, 2, c // 2).transpose(1, 2)
        self.weights = (q @ k.mT / math.sqrt(c // 2)).softmax(-1).detach()
        return F.scaled_dot_product_attention(q, k, v).flatten(1)


class SinkColumn(Projected):
    """A learned sink as one more column of scores, dropped after the softmax."""

    front = False

    def __init__(self) -> None:
        super().__init__()
        self.sink = nn.Parameter(torch.linspace(-1, 1, HEADS))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x)
        scores = (q @ k.mT).masked_fill(~causal(x.shape[1]), -torch.inf)
        sink = self.sink.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        both = [sink, scores] if self.front else [scores, sink]
        p = torch.cat(both, -1).softmax(-1)
        p = p[..., 1:] if self.front else p[..., :-1]
        self.keep(p)
        return self.merge(p @ v)


class SinkColumnInFront(SinkColumn):
    """The same, put before the keys."""

    front = True


class MemoryKeys(Projected):
    """Scores of learned keys beside those of the tokens, with values of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = nn.Parameter(torch.randn(2, HEADS, 2, WIDTH // HEADS) / 2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x)
        more_k, more_v = (m.expand(len(x), -1, -1, -1) for m in self.memory)
        mine = torch.einsum("bhqd,bhkd->bhqk", q, more_k).detach() * 1.0
        p = torch.cat([_unfollowed(mine), q @ k.mT], -1).softmax(-1)
        self.keep(p)
        return self.merge(p @ torch.cat([more_v, v], 2))


def _unfollowed(scores: Tensor) -> Tensor:
    """The same numbers by an operation that is not followed."""
    return scores.cumsum(0).diff(dim=0, prepend=torch.zeros_like(scores[:1]))


class Windows(Projected):
    """Windows of tokens beside folded batch and heads: (batch x heads, windows, queries, keys)."""

    size = 5

    def forward(self, x: Tensor) -> Tensor:
        t = x.shape[1]
        x = nn.functional.pad(x, (0, 0, 0, -t % self.size))
        q, k, v = (y.flatten(0, 1).unflatten(1, (-1, self.size)) for y in self.project(x))
        p = torch.einsum("nwqd,nwkd->nwqk", q, k).softmax(-1)
        # Windows count as sequences; the order is that of the windows first.
        w = p.unflatten(0, (-1, self.heads)).permute(2, 0, 1, 3, 4).flatten(0, 1)
        self.keep(w)
        y = torch.einsum("nwqk,nwkd->nwqd", p, v).flatten(1, 2)[:, :t]
        return self.merge(y.unflatten(0, (-1, self.heads)))


HANDMADE: tuple[type[nn.Module], ...] = (
    NanoGPT, Fused, Annotated, OldBert, FilledByWhere, HeadsLast, KeysFirst, ValuesFirst, Folded,
    GroupedByEinsum, SingleHead, Unbatched, Autocast16, TalkingHeads, InPlace, PooledByQuery,
    SinkColumn, SinkColumnInFront, MemoryKeys, Windows,
)  # fmt: skip


# What must not be taken for attention ------------------------------------------------------------


class Router(nn.Module):
    """A mixture of experts: softmax of a linear layer, chosen experts weighted."""

    def __init__(self, width: int = WIDTH, experts: int = 3) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts, bias=False)
        self.experts = nn.Parameter(torch.randn(experts, width, width) / 4)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        p = self.gate(flat).softmax(-1)
        every = torch.bmm(flat.expand(len(self.experts), -1, -1), self.experts)
        return torch.einsum("ne,end->nd", p, every).view_as(x)


class LinearAttention(Projected):
    """softmax(q) (softmax(k)^T v): no weights over the keys exist."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x)
        return self.merge(q.softmax(-1) @ (k.softmax(-2).mT @ v))


class EinsumLinearAttention(nn.Module):
    """The same with projections by einsum, which are batched products of a batch of one."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(3, width, HEADS, width // HEADS) / 4)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (torch.einsum("btc,chd->bhtd", x, w) for w in self.w)
        return (q.softmax(-1) @ (k.softmax(-2).mT @ v)).transpose(1, 2).flatten(2)


class Classifier(nn.Module):
    """A classifier whose probabilities weigh class embeddings."""

    def __init__(self, width: int = WIDTH, classes: int = 5) -> None:
        super().__init__()
        self.head = nn.Linear(width, classes)
        self.classes = nn.Parameter(torch.randn(classes, width))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x.mean(1)).softmax(-1) @ self.classes


NOT_ATTENTION: tuple[type[nn.Module], ...] = (
    Router, LinearAttention, EinsumLinearAttention, Classifier,
)  # fmt: skip


# What cannot be seen and must be reported ---------------------------------------------------------


class ExpSumAttention(Projected):
    """exp and sum by hand: no softmax anywhere."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x)
        p = (q @ k.mT).exp()
        return self.merge(p @ v / p.sum(-1, keepdim=True))


class SigmoidAttention(Projected):
    """Rows that do not sum to one."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x)
        return self.merge((q @ k.mT).sigmoid() @ v)


class OverwrittenAttention(Projected):
    """Writes into the scores between the softmax and the product with the values."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x)
        scores = q @ k.mT
        p = scores.softmax(-1)
        scores.zero_()
        return self.merge(p @ v)


class SideBySideAttention(Projected):
    """Block-sparse attention: scores of several products under one softmax (BigBird)."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x)
        p = torch.cat([q @ k[:, :, :2].mT, q @ k[:, :, 2:].mT], -1).softmax(-1)
        return self.merge(p[..., :2] @ v[:, :, :2] + p[..., 2:] @ v[:, :, 2:])


class CutAttention(Projected):
    """Weights of some keys are dropped before the product with the values."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x)
        return self.merge((q @ k.mT).softmax(-1)[..., 1:] @ v[:, :, 1:])


UNSEEN: tuple[type[nn.Module], ...] = (
    ExpSumAttention, SigmoidAttention, OverwrittenAttention, SideBySideAttention, CutAttention,
)  # fmt: skip
