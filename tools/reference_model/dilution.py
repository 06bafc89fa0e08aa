"""Real text that the end of a sample attends to besides the sample itself.

In a long document a question's attention is thinned by tens of thousands of tokens that have
nothing to do with it. Training on whole long documents costs the square of their length; here the
long text's keys and values are computed without gradients, kept for a few steps, and seen by the
last rows of each sample only: where the questions are.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache, Qwen3ForCausalLM

ROWS = 1024  # of each sample, the last, that see the text
PIECE = 4096  # tokens that the text is read by; each piece knows itself only
STEPS = 8  # for which keys and values are kept


class Dilution:
    """The text, as keys and values in each attention module of a model.

    Parameters
    ----------
    pieces
        Of `PIECE` tokens each.
    span
        Pieces begin anywhere below this position.
    """

    def __init__(self, model: Qwen3ForCausalLM, pieces: int, length: int, span: int) -> None:
        self.model = model
        self.pieces = pieces
        self.span = span
        self.age = STEPS
        config = model.config
        device = next(model.parameters()).device
        shape = (1, config.num_key_value_heads, pieces * PIECE, config.head_dim)
        row = torch.arange(ROWS, device=device)[:, None] + length - ROWS
        own = torch.arange(length, device=device)[None] <= row
        seen = torch.cat([own.new_ones(ROWS, shape[2]), own], dim=1)
        for module in self._modules():
            for name in ("text_keys", "text_values"):
                empty = torch.zeros(shape, dtype=torch.bfloat16, device=device)
                module.register_buffer(name, empty, persistent=False)
            module.register_buffer("text_mask", seen, persistent=False)

    def _modules(self) -> list[nn.Module]:
        return [layer.self_attn for layer in self.model.model.layers]

    def renew(self, rng: np.random.Generator, draw) -> None:
        """Read other text with the weights of now, once in `STEPS` calls.

        Parameters
        ----------
        draw
            ``(rng, tokens)`` to that many token numbers.
        """
        self.age += 1
        if self.age < STEPS:
            return
        self.age = 0
        show(self.model, False)
        modules = self._modules()
        for piece in range(self.pieces):
            ids = torch.from_numpy(draw(rng, PIECE)).to(modules[0].text_keys.device)[None]
            first = int(rng.integers(self.span))
            positions = torch.arange(first, first + PIECE, device=ids.device)[None]
            cache = DynamicCache()
            with torch.no_grad(), torch.autocast(ids.device.type, torch.bfloat16):
                self.model.model(
                    input_ids=ids,
                    position_ids=positions,
                    attention_mask={"full_attention": None},
                    past_key_values=cache,
                    use_cache=True,
                )
            at = slice(piece * PIECE, (piece + 1) * PIECE)
            for module, layer in zip(modules, cache.layers, strict=True):
                module.text_keys[:, :, at] = layer.keys
                module.text_values[:, :, at] = layer.values


def show(model: Qwen3ForCausalLM, shown: bool) -> None:
    """Whether the next passes see the text."""
    for layer in model.model.layers:
        layer.self_attn.sees_text = shown


def attend_with_text(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scale: float | None
) -> Tensor:
    """Causal attention whose last `ROWS` rows also attend to the module's text.

    Parameters
    ----------
    query
        ``[1, heads, tokens, head_dim]``
    key, value
        ``[1, kv_heads, tokens, head_dim]``

    Returns
    -------
    Tensor
        As `query`.
    """
    heads = query.shape[1]
    first = query.shape[2] - ROWS
    head = F.scaled_dot_product_attention(
        query[:, :, :first],
        repeat_heads(key[:, :, :first], heads),
        repeat_heads(value[:, :, :first], heads),
        is_causal=True,
        scale=scale,
    )
    keys = torch.cat([module.text_keys, key.to(torch.bfloat16)], dim=2)
    values = torch.cat([module.text_values, value.to(torch.bfloat16)], dim=2)
    tail = F.scaled_dot_product_attention(
        query[:, :, first:].to(torch.bfloat16),
        repeat_heads(keys, heads),
        repeat_heads(values, heads),
        attn_mask=module.text_mask,
        scale=scale,
    )
    return torch.cat([head, tail.to(head.dtype)], dim=2)


def repeat_heads(tensor: Tensor, heads: int) -> Tensor:
    """``[batch, kv_heads, ...]`` as ``[batch, heads, ...]``; trains faster than grouped heads."""
    groups = heads // tensor.shape[1]
    return tensor[:, :, None].expand(-1, -1, groups, -1, -1).flatten(1, 2)
