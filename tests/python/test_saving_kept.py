"""Caches that retain tokens, saved, opened and forked: the retained set goes on as it was."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch

from kvswap_torch import CorruptionError, KVSwapCache, KVSwapError
from kvswap_torch.config import UserRetention
from kvswap_torch.plug_ins import TokenScores
from tests.python.saved_conversation import beams_are_equal, goes_on
from tests.python.saved_manifest import copied, put_state, state_of
from tests.python.test_presets_generate import model_of, small
from tests.python.tiny_models import TIGHT, forward, greedy, has_native, prompt

pytestmark = [
    pytest.mark.skipif(not has_native(), reason="kvswap_torch._C is not built"),
    pytest.mark.usefixtures("one_thread"),
]
PRESETS = ("prkv", "prkv-auto", "shadowkv", "arkv-recall", "arkv", "arkv-quant", "h2o", "tova")
PRESETS += ("snapkv", "snapkv+", "cake", "compresskv")
# In fp32; so few that a turn has something to leave out.
FEW = {"keep_tokens": 24, "tail_tokens": 4}
PADDING = (0, 9)
TURNS = {"keep_window": 4}


def opened_with(name: str, model, tmp_path: Path, **changes) -> KVSwapCache:
    config = small(name, model, 3, **FEW | changes)
    return KVSwapCache(model, tmp_path, config)


def first_of(cache: KVSwapCache) -> tuple:
    """What is retained, and its cost."""
    stats = cache.stats()
    return stats.tokens_kept, stats.ledger["kept"]


@pytest.mark.parametrize("tokens", [1, 8, 40], ids=["a turn is due", "a turn was", "many were"])
@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.pairs(once=["name", "tokens"])
def test_it_goes_on_as_the_one_that_was_saved(name: str, tokens: int, tmp_path: Path) -> None:
    model = model_of(2)
    with opened_with(name, model, tmp_path) as cache:
        out = greedy(model, prompt(2, 130, padding=PADDING), cache, tokens=tokens)
        kept = first_of(cache)
        assert tokens == 1 or kept[0] > 0
        cache.save(tmp_path / "a")
        manifest = json.loads((tmp_path / "a" / "manifest.json").read_text())
        assert manifest["kvswap_cache"] == 3
        with KVSwapCache.open(model, tmp_path / "a", path=tmp_path) as found, cache.fork() as fork:
            assert first_of(found) == first_of(fork) == kept
            expected = goes_on(model, cache, out, PADDING, tokens=40)
            assert goes_on(model, found, out, PADDING, tokens=40) == expected
            assert goes_on(model, fork, out, PADDING, tokens=40) == expected
            assert first_of(found) == first_of(fork) == first_of(cache)
            found.save(tmp_path / "b")
    with KVSwapCache.open(model, tmp_path / "b", path=tmp_path) as again:
        assert first_of(again)[0] > 0


@pytest.mark.parametrize("name", ["prkv", "arkv-quant", "h2o"])
def test_crops_beams_and_longer_prompts_after_opening(name: str, tmp_path: Path) -> None:
    model = model_of(2)
    with opened_with(name, model, tmp_path) as cache:
        greedy(model, prompt(1, 130), cache, tokens=30)
        cache.save(tmp_path / "a")
        with KVSwapCache.open(model, tmp_path / "a", path=tmp_path) as found:
            caches = (cache, found)
            ids = prompt(1, 40, seed=3)["input_ids"]
            one, other = (forward(model, ids, each) for each in caches)
            assert torch.equal(one, other)
            for each in caches:
                each.crop(-60)
            one, other = (forward(model, ids[:, :3], each) for each in caches)
            assert torch.equal(one, other)
            beams_are_equal(model, caches)


def test_a_fork_of_a_fork_and_its_end_change_nothing(tmp_path: Path) -> None:
    """Rows of a shared summary are made again in a copy: PRKV's boxes leave tokens out."""
    model = model_of(2)
    with opened_with("prkv", model, tmp_path, keep_interval=8) as cache:
        out = greedy(model, prompt(1, 130), cache, tokens=9)
        cache.save(tmp_path / "a")
        fork = cache.fork()
        second = fork.fork()
        other = prompt(1, 40, seed=5)["input_ids"]
        forward(model, other, fork)
        goes_on(model, fork, torch.cat([out[:, :-1], other, other[:, :1]], 1), tokens=30)
        fork.close()
        expected = goes_on(model, second, out, tokens=40)
        second.close()
        assert goes_on(model, cache, out, tokens=40) == expected
    with KVSwapCache.open(model, tmp_path / "a", path=tmp_path) as found:
        assert goes_on(model, found, out, tokens=40) == expected


def test_others_are_of_the_version_that_was(tmp_path: Path) -> None:
    model = model_of(2)
    with KVSwapCache(model, tmp_path, TIGHT) as cache:
        greedy(model, prompt(1, 60), cache, tokens=4)
        cache.save(tmp_path / "a")
    assert json.loads((tmp_path / "a" / "manifest.json").read_text())["kvswap_cache"] == 2


def test_scores_of_a_users_own_are_not_saved(tmp_path: Path) -> None:
    class Scores(TokenScores):
        def worth(self, layer, query, keys, values):
            return keys[..., 0].sum(1)

    model = model_of(2)
    config = small("streaming", model, 1)
    config = type(config)(
        summary=config.summary,
        selection=config.selection,
        memory=config.memory,
        retention=UserRetention(tokens=16),
    )
    with KVSwapCache(model, tmp_path, config, token_scores=Scores()) as cache:
        greedy(model, prompt(1, 60), cache, tokens=4)
        for refused in (lambda: cache.save(tmp_path / "book"), cache.fork):
            with pytest.raises(
                ValueError, match="retention.policy must not be 'user', since what scores"
            ):
                refused()
    assert not (tmp_path / "book").exists()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["prkv", "arkv-quant", "cake"])
def test_a_state_that_was_changed_and_signed_again_is_our_error(name: str, tmp_path: Path) -> None:
    """Bytes of what is retained, one place after the other: no other exception, and no crash."""
    model = model_of(2)
    with opened_with(name, model, tmp_path) as cache:
        out = greedy(model, prompt(1, 130), cache, tokens=6)
        cache.save(tmp_path / "a")
    whole, places = state_of(tmp_path / "a")
    chosen, found = random.Random(1), set()
    tensors = [each for each in places if each.endswith((".kept", ".kept_sizes"))]
    assert len(tensors) == 2 * model.config.num_hidden_layers
    for number in range(120):
        begin, end = places[tensors[number % len(tensors)]]
        # Mostly what is small: counts, and the first of each set.
        place = min(end - 4, begin + int((end - begin) * chosen.random() ** 3))
        new = chosen.choice((b"\xff" * 4, b"\0" * 4, b"\x01\0\0\0", b"\0\0\xc0\x7f"))
        target = copied(tmp_path / "a", tmp_path / "b")
        put_state(target, whole[:place] + new + whole[place + 4 :])
        try:
            with KVSwapCache.open(model, target, path=tmp_path, probe=False) as cache:
                goes_on(model, cache, out, tokens=20)
                found.add("tokens")
        except CorruptionError as error:
            assert ".kept" in str(error)
            found.add("CorruptionError")
        except KVSwapError as error:
            found.add(type(error).__name__)
    assert "CorruptionError" in found
