"""Models of every kind of layer, saved and opened in another process.

`make saved-models` takes every model that a cache can be opened for.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvswap_torch import KVSwapCache, UnsupportedModelError
from tests.python.every_model import build, families
from tests.python.saved_child import OtherProcess
from tests.python.saved_conversation import goes_on
from tests.python.tiny_models import TIGHT, greedy, has_native, prompt

pytestmark = [
    pytest.mark.skipif(not has_native(), reason="kvswap_torch._C is not built"),
    pytest.mark.usefixtures("one_thread"),
]
PADDING = (0, 5)
# Attention alone, and beside it: windows, state spaces, gated deltas, convolutions, shared keys,
# layers without positions, queries scaled by positions.
SOME = ("GPTNeoX", "GptOss", "Gemma3n", "Qwen3Next", "KimiLinear", "Bamba", "Zamba2", "Lfm2")
SOME += ("Beam", "Lfm3", "Llama4")
# Values narrower than keys; latents, also in two attentions of one layer.
SOME += ("MiMoV2Flash", "DeepseekV2", "DeepseekV3", "LongcatFlash")
# Layers below another name, attention in a wrapper, one KV head; a decoder of an encoder's kind.
SOME += ("GPTBigCode", "Dbrx", "Roberta", "ModernBertDecoder")


def test_another_process_goes_on(tmp_path: Path) -> None:
    wrong = {}
    chosen = families() if os.environ.get("KVSWAP_TEST_ALL_SAVED") else SOME
    with OtherProcess() as other:
        for family in chosen:
            model = build(family)
            try:
                cache = KVSwapCache(model, tmp_path, TIGHT)
            except UnsupportedModelError:
                continue
            with cache:
                out = greedy(model, prompt(2, 40, padding=PADDING), cache, tokens=4)
                cache.save(tmp_path / family)
                other.send(family, tmp_path / family, tmp_path, out, PADDING, builder="every_model")
                expected = goes_on(model, cache, out, PADDING)
            said = other.receive()
            is_probed = said["probe"].startswith(("passed", "skipped: this model"))
            if said["tokens"] != expected or not is_probed:
                wrong[family] = said["probe"]
    assert wrong == {}
