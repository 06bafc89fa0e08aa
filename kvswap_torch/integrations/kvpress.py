"""kvpress' evaluation over a KV cache on disk: its tasks, its prompts, its metrics.

::

    python -m kvswap_torch.integrations.kvpress kvpress/evaluation --kv_memory_bytes 64MiB \\
        --kv_path /fast/disk --model DIR --dataset ruler --data_dir 4096

The first argument is the folder of kvpress' sources that has ``evaluate.py``; all options that are
not the cache's are its own. In a program, `use_cache` makes the pipeline that it asks
transformers for one over a `KVSwapCache`.

A press must not be given: what is selected, or evicted, is the cache's settings, so a preset takes
its place. As with a press, the context is read without a question; then each question is read token
by token under selection, since a pass of several tokens may attend everything.
"""

from __future__ import annotations

import argparse
import runpy
import sys
from pathlib import Path
from typing import Any, ClassVar

import torch

from kvswap_torch.errors import ConfigError

try:
    from kvpress.pipeline import (
        PIPELINE_REGISTRY,
        AutoModelForCausalLM,
        KVPressTextGenerationPipeline,
    )
except ImportError as error:
    raise ImportError(
        f"kvpress: kvpress must be installed, and is not; run: pip install kvpress ({error})"
    ) from error

TASK = "kv-press-text-generation"
NO_PRESS = "no_press"
OWN = ("kv_path", "kv_memory_bytes", "config", "preset")


class KVSwapPipeline(KVPressTextGenerationPipeline):
    """kvpress' pipeline, whose cache is a `KVSwapCache` that it opens for each context."""

    kv: ClassVar[dict[str, Any]] = {"kv_path": "."}
    """`kv_path`, `kv_memory_bytes`, `config` and `preset`, as the cache has them; see
    `use_cache`."""

    def _forward(
        self,
        input_tensors: dict[str, Any],
        max_new_tokens: int = 50,
        press: Any = None,
        cache: Any = None,
    ) -> Any:
        from kvswap_torch import KVSwapCache

        if press is not None or cache is not None:
            name = "press" if press is not None else "cache"
            raise ConfigError(
                f"kvpress: {name} must not be given, since this opens a cache of its own, got "
                f"{press or cache}; take --press_name {NO_PRESS}, and a preset"
            )
        asked = max(ids.shape[1] for ids in input_tensors["questions_ids"])
        context = input_tensors["context_ids"].shape[1] + asked + int(max_new_tokens)
        kept = {name: value for name, value in self.kv.items() if name != "kv_path"}
        with KVSwapCache(self.model, self.kv["kv_path"], **kept, max_context=context) as opened:
            return super()._forward(input_tensors, max_new_tokens, None, opened)

    def generate_answer(
        self, question_ids: torch.Tensor, cache: Any, context_length: int, max_new_tokens: int
    ) -> str:
        from kvswap_torch.hf.families import input_device

        ids = question_ids.to(input_device(self.model))
        if ids.shape[1] == 0:
            raise ConfigError("kvpress: a question must have a token, with how answers begin")
        for at in range(ids.shape[1] - 1):
            self.model(input_ids=ids[:, at : at + 1], **cache.as_argument(), logits_to_keep=1)
        before = context_length + ids.shape[1] - 1
        return super().generate_answer(ids[:, -1:], cache, before, max_new_tokens)

    def _remove_answer_from_cache(self, cache: Any, cache_seq_lengths: list[int]) -> None:
        """Back to the context, for the next question."""
        cache.crop(cache_seq_lengths[0] - cache.get_seq_length())


def use_cache(
    kv_path: str | None = ".",
    kv_memory_bytes: int | str | None = None,
    config: str | None = None,
    preset: str | None = None,
) -> None:
    """From now on transformers' pipeline for kvpress' task is one over a `KVSwapCache`."""
    found = {"kv_memory_bytes": kv_memory_bytes, "config": config, "preset": preset}
    KVSwapPipeline.kv = {"kv_path": kv_path} | {k: v for k, v in found.items() if v is not None}
    PIPELINE_REGISTRY.register_pipeline(
        TASK, pipeline_class=KVSwapPipeline, pt_model=AutoModelForCausalLM
    )


def main(arguments: list[str]) -> None:
    """Runs ``evaluate.py`` of a folder, with the cache's options taken off.

    Raises
    ------
    ConfigError
        There is no such script, or a press is asked for.
    """
    parser = argparse.ArgumentParser(prog="kvswap_torch.integrations.kvpress", allow_abbrev=False)
    parser.add_argument("evaluation", type=Path, help="kvpress' folder with evaluate.py")
    for name in OWN:
        parser.add_argument(f"--{name}", help="as KVSwapCache takes it")
    parser.add_argument("--press_name", default=NO_PRESS)
    own, rest = parser.parse_known_args(arguments)
    script = own.evaluation.resolve() / "evaluate.py"
    if not script.is_file():
        raise ConfigError(
            f"kvpress: the first argument must be the folder of evaluate.py in kvpress' sources, "
            f"got {own.evaluation}"
        )
    if own.press_name != NO_PRESS:
        raise ConfigError(
            f"kvpress: press_name must be {NO_PRESS}, since the cache selects, got "
            f"{own.press_name}; take --preset"
        )
    given = {name: getattr(own, name) for name in OWN if getattr(own, name) is not None}
    use_cache(**given)
    sys.argv = [str(script), *rest, f"--press_name={NO_PRESS}"]
    sys.path.insert(0, str(script.parent))  # its own modules
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
