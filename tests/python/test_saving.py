"""Saved caches and forks answer as the cache they were made of, in this process and another."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from kvswap_torch import BudgetError, ConfigError, CorruptionError, KVSwapCache, KVSwapError
from kvswap_torch.errors import StorageError
from tests.python.tiny_models import (
    COVERING,
    FAMILIES,
    TIGHT,
    forward,
    greedy,
    has_native,
    prompt,
    tiny_model,
)

if has_native():
    from kvswap_torch import _C
pytestmark = pytest.mark.skipif(not has_native(), reason="kvswap_torch._C is not built")
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def filled(model, path: Path, config=TIGHT, batch: int = 1, tokens: int = 48, padding=()):
    cache = KVSwapCache(model, path=path, config=config)
    inputs = prompt(batch, tokens, padding=padding)
    out = greedy(model, inputs, cache, tokens=4)
    return cache, out


def goes_on(model, cache, out, padding=(), tokens: int = 10) -> list[list[int]]:
    """More tokens, from what `out` has."""
    mask = torch.ones_like(out)
    for i, count in enumerate(padding):
        mask[i, :count] = 0
    return greedy(model, {"input_ids": out, "attention_mask": mask}, cache, tokens=tokens).tolist()


CHILD = """
    import json, sys, torch
    from kvswap_torch import KVSwapCache
    from tests.python.test_saving import goes_on
    from tests.python.tiny_models import tiny_model
    torch.set_num_threads(1)
    for line in sys.stdin:
        job = json.loads(line)
        model = tiny_model(job["family"])
        with KVSwapCache.open(model, job["saved"], path=job["path"]) as cache:
            out = torch.tensor(job["out"])
            assert cache.stats().probe.startswith("passed"), cache.stats().probe
            assert cache.token_ids.tolist() == out[:, :-1].tolist()
            print(json.dumps(goes_on(model, cache, out, job["padding"])), flush=True)
"""


def test_another_process_goes_on_with_the_same_tokens(tmp_path: Path) -> None:
    """Every family, selecting and not, with batch and padding."""
    jobs, expected = [], []
    for number, family in enumerate(FAMILIES):
        for config in (TIGHT, COVERING):
            padding = (0, 7) if number % 2 else ()
            model = tiny_model(family)
            cache, out = filled(model, tmp_path, config, batch=len(padding) or 1, padding=padding)
            saved = tmp_path / f"{len(jobs)}.kvswap"
            with cache:
                cache.save(saved)
                expected.append(goes_on(model, cache, out, padding))
            jobs.append({"family": family, "saved": str(saved), "path": str(tmp_path),
                         "out": out.tolist(), "padding": list(padding)})  # fmt: skip
    child = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(CHILD)],
        input="\n".join(map(json.dumps, jobs)),
        capture_output=True, text=True, cwd=ROOT, check=False,
    )  # fmt: skip
    assert child.returncode == 0, child.stderr[-3000:]
    assert [json.loads(line) for line in child.stdout.splitlines()] == expected
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(Path(j["saved"]).name for j in jobs)


WAITING_CHILD = """
    import json, sys, torch
    from kvswap_torch import KVSwapCache
    from tests.python.test_saving import goes_on
    from tests.python.tiny_models import tiny_model
    torch.set_num_threads(1)
    model, out = tiny_model("llama"), torch.tensor(json.loads(sys.argv[1]))
    with KVSwapCache.open(model, sys.argv[2], path=sys.argv[3]) as cache:
        print("open", flush=True)
        sys.stdin.readline()
        print(json.dumps(goes_on(model, cache, out)), flush=True)
"""


def test_two_processes_ask_at_once(tmp_path: Path) -> None:
    model = tiny_model("llama")
    saved = tmp_path / "a"
    cache, out = filled(model, tmp_path)
    with cache:
        cache.save(saved)
        expected = goes_on(model, cache, out)
    script, told = textwrap.dedent(WAITING_CHILD), json.dumps(out.tolist())
    children = [
        subprocess.Popen(
            [sys.executable, "-c", script, told, str(saved), str(tmp_path)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
        )
        for _ in range(2)
    ]  # fmt: skip
    assert [child.stdout.readline() for child in children] == ["open\n"] * 2
    with pytest.raises(StorageError, match="is open"):
        _C.SavedCache.remove(str(saved))
    for child in children:
        print("go", file=child.stdin, flush=True)
    answers = [child.communicate()[0] for child in children]
    assert [json.loads(answer) for answer in answers] == [expected] * 2
    _C.SavedCache.remove(str(saved))
    assert list(tmp_path.iterdir()) == []


def test_forks_go_their_own_ways(tmp_path: Path) -> None:
    model = tiny_model("gemma3")
    cache, out = filled(model, tmp_path)
    first = cache.fork()
    second = first.fork()
    expected = goes_on(model, cache, out)
    cache.close()
    assert goes_on(model, first, out) == expected
    first.close()
    third = second.fork()
    ids = prompt(1, 5, seed=4)["input_ids"]
    logits = forward(model, ids, second)
    assert second.get_seq_length() == out.shape[1] - 1 + 5
    second.close()
    assert torch.equal(forward(model, ids, third), logits)
    third.close()
    assert list(tmp_path.iterdir()) == []


def test_a_saved_cache_can_be_cropped_repeated_and_saved_again(tmp_path: Path) -> None:
    model = tiny_model("llama")
    cache, _ = filled(model, tmp_path, tokens=60)
    cache.save(tmp_path / "a")
    with KVSwapCache.open(model, tmp_path / "a", path=tmp_path) as opened:
        for each in (cache, opened):
            each.crop(-30)
            each.batch_repeat_interleave(2)
        ids = prompt(2, 20, seed=3)["input_ids"]
        assert torch.equal(forward(model, ids, cache), forward(model, ids, opened))
        opened.save(tmp_path / "b")
        with KVSwapCache.open(model, tmp_path / "b", path=tmp_path) as again:
            assert torch.equal(again.token_ids, cache.token_ids)
            ids = prompt(2, 3, seed=5)["input_ids"]
            assert torch.equal(forward(model, ids, cache), forward(model, ids, again))
    cache.close()


def test_another_model_is_refused(tmp_path: Path) -> None:
    model = tiny_model("llama")
    cache, out = filled(model, tmp_path)
    saved = tmp_path / "a"
    cache.save(saved)
    cache.close()

    def refused(other, words: str, **arguments) -> None:
        with pytest.raises(ConfigError, match=words):
            KVSwapCache.open(other, saved, path=tmp_path, **arguments)

    refused(tiny_model("qwen3"), "made by model_type llama")
    refused(tiny_model("llama", dtype=torch.bfloat16), "dtype float32")
    turned = {"rope_type": "default", "rope_theta": 999.0}
    refused(tiny_model("llama", rope_parameters=turned), "rotary parameters")
    scaled = tiny_model("llama")
    with torch.no_grad():
        scaled.model.layers[1].self_attn.k_proj.weight.mul_(1.01)
    refused(scaled, "keys of its first tokens differ by .* in layer 1")
    with KVSwapCache.open(scaled, saved, path=tmp_path, probe=False) as opened:
        assert "probe=False" in opened.stats().probe
    other = out.clone()
    other[0, 9] = 96 - other[0, 9]
    refused(model, "token 9 of sequence 0", input_ids=other)
    with KVSwapCache.open(model, saved, path=tmp_path, input_ids=out[0, :20]):
        pass
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_bad_input_has_its_sentence(tmp_path: Path) -> None:
    model = tiny_model("llama")
    with KVSwapCache(model, path=tmp_path, config=TIGHT) as cache:
        with pytest.raises(KVSwapError, match="is empty"):
            cache.save(tmp_path / "a")
        with pytest.raises(KVSwapError, match="is empty"):
            cache.fork()
        embeds = torch.randn(1, 40, model.config.hidden_size)
        with torch.no_grad():
            model(inputs_embeds=embeds, past_key_values=cache)
        assert cache.token_ids is None
        cache.save(tmp_path / "a")
        with pytest.raises(StorageError, match="must not exist"):
            cache.save(tmp_path / "a")
        with pytest.raises(StorageError, match="is open"):
            cache.save(tmp_path / "a", overwrite=True)
    with KVSwapCache.open(model, tmp_path / "a", path=tmp_path) as opened:
        assert "embeddings" in opened.stats().probe
    with pytest.raises(StorageError, match="folder of a saved cache"):
        KVSwapCache.open(model, tmp_path / "none", path=tmp_path)
    with pytest.raises(BudgetError, match="kv_memory_bytes"):
        KVSwapCache.open(model, tmp_path / "a", path=tmp_path, kv_memory_bytes=4096)
    os.chmod(tmp_path / "a", 0o755)
    with pytest.warns(RuntimeWarning, match="others than its owner"):
        KVSwapCache.open(model, tmp_path / "a", path=tmp_path).close()
    os.truncate(tmp_path / "a" / "state.safetensors", 500)
    with pytest.raises(CorruptionError, match="state.safetensors"):
        KVSwapCache.open(model, tmp_path / "a", path=tmp_path)


def test_opening_reads_the_probes_groups_alone(tmp_path: Path) -> None:
    model = tiny_model("llama")
    cache, _ = filled(model, tmp_path, tokens=400)
    cache.save(tmp_path / "a")
    cache.close()
    with KVSwapCache.open(model, tmp_path / "a", path=tmp_path, probe=False) as opened:
        assert opened.stats().bytes_read == 0
    with KVSwapCache.open(model, tmp_path / "a", path=tmp_path) as opened:
        counters = opened.stats().counters
        groups = 16 // TIGHT.group_tokens
        assert counters["records_read"] == groups * len(opened.parts.disk)
