"""Caches that select clusters, saved, opened and forked: they go on as the one never saved."""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path

import pytest
import torch

from kvswap_torch import CorruptionError, KVSwapCache, KVSwapError
from kvswap_torch._C import SavedCache
from tests.how_long import lives
from tests.python.saved_conversation import beams_are_equal, goes_on
from tests.python.saved_manifest import copied, put_state, state_of
from tests.python.test_presets_generate import model_of, small
from tests.python.tiny_models import forward, greedy, has_native, prompt, tiny_model

pytestmark = [
    pytest.mark.skipif(not has_native(), reason="kvswap_torch._C is not built"),
    pytest.mark.usefixtures("one_thread"),
]
PADDING = (0, 9)
# So few that tokens wait, clusters split, and a step leaves most of them out.
FEW = {"cluster_tokens": 8, "cluster_tokens_max": 16, "pending_tokens": 3, "tail_tokens": 4}
# With "verify" what is prefetched goes by measured times, and what is packed by what is in memory.
FEW |= {"look_ahead": "trust"}


def opened_with(model, tmp_path: Path, **changes) -> KVSwapCache:
    return KVSwapCache(model, tmp_path, small("dynakv", model, 3, **FEW | changes))


def cost_of(cache: KVSwapCache) -> tuple:
    stats = cache.stats()
    names = ("clusters", "tokens_a_cluster", "pages_a_cluster", "tokens_waiting")
    return stats.ledger, [stats.counters[name] for name in names]


@pytest.mark.parametrize("tokens", [1, 40])
@pytest.mark.parametrize("update", ["adaptive", "static", "local", "adaptive in fp8"])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.pairs
def test_it_goes_on_as_the_one_that_was_never_saved(
    kind: str, update: str, tokens: int, tmp_path: Path
) -> None:
    model = tiny_model(kind)
    changes = {"cluster_update": update.split()[0]}
    if update == "adaptive in fp8":
        changes["records"] = "fp8"
    if update == "local":
        changes["pending_tokens"] = None
    changes = {name: value for name, value in (FEW | changes).items() if value is not None}
    config = small("dynakv", model, 3, **changes)
    caches = [KVSwapCache(model, tmp_path, config) for _ in range(2)]
    never, cache = caches
    inputs = prompt(2, 130, padding=PADDING)
    out, same = (greedy(model, inputs, each, tokens=tokens) for each in (cache, never))
    assert torch.equal(out, same)
    cost = cost_of(cache)
    cache.save(tmp_path / "a")
    assert json.loads((tmp_path / "a" / "manifest.json").read_text())["kvswap_cache"] == 4
    SavedCache(str(tmp_path / "a")).verify()
    expected = goes_on(model, never, out, PADDING, tokens=40)
    with KVSwapCache.open(model, tmp_path / "a", path=tmp_path) as found, cache.fork() as fork:
        assert cost_of(found)[1] == cost_of(fork)[1] == cost[1]
        assert cost_of(found)[0]["summary"] == cost[0]["summary"]
        for each in (cache, found, fork):
            assert goes_on(model, each, out, PADDING, tokens=40) == expected
            assert cost_of(each)[1] == cost_of(never)[1]
        found.save(tmp_path / "b")
    with KVSwapCache.open(model, tmp_path / "b", path=tmp_path) as again:
        assert cost_of(again)[1] == cost_of(never)[1]
    for each in caches:
        each.close()


def test_crops_beams_and_longer_prompts_after_opening(tmp_path: Path) -> None:
    model = model_of(2)
    with opened_with(model, tmp_path) as cache:
        greedy(model, prompt(1, 130), cache, tokens=30)
        cache.save(tmp_path / "a")
        with KVSwapCache.open(model, tmp_path / "a", path=tmp_path) as found:
            both = (cache, found)
            for ids in (prompt(1, 40, seed=3)["input_ids"], prompt(1, 3, seed=4)["input_ids"]):
                one, other = (forward(model, ids, each) for each in both)
                assert torch.equal(one, other)
                for each in both:
                    each.crop(-20)
            beams_are_equal(model, both)


def test_a_flipped_bit_in_a_page_of_a_cluster_is_found_by_verify(tmp_path: Path) -> None:
    model = model_of(2)
    with opened_with(model, tmp_path) as cache:
        greedy(model, prompt(1, 130), cache, tokens=6)
        cache.save(tmp_path / "a")
    records = tmp_path / "a" / "records.bin"
    whole = records.read_bytes()
    record_bytes = json.loads((tmp_path / "a" / "manifest.json").read_text())["record_bytes"]
    places = range(0, len(whole), record_bytes)
    places = [place for place in places if any(whole[place : place + record_bytes])]  # no holes
    found = 0
    for place in places:
        records.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        try:
            SavedCache(str(tmp_path / "a")).verify()
        except CorruptionError as error:
            assert "checksum" in str(error) or "damaged" in str(error)
            found += 1
    assert found == len(places) > 0


@pytest.mark.filterwarnings("ignore")
def test_a_state_that_was_changed_and_signed_again_is_our_error(tmp_path: Path) -> None:
    """Numbers of clusters, one place after the other: no other exception, and no crash."""
    model = model_of(2)
    with opened_with(model, tmp_path) as cache:
        out = greedy(model, prompt(1, 130), cache, tokens=6)
        cache.save(tmp_path / "a")
    whole, places = state_of(tmp_path / "a")
    chosen, found = random.Random(1), {}
    words = ("cluster", "centroid", "reuse", "chosen")
    tensors = sorted(name for name in places if any(word in name for word in words))
    kinds = {name.split(".")[-1] for name in tensors}
    assert len(kinds) == 15, kinds
    for number in range(lives(120, 300)):
        name = tensors[number % len(tensors)]
        begin, end = places[name]
        place = begin + 4 * chosen.randrange((end - begin) // 4)
        new = struct.pack("<i", chosen.choice((-1, -2, 0, 1, 1024, 0x7FC00000)))
        target = copied(tmp_path / "a", tmp_path / "b")
        put_state(target, whole[:place] + new + whole[place + 4 :])
        kind = name.split(".")[-1]
        try:
            with KVSwapCache.open(model, target, path=tmp_path, probe=False) as cache:
                goes_on(model, cache, out, tokens=20)
                found.setdefault(kind, set()).add("tokens")
        except CorruptionError as error:
            found.setdefault(kind, set()).add("CorruptionError")
            assert any(word in str(error) for word in (*words, "layer")), error
        except KVSwapError as error:
            found.setdefault(kind, set()).add(type(error).__name__)
    # Of another plan the reuse buffer begins empty; any key may be that of a token that waits.
    for kind in kinds - {"reuse_plan", "centroids", "cluster_waiting"}:
        assert "CorruptionError" in found[kind], (kind, found)
