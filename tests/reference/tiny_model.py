"""The Qwen3-MoE forward pass in plain torch, written for training a small model fast.

Every expert is computed for every token and weighted by its routing weight, which is zero where it was not chosen: with
16 small experts two large matrix products beat any gather, nothing depends on data-dependent shapes, and the device
never waits for the host. Parameter names and layouts are the same as in transformers with packed experts, so that
exporting is only renaming.
"""

from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass
class TinyConfig:
    """The architecture, in the vocabulary of config.json."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    max_position_embeddings: int
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6

    def hub_values(self):
        """Keys of a hub-style config.json that differ from its defaults."""
        values = asdict(self)
        # No dense layer exists; the key is required all the same.
        values["intermediate_size"] = self.moe_intermediate_size * self.num_experts_per_tok
        values["tie_word_embeddings"] = True
        values["norm_topk_prob"] = True
        return values


class RmsNorm(nn.Module):
    """RMS norm in f32 with a learned scale."""

    def __init__(self, size, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x):
        return F.rms_norm(x.float(), self.weight.shape, self.weight, self.eps).to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention with RMS norm on queries and keys."""

    def __init__(self, config):
        super().__init__()
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = config.head_dim
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.q_proj = nn.Linear(hidden, self.heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(hidden, self.kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(hidden, self.kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.head_dim, hidden, bias=False)
        self.q_norm = RmsNorm(self.head_dim, eps)
        self.k_norm = RmsNorm(self.head_dim, eps)

    def forward(self, x, rope, dropout):
        batch, length, _ = x.shape
        q = self.q_norm(self.q_proj(x).view(batch, length, self.heads, self.head_dim))
        k = self.k_norm(self.k_proj(x).view(batch, length, self.kv_heads, self.head_dim))
        v = self.v_proj(x).view(batch, length, self.kv_heads, self.head_dim)
        q, k, v = rotate(q, rope).transpose(1, 2), rotate(k, rope).transpose(1, 2), v.transpose(1, 2)
        out = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=True, dropout_p=dropout if self.training else 0.0
        )
        return self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))


def rotate(x, rope):
    """Rotates pairs (i, i + half) of each head [B, T, heads, head_dim] by the position's angles."""
    cos, sin = rope
    first, second = x.float().chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)


class Experts(nn.Module):
    """Packed expert weights in the layout of transformers 5."""

    def __init__(self, config):
        super().__init__()
        e, h, i = config.num_experts, config.hidden_size, config.moe_intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(e, 2 * i, h))
        self.down_proj = nn.Parameter(torch.empty(e, h, i))

    def forward(self, x, weights):
        """`x` [N, H], `weights` [N, E] with zeros for experts that were not chosen."""
        experts, double, hidden = self.gate_up_proj.shape
        gate, up = F.linear(x, self.gate_up_proj.view(-1, hidden)).view(-1, experts, double).chunk(2, -1)
        # Weighting before the down projection lets one product sum over all experts.
        active = F.silu(gate) * up * weights.unsqueeze(-1).to(gate.dtype)
        down = self.down_proj.permute(1, 0, 2).reshape(hidden, -1)
        return F.linear(active.flatten(1), down)


class Moe(nn.Module):
    """Top-k softmax routing, renormalised, over packed experts."""

    def __init__(self, config):
        super().__init__()
        self.k = config.num_experts_per_tok
        self.gate = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.experts = Experts(config)

    def forward(self, x):
        flat = x.flatten(0, 1)
        with torch.autocast(x.device.type, enabled=False):
            probs = F.linear(flat.float(), self.gate.weight.float()).softmax(-1)
            top, ids = probs.topk(self.k, -1)
            top = top / top.sum(-1, keepdim=True)
        weights = torch.zeros_like(probs).scatter(1, ids, top)
        load = torch.zeros_like(probs).scatter(1, ids, 1.0).mean(0)
        # Switch-style balance: 1 when experts are used evenly, growing as they are not.
        balance = (load * probs.mean(0)).sum() * probs.shape[1] / self.k
        return self.experts(flat, weights).view_as(x), balance, load.detach()


class Layer(nn.Module):
    """Pre-norm attention and MoE with residual connections."""

    def __init__(self, config):
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = Moe(config)
        self.input_layernorm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RmsNorm(config.hidden_size, config.rms_norm_eps)


class Backbone(nn.Module):
    """The part whose tensors are named `model.*` in a checkpoint."""

    def __init__(self, config):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = RmsNorm(config.hidden_size, config.rms_norm_eps)


class TinyQwen3Moe(nn.Module):
    """Logits, mean balance loss and per-layer expert load of a batch of token ids."""

    def __init__(self, config, dropout=0.0):
        super().__init__()
        self.config, self.dropout = config, dropout
        self.model = Backbone(config)
        half = torch.arange(0, config.head_dim, 2, dtype=torch.float) / config.head_dim
        angles = torch.outer(
            torch.arange(config.max_position_embeddings, dtype=torch.float), config.rope_theta**-half
        )
        self.register_buffer("cos", angles.cos()[:, None], persistent=False)
        self.register_buffer("sin", angles.sin()[:, None], persistent=False)
        self.init_weights()

    def init_weights(self):
        """Normal, 0.02; products that end in the residual stream are smaller in deeper models."""
        residual = (2 * self.config.num_hidden_layers) ** -0.5
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                scale = residual if name.endswith(("o_proj.weight", "down_proj")) else 1.0
                nn.init.normal_(parameter, std=0.02 * scale)

    def forward(self, ids):
        length = ids.shape[1]
        rope = self.cos[:length], self.sin[:length]
        x = self.drop(self.model.embed_tokens(ids))
        balances, loads = [], []
        for layer in self.model.layers:
            x = x + self.drop(layer.self_attn(layer.input_layernorm(x), rope, self.dropout))
            out, balance, load = layer.mlp(layer.post_attention_layernorm(x))
            x = x + self.drop(out)
            balances.append(balance)
            loads.append(load)
        logits = F.linear(self.model.norm(x), self.model.embed_tokens.weight)
        return logits, torch.stack(balances).mean(), torch.stack(loads)

    def drop(self, x):
        """Residual dropout, off in evaluation."""
        return F.dropout(x, self.dropout, self.training) if self.dropout else x
