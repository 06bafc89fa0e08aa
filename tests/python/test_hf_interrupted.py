"""What a pass that ends in the middle leaves: nothing, in this cache or in any other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache
from transformers.cache_utils import LinearAttentionAndFullAttentionLayer

from kvswap_torch import KVSwapCache, KVSwapError
from kvswap_torch.hf.open_pass import OpenPass
from tests.python.tiny_models import (
    COVERING,
    ctrl_c,
    forward,
    greedy,
    has_native,
    prompt,
    tiny_model,
)

pytestmark = [
    pytest.mark.skipif(not has_native(), reason="kvswap_torch._C is not built"),
    pytest.mark.usefixtures("one_thread"),
]
STEP = torch.tensor([[5]])


def go_on(model: Any, ids: torch.Tensor, *caches: Any) -> list[torch.Tensor]:
    return [greedy(model, {"input_ids": ids}, cache, tokens=6) for cache in caches]


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("inside", ["mlp", "attention"])
def test_passes_without_a_cache_are_what_they_were(tmp_path: Path, batch: int, inside: str) -> None:
    model = tiny_model("llama")
    text = prompt(batch, 20)
    layer = model.model.layers[1]
    with torch.no_grad():
        expected = model(**text).logits
    # The names stay, as they do in a notebook.
    place = layer.mlp if inside == "mlp" else layer.self_attn.o_proj
    with KVSwapCache(model, tmp_path, COVERING) as interrupted, ctrl_c(place):
        forward(model, text["input_ids"], interrupted)
    with KVSwapCache(model, tmp_path, COVERING) as other:
        with torch.no_grad():
            assert torch.equal(model(**text).logits, expected)
            plain = DynamicCache(config=model.config)
            assert torch.equal(model(**text, past_key_values=plain).logits, expected)
        assert other.get_seq_length() == 0


def test_another_models_tokens_enter_no_layer(tmp_path: Path) -> None:
    model, foreign = tiny_model("gemma3"), tiny_model("llama")
    ids = prompt(1, 20)["input_ids"]
    keys = torch.ones(1, 1, 1, 16)
    with KVSwapCache(model, tmp_path, COVERING) as cache:
        plain = DynamicCache(config=model.config)
        told, _ = go_on(model, ids, cache, plain)
        for use in (lambda: forward(foreign, STEP, cache), lambda: cache.update(keys, keys, 0)):
            with pytest.raises(ValueError, match="must be used with the model it was opened for"):
                use()
        ours, theirs = go_on(model, torch.cat([told, STEP], 1), cache, plain)
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("how", ["refused", "ctrl-c"])
def test_windows_that_moved_on_come_back(tmp_path: Path, how: str) -> None:
    model = tiny_model("gemma3")
    ids = prompt(1, 20)["input_ids"]  # beyond the window
    with KVSwapCache(model, tmp_path, COVERING) as cache:
        plain = DynamicCache(config=model.config)
        told, _ = go_on(model, ids, cache, plain)
        if how == "refused":
            with pytest.raises(ValueError, match="mask"):
                forward(model, STEP, cache, attention_mask=torch.ones(1, 3))
        else:
            with ctrl_c(model.model.layers[-1].mlp):
                forward(model, STEP, cache)
        ours, theirs = go_on(model, torch.cat([told, STEP], 1), cache, plain)
        assert torch.equal(ours, theirs)


def test_a_recurrent_state_beside_attention_may_have_changed() -> None:
    layer = LinearAttentionAndFullAttentionLayer()
    layer.update(*torch.ones(2, 1, 1, 4, 2))
    layer.update_recurrent_state(torch.ones(1, 2))
    under_way = OpenPass(torch.nn.Identity(), 4, [layer])
    layer.update_recurrent_state(torch.zeros(1, 2))  # its attention has not run
    with pytest.raises(KVSwapError, match="has moved on and cannot be taken back"):
        under_way.take_back_others()


def test_a_copy_in_memory_is_of_what_was_whole(tmp_path: Path) -> None:
    model = tiny_model("llama")
    with KVSwapCache(model, tmp_path, COVERING) as cache:
        held = go_on(model, prompt(1, 20)["input_ids"], cache)[0].shape[1] - 1
        with ctrl_c(model.model.layers[1].mlp):
            forward(model, STEP, cache)
        assert cache.to_dynamic().get_seq_length() == held


def test_a_cache_that_was_emptied_takes_another_batch(tmp_path: Path) -> None:
    model = tiny_model("llama")
    with KVSwapCache(model, tmp_path, COVERING) as cache:
        greedy(model, prompt(2, 20), cache, tokens=3)
        cache.crop(-1000)
        assert cache.token_ids is None
        with pytest.raises(ValueError, match="batch must stay"):
            greedy(model, prompt(3, 20), cache, tokens=3)
        assert greedy(model, prompt(3, 20), cache, tokens=80).shape == (3, 100)
        assert cache.token_ids.shape == (3, 99)


def test_no_bar_stays(tmp_path: Path) -> None:
    model = tiny_model("llama")
    ids = prompt(1, 40)["input_ids"]
    with KVSwapCache(model, tmp_path, COVERING, progress=True) as cache:
        for use in (cache.get_seq_length, cache.close):
            with ctrl_c(model.model.layers[1].mlp):
                forward(model, ids, cache)
            assert cache._bar._bar is not None
            use()
            assert cache._bar._bar is None


def test_a_path_is_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    model = tiny_model("llama")
    with KVSwapCache(model, ".", kv_memory_bytes="4MiB") as cache:
        monkeypatch.chdir(tmp_path / "there")
        greedy(model, prompt(1, 20), cache, tokens=3)  # settings follow from it: opened anew
        opened = {path.resolve() for path in Path("/proc/self/fd").iterdir() if path.is_symlink()}
        assert any(tmp_path / "here" in path.parents for path in opened)
        assert not any(tmp_path / "there" in path.parents for path in opened)


def test_weights_that_cannot_be_shown_are_refused(tmp_path: Path) -> None:
    model = tiny_model("llama")
    model.set_attn_implementation("eager")
    with KVSwapCache(model, tmp_path, COVERING) as cache:
        with pytest.raises(ValueError, match="output_attentions must be false"):
            forward(model, STEP, cache, output_attentions=True)
        forward(model, STEP, cache)


def test_a_model_with_an_open_cache_is_not_pickled(tmp_path: Path) -> None:
    model = tiny_model("llama")
    told = pytest.raises(TypeError, match="must be closed before its model is pickled")
    with KVSwapCache(model, tmp_path, COVERING), told:
        torch.save(model, tmp_path / "model.pt")
    torch.save(model, tmp_path / "model.pt")
