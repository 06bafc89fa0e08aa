"""Multi-head latent attention (MLA): what a token leaves behind is one latent for all heads.

DeepSeek V2 (arXiv:2405.04434, 2.1) and its kin cache a latent and a rotated key for each token, and
expand them to keys and values of every head before they attend. W_UK, the part of that expansion
that makes keys, may be applied to the query instead, and W_UV to what was attended: the scores and
the result are the same numbers. Attention then has one KV head, whose key is the latent with the
rotated key behind it, and whose value is the latent: what is cached is all that is read.

That is how a step decodes. A long chunk multiplies less by expanded keys and values, which are made
some tokens at a time and forgotten (`Latent.expands`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from kvswap_torch.half_linear import HalfLinear
from kvswap_torch.hf.offloaded import devices_of
from kvswap_torch.hf.placement import local_part


@dataclass(frozen=True)
class Latent:
    """How wide the parts of a model's latent attention are.

    Parameters
    ----------
    rank, rotary
        Of what a token caches: the latent, and the rotated key beside it.
    unrotated, value
        Of one head: the part of its key that is expanded from the latent, and its value.
    """

    rank: int
    rotary: int
    unrotated: int
    value: int

    @property
    def head_dim(self) -> int:
        """Numbers that are kept of a token and layer."""
        return self.rank + self.rotary

    @property
    def query_dim(self) -> int:
        """Of one head's query, before it takes W_UK in."""
        return self.unrotated + self.rotary

    def expands(self, past: int, tokens: int) -> bool:
        """Whether `tokens` queries after `past` others attend by expanded heads in fewer products.

        Either way each token meets W_UK and W_UV once: its latent when it is expanded, its query
        and its result when they are absorbed. Expanded heads meet them for each token of the past
        again, and then multiply narrow rows in the place of latents. To expand the chunk's own
        tokens and absorb for the past is never fewer than the better of the two.
        """
        pairs = tokens * past + tokens * (tokens + 1) // 2
        width = max(self.query_dim, self.value)  # kernels take keys and values of one width
        return past * self.rank * (self.unrotated + self.value) < 2 * pairs * (
            self.head_dim - width
        )

    def join(self, latents: torch.Tensor, rotated: torch.Tensor) -> torch.Tensor:
        """What the model caches, as the keys of one KV head: ``[batch, 1, tokens, head_dim]``."""
        return torch.cat((latents, rotated), dim=-1)

    def split(self, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The way back, to what the model caches."""
        latents, rotated = keys.split((self.rank, self.rotary), dim=-1)
        return latents, rotated

    def absorb(self, attention: nn.Module, query: torch.Tensor) -> torch.Tensor:
        """The query over what `join` made, ``[batch, heads, tokens, head_dim]``.

        query: ``[batch, heads, tokens, query_dim]``, its rotated part last.
        """
        plain, rotated = query.split((self.unrotated, self.rotary), dim=-1)
        to_keys = self.expansion(attention)[:, : self.unrotated]
        return torch.cat((plain @ to_keys.to(query.dtype), rotated), dim=-1)

    def expand(self, attention: nn.Module, output: torch.Tensor) -> torch.Tensor:
        """Each head's value, ``[batch, tokens, heads, value]``.

        output: ``[batch, tokens, heads, head_dim]``: what attention over `join` gave, of which the
        latent is the first part.
        """
        to_values = self.expansion(attention)[:, self.unrotated :]
        latents = output[..., : self.rank].transpose(1, 2)
        return (latents @ to_values.transpose(1, 2).to(output.dtype)).transpose(1, 2)

    def expanded(
        self, attention: nn.Module, latents: torch.Tensor, rotated: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of every head, as the model expands them: to compare it with."""
        heads = latents @ self.expansion(attention).transpose(1, 2).to(latents.dtype)
        keys, values = heads.split((self.unrotated, self.value), dim=-1)
        return torch.cat((keys, rotated.expand(-1, keys.shape[1], -1, -1)), dim=-1), values

    def expansion(self, attention: nn.Module) -> torch.Tensor:
        """W_UK over W_UV of each head of this process, ``[heads, unrotated + value, rank]``."""
        projection = attention.kv_b_proj
        if _is_plain(projection):
            weight = local_part(projection.weight)
        else:  # quantised, or with an adapter: what it makes of each unit vector
            unit = torch.eye(self.rank, dtype=_dtype(attention), device=_device(attention))
            weight = projection(unit).detach().T
        return weight.reshape(-1, self.unrotated + self.value, self.rank)


def latent_of(attention: Any) -> Latent | None:
    """None: the model caches keys and values of every KV head."""
    if not hasattr(attention, "kv_lora_rank"):
        return None
    return Latent(
        rank=attention.kv_lora_rank,
        rotary=attention.qk_rope_head_dim,
        unrotated=attention.qk_nope_head_dim,
        value=attention.v_head_dim,
    )


def _is_plain(projection: nn.Module) -> bool:
    if type(projection) not in (nn.Linear, HalfLinear):
        return False
    # transformers puts a forward of its own there to split heads over processes.
    is_split = isinstance(projection.weight, DTensor)
    return (
        (is_split or type(projection.weight) is nn.Parameter)
        and projection.weight.is_floating_point()
        and (is_split or "forward" not in vars(projection))
        and not projection._forward_hooks
        and not projection._forward_pre_hooks
    )


def _dtype(attention: nn.Module) -> torch.dtype:
    """Of what comes into its expansion: what its norm makes."""
    return next(attention.kv_a_layernorm.parameters()).dtype


def _device(attention: nn.Module) -> torch.device:
    return next(iter(devices_of(attention.kv_a_layernorm)))
