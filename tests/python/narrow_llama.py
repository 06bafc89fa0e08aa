"""A Llama whose values are narrower than its keys, which no release of transformers has."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    apply_rotary_pos_emb,
    eager_attention_forward,
)

from tests.python.tiny_models import tiny_model


class NarrowAttention(LlamaAttention):
    """As Llama's, with values of `v_head_dim` numbers a head."""

    def __init__(self, config: Any, layer_idx: int, width: int):
        super().__init__(config, layer_idx)
        self.v_head_dim = width
        self.v_proj = nn.Linear(config.hidden_size, config.num_key_value_heads * width, False)
        self.o_proj = nn.Linear(config.num_attention_heads * width, config.hidden_size, False)

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        rows = hidden_states.shape[:2]

        def heads(projection: nn.Module, width: int) -> torch.Tensor:
            return projection(hidden_states).view(*rows, -1, width).transpose(1, 2)

        query, key = heads(self.q_proj, self.head_dim), heads(self.k_proj, self.head_dim)
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        value = heads(self.v_proj, self.v_head_dim)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        output, weights = attend(
            self, query, key, value, attention_mask, dropout=0.0, scaling=self.scaling, **kwargs
        )
        return self.o_proj(output.reshape(*rows, -1)), weights


def narrow_llama(
    key_dim: int = 32, value_dim: int = 16, dtype: torch.dtype = torch.float32
) -> nn.Module:
    """Three layers, 4 heads over 2 KV heads."""
    model = tiny_model("llama", head_dim=key_dim)
    torch.manual_seed(0)
    for layer in model.model.layers:
        layer.self_attn = NarrowAttention(model.config, layer.self_attn.layer_idx, value_dim)
        for parameter in layer.self_attn.parameters():
            nn.init.normal_(parameter, 0, parameter.shape[1] ** -0.5)
    return model.to(dtype).eval()
