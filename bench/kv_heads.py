"""The same function with another number of KV heads: what a choice costs depends on it."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

PROJECTED = ("k_proj", "v_proj")


def with_kv_heads(model: Any, kv_heads: int) -> Any:
    """A Qwen3 that computes what `model` does, with more or fewer KV heads.

    More: each has several copies, of which each serves a part of its queries. Fewer: several stand
    side by side in one, which is as many times as wide; a query is zero where it asks others. So
    numbers stay what they are, but for the order of sums, and every choice is of the model's own
    keys and queries.

    Parameters
    ----------
    kv_heads
        A multiple of the model's, that divides its query heads, or a divisor of it.
    """
    config = model.config
    own, heads = config.num_key_value_heads, config.num_attention_heads
    if kv_heads == own:
        return model
    if model.config.model_type != "qwen3" or not (
        (kv_heads % own == 0 and heads % kv_heads == 0) or own % kv_heads == 0
    ):
        raise ValueError(
            f"with_kv_heads: must be a qwen3 and a multiple or divisor of its {own} KV heads, got "
            f"{config.model_type} and {kv_heads}"
        )
    return _copied(model, kv_heads // own) if kv_heads > own else _joined(model, own // kv_heads)


def _made_like(model: Any, state: dict[str, torch.Tensor], **changes: Any) -> Any:
    config = copy.deepcopy(model.config)
    for name, value in changes.items():
        setattr(config, name, value)
    made = type(model)(config).to(model.dtype).eval()
    made.load_state_dict(state)
    return made


def _copied(model: Any, times: int) -> Any:
    state, dim = dict(model.state_dict()), model.config.head_dim
    for name, weight in state.items():
        if name.split(".")[-2] in PROJECTED:
            state[name] = weight.unflatten(0, (-1, dim)).repeat_interleave(times, 0).flatten(0, 1)
    return _made_like(model, state, num_key_value_heads=times * model.config.num_key_value_heads)


class SideBySide(nn.Module):
    """The norm of each of several heads whose halves, which RoPE turns together, alternate."""

    def __init__(self, norm: nn.Module, count: int):
        super().__init__()
        self.norm, self.count = norm, count

    def forward(self, keys: torch.Tensor) -> torch.Tensor:
        apart = keys.unflatten(-1, (2, self.count, -1)).transpose(-3, -2).flatten(-2)
        return self.norm(apart).unflatten(-1, (2, -1)).transpose(-3, -2).flatten(-3)


def _joined(model: Any, count: int) -> Any:
    config, dim = model.config, model.config.head_dim
    a_group = config.num_attention_heads // config.num_key_value_heads
    state = {}
    for name, weight in model.state_dict().items():
        kind = name.split(".")[-2]
        if kind == "q_proj":
            state[name] = _spread(weight, dim, a_group, count)
        elif kind == "o_proj":
            state[name] = _spread(weight.T, dim, a_group, count).T.contiguous()
        elif kind in PROJECTED:
            state[name] = _woven(weight.unflatten(0, (-1, count, 2, dim // 2)))
        elif kind == "q_norm":
            # Of a query that is zero elsewhere the mean square is as many times smaller.
            halves = weight.unflatten(0, (2, 1, -1)).expand(2, count, -1)
            state[name] = halves.flatten() * count**-0.5
        elif kind == "k_norm":
            state[name] = weight.repeat(count)  # replaced below
        else:
            state[name] = weight
    heads = config.num_key_value_heads // count
    made = _made_like(model, state, num_key_value_heads=heads, head_dim=count * dim)
    rotary = made.model.rotary_emb
    rotary.inv_freq = model.model.rotary_emb.inv_freq.repeat(count)
    for layer, own in zip(made.model.layers, model.model.layers, strict=True):
        layer.self_attn.scaling = own.self_attn.scaling
        layer.self_attn.q_norm.variance_epsilon = own.self_attn.q_norm.variance_epsilon / count
        layer.self_attn.k_norm = SideBySide(copy.deepcopy(own.self_attn.k_norm), count)
    return made


def _woven(weight: torch.Tensor) -> torch.Tensor:
    """``[heads, count, 2, dim / 2, width]`` to rows of heads whose halves alternate."""
    return weight.transpose(1, 2).flatten(0, 3)


def _spread(weight: torch.Tensor, dim: int, a_group: int, count: int) -> torch.Tensor:
    """Rows of query heads, each at the place of its KV head and zero at the others'."""
    rows = weight.unflatten(0, (-1, count, a_group, 2, dim // 2))
    wide = rows.new_zeros(*rows.shape[:4], count, *rows.shape[4:])
    for i in range(count):
        wide[:, i, :, :, i] = rows[:, i]
    return wide.flatten(0, 5)
