"""A cache that was cropped, however deep, is forked and answers as its fork does: every preset.

What a method remembers of tokens that are gone must not outlive them: it was no state that could
be saved.
"""

from __future__ import annotations

import pytest
import torch

from kvswap_torch import KVSwapCache
from kvswap_torch.preset import PRESETS
from tests.python.tiny_models import forward, has_native, prompt, tiny_model

pytestmark = [
    pytest.mark.skipif(not has_native(), reason="kvswap_torch._C is not built"),
    pytest.mark.usefixtures("one_thread"),
]
CROPS = (2, 3, 7, 11, 21, 31, 61)  # tokens, each from what the one before left and one more
#: Has settings that follow from a model's heads, as its own tests give them.
WITHOUT = {"compresskv"}


@pytest.mark.parametrize("name", [each.name for each in PRESETS if each.name not in WITHOUT])
def test_a_fork_after_a_crop_answers_alike(name, tmp_path):
    model = tiny_model("llama")
    steps = prompt(2, 60, seed=7)["input_ids"]
    with KVSwapCache(model, tmp_path, preset=name) as cache:
        forward(model, prompt(2, 150)["input_ids"], cache)
        for step in range(40):
            forward(model, steps[:, step : step + 1], cache)
        for at, crop in enumerate(CROPS):
            cache.crop(-crop)
            following = steps[:, 40 + at : 41 + at]
            with cache.fork() as fork:
                assert torch.equal(
                    forward(model, following, fork), forward(model, following, cache)
                )
