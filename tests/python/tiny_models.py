"""Tiny random models of every family, and what tests of the cache share.

Weights are drawn with a large spread, so that tokens vary and attention is not flat.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers

from kvswap_torch import SwapConfig
from kvswap_torch.cache_argument import cache_argument
from kvswap_torch.hf import session as session_module
from tests.python.reference_heads import reference
from tests.python.reference_options import Options

VOCABULARY = 97
PAD, EOS = 0, 1

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": PAD,
    "bos_token_id": 2,
    "eos_token_id": EOS,
    "tie_word_embeddings": False,
}
_SLIDING = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "sliding_window": 6,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "query_pre_attn_scalar": 16,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"head_dim": 16}),
    "qwen2": ("Qwen2", {"num_hidden_layers": 2}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "mistral": ("Mistral", {"head_dim": 16, "sliding_window": None, "num_hidden_layers": 2}),
    "phi3": ("Phi3", {"hidden_size": 64, "num_hidden_layers": 2}),
    "gemma3": ("Gemma3", _SLIDING),
}
# hidden_size / heads is 12 for qwen2, which has no head_dim of its own to set.
FAMILIES["qwen2"][1]["hidden_size"] = 64

# Small enough that prompts of some twenty tokens have sealed groups.
SMALL = {
    "group_tokens": 2,
    "tail_tokens": 4,
    "sink_tokens": 2,
    "rank": 8,
    "score": "sum",  # as the executable specification scores
    "select_queries_max": 4,
    "read_depth": 8,
    "look_ahead": True,
}
COVERING = SwapConfig(groups_max=400, pages_max=400, **SMALL)
TIGHT = SwapConfig(groups_max=3, pages_max=6, **SMALL)


def config_of(family: str, **changes: Any) -> Any:
    name, extra = FAMILIES[family]
    config_name = "Gemma3TextConfig" if family == "gemma3" else f"{name}Config"
    return getattr(transformers, config_name)(**(_COMMON | extra | changes))


def tiny_model(family: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any):
    """A model in eval mode; `changes` go to its config."""
    torch.manual_seed(seed)
    model_class = getattr(transformers, f"{FAMILIES[family][0]}ForCausalLM")
    model = model_class(config_of(family, **changes))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                parameter.normal_(0, 1.0 / parameter.shape[1] ** 0.5)
            elif name.endswith("bias"):
                parameter.normal_(0, 0.2)
    return model.to(dtype).eval()


def prompt(batch: int, tokens: int, seed: int = 1, padding: tuple[int, ...] = ()) -> dict:
    """``input_ids`` and ``attention_mask``; sequence i begins with ``padding[i]`` pads."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (batch, tokens), generator=generator)
    mask = torch.ones_like(ids)
    for i, count in enumerate(padding):
        ids[i, :count], mask[i, :count] = PAD, 0
    return {"input_ids": ids, "attention_mask": mask}


def tokens_of(batch: int, length: int, seed: int = 5) -> torch.Tensor:
    return torch.randint(3, 97, (batch, length), generator=torch.Generator().manual_seed(seed))


def retaining_by_worth(**changes: Any) -> SwapConfig:
    """Retains tokens that a plug-in values, and attends these alone beside sinks and tail."""
    small = {name: value for name, value in SMALL.items() if name != "rank"}
    own = {"groups_max": 3, "pages_max": 6, "rows": "none", "keeper": "given"}
    return SwapConfig(**small | own | changes)


def character_tokenizer() -> Any:
    """One printable character a token, from "!" on."""
    from tokenizers import Tokenizer, decoders, models

    characters = {chr(ord("!") + i): i for i in range(VOCABULARY)}
    tokenizer = Tokenizer(models.BPE(characters, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="!", bos_token="#", eos_token='"'
    )


def reference_session(options: dict[str, Any]) -> Any:
    return reference(Options(**options))


def native_session(options: dict[str, Any]) -> Any:
    return _open_native(options)


_open_native = session_module.open_session
_cache_options = session_module.cache_options


def host_device_options(**options: Any) -> Any:
    """As `kvswap_torch.hf.session` makes them, on the device path over CPU tensors."""
    return _cache_options(**options | {"device": "host"})


def has_native() -> bool:
    try:
        return hasattr(importlib.import_module("kvswap_torch._C"), "TensorCache")
    except ImportError:
        return False


SESSIONS = {
    "reference": reference_session,
    "native": native_session,
    "host device": native_session,
}


def greedy(model: Any, inputs: dict, cache: Any = None, tokens: int = 12, **arguments: Any):
    """Generated ids; never stops early."""
    arguments = {"do_sample": False, "min_new_tokens": tokens, "max_new_tokens": tokens} | arguments
    return model.generate(**inputs, **cache_argument(model, cache), **arguments)


def least_named(error: Exception) -> int:
    """The smallest budget, in bytes, that a `BudgetError` names."""
    return int(str(error).split("at least ")[1].split(" ")[0])


def forward(model: Any, ids: torch.Tensor, cache: Any, **arguments: Any) -> torch.Tensor:
    """Logits of one pass, ``[batch, tokens, vocabulary]``."""
    with torch.no_grad():
        return model(ids, **cache_argument(model, cache), **arguments).logits


@contextmanager
def ctrl_c(module: Any, *, after: bool = False) -> Iterator[None]:
    """The next pass ends before `module`, or after it, as by Ctrl-C: no later hook is run."""

    def raises(*_: Any) -> None:
        raise KeyboardInterrupt

    register = module.register_forward_hook if after else module.register_forward_pre_hook
    handle = register(raises)
    try:
        yield
    except KeyboardInterrupt:
        return
    finally:
        handle.remove()
    raise AssertionError("ctrl_c: the module must be called, it was not")
