"""A model of lm-evaluation-harness whose KV cache is on disk: ``--model kvswap``.

::

    python -m kvswap_torch.integrations.lm_eval --model kvswap --tasks gsm8k \\
        --model_args pretrained=DIR,kv_path=/fast/disk,kv_memory_bytes=64MiB,device=cpu

takes every option of ``lm_eval``; in a program, import this module before ``simple_evaluate()``.
Answers are generated with the cache. A log-likelihood is of a continuation that is decoded token by
token after its context, so that it too is attended over a selection; lm-evaluation-harness' own
models score it in one exact pass, and many continuations at once.
"""

from __future__ import annotations

from typing import Any

import torch

from kvswap_torch.integrations.scoring import Scored, score

try:
    from lm_eval.api.registry import register_model
    from lm_eval.models.huggingface import HFLM
except ImportError as error:
    raise ImportError(
        "lm_eval: lm-evaluation-harness must be installed, and is not; run: pip install "
        f"'kvswap_torch[lm-eval]' ({error})"
    ) from error

OWN = ("kv_memory_bytes", "config", "preset", "keep")


@register_model("kvswap")
class KVSwapLM(HFLM):
    """HFLM with a `KVSwapCache`.

    Takes HFLM's arguments, and `kv_path`, `kv_memory_bytes`, `config`, `preset` and `keep` as the
    cache does.
    """

    def __init__(self, *args: Any, kv_path: str | None = ".", **kwargs: Any):
        own = {name: kwargs.pop(name) for name in OWN if name in kwargs}
        self._kv = {"kv_path": kv_path} | own
        kwargs.setdefault("device", "cpu")
        super().__init__(*args, **kwargs)

    def _model_generate(
        self, context: torch.Tensor, max_length: int, stop: list[str], **arguments: Any
    ) -> torch.Tensor:
        from kvswap_torch.integrations import generate_folder

        own = {"custom_generate": generate_folder(), "trust_remote_code": True}
        return super()._model_generate(context, max_length, stop, **arguments, **own, **self._kv)

    def _loglikelihood_tokens(
        self,
        requests: list[tuple[tuple[str, str], list[int], list[int]]],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
    ) -> list[Scored]:
        from kvswap_torch import KVSwapCache

        kept = {name: value for name, value in self._kv.items() if name != "kv_path"}
        told = []
        for asked, context, continuation in requests:
            longest = self.max_length + 1 - len(continuation)
            context = context[-longest:] or [self.prefix_token_id]
            if "kv_memory_bytes" in kept:
                kept["max_context"] = len(context) + len(continuation)
            with KVSwapCache(self.model, self._kv["kv_path"], **kept) as cache:
                told.append(score(self.model, cache, context, continuation))
            if asked is not None:
                self.cache_hook.add_partial("loglikelihood", asked, told[-1])
        return told


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
