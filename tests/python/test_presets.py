"""Presets: what they are and refuse, and that each answers as the full cache where it can."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache
from typer.testing import CliRunner

import kvswap_torch
from kvswap_torch import ConfigError, KVSwapCache, ModelIdentity, SwapConfig
from kvswap_torch.cli.app import app
from kvswap_torch.cli.presets import memory_of
from kvswap_torch.compare.budget import selected_tokens
from kvswap_torch.int4_rows import int4_head_bytes
from kvswap_torch.preset import MISSING, NO_PRESETS, find
from kvswap_torch.preset.definition import Shape
from tests.python.test_presets_generate import given_of, model_of, small
from tests.python.tiny_models import greedy, has_native, prompt, tiny_model
from tests.selections import assert_same_choice

pytestmark = pytest.mark.skipif(not has_native(), reason="kvswap_torch._C is not built")
NAMES = [preset.name for preset in kvswap_torch.presets()]
TRUE_QUERY = ("quest", "arkvale", "loki", "think", "shadowkv", "prkv", "prkv-auto")


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("ratio", [1, 3])
def test_exact_is_the_full_cache_however_little_is_in_memory(ratio, tmp_path):
    """Beyond its pages it restores; so does each of quest's exact layers."""
    model = model_of(ratio)
    inputs = prompt(3, 60, padding=(0, 7, 3))
    expected = greedy(model, inputs)
    with KVSwapCache(model, tmp_path, small("exact", model, 4)) as cache:
        assert torch.equal(greedy(model, inputs, cache), expected)
        stats = cache.stats()
        assert stats.hit_rate == 0 and stats.ledger.get("summary", 0) == 0
        # 19 decoding steps of 3 sequences; the shortest context is 60 - 7 tokens.
        whole = stats.kv_bytes_full / stats.tokens / stats.batch * 40
        assert stats.bytes_read_per_token > whole
    every = small("quest", model, 4, exact_layers=(0, 1, 2))
    with KVSwapCache(model, tmp_path, every) as cache:
        assert torch.equal(greedy(model, inputs, cache), expected)
        assert cache.stats().ledger.get("summary", 0) == 0


def test_exact_with_beams_turns_and_look_ahead(llama, tmp_path):
    config = small("exact", llama, 4, look_ahead=True)
    with KVSwapCache(llama, tmp_path, config) as cache:
        inputs = prompt(2, 40, padding=(3, 0))
        arguments = {"num_beams": 3, "num_return_sequences": 2, "tokens": 6}
        expected = greedy(llama, inputs, **arguments)
        assert torch.equal(greedy(llama, inputs, cache, **arguments), expected)
        cache.reset()
        plain, ids = DynamicCache(config=llama.config), prompt(2, 40)["input_ids"]
        for turn, question in enumerate((1, 3, 12)):
            inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
            expected = greedy(llama, inputs, plain, tokens=5)
            assert torch.equal(greedy(llama, inputs, cache, tokens=5), expected), turn
            for each in (cache, plain):
                each.crop(-3)
            ids = torch.cat([expected[:, :-2], prompt(2, question, seed=turn)["input_ids"]], 1)


def test_exact_layers_that_outgrow_their_pages_need_no_more_memory(llama, tmp_path):
    config = small("quest", llama, 4)
    with KVSwapCache(llama, tmp_path, config, max_context=400, max_batch=1) as cache:
        greedy(llama, prompt(1, 300), cache, tokens=6)
        stats = cache.stats()
        boxes = 3 * 2 * 2 * 16 * 4 * 100  # layers, KV heads, [middle, half], fp32, groups
        assert 0 < stats.ledger["summary"] < boxes * 2 / 3, "one layer of three has boxes"


@pytest.mark.parametrize(("name", "changes"), [("exact", {}), ("loki", {"exact_layers": (1,)})])
def test_a_saved_one_goes_on(name, changes, llama, tmp_path):
    """A layer that attends everything has neither summary nor projection to be saved."""
    inputs = prompt(1, 60)
    with KVSwapCache(llama, tmp_path, small(name, llama, 4, **changes)) as cache:
        out = greedy(llama, inputs, cache, tokens=4)
        cache.save(tmp_path / "book")
        more = {"input_ids": out, "attention_mask": torch.ones_like(out)}
        expected = greedy(llama, more, cache, tokens=8)
    with KVSwapCache.open(llama, tmp_path / "book", path=tmp_path) as cache:
        assert torch.equal(greedy(llama, more, cache, tokens=8), expected)
        assert cache.stats().bytes_read > 0


@pytest.mark.parametrize(
    "name",
    ["snapkv", "snapkv+", "cake", "compresskv", "arkv", "arkv-origin", "arkv-quant", "h2o"]
    + ["tova", "prkv", "shadowkv"],
)
def test_who_keeps_all_tokens_is_the_full_cache(name, tmp_path):
    """With one group in pages nothing fits, and everything is kept."""
    model = model_of(2)
    inputs = prompt(3, 60, padding=(0, 7, 3))
    config = small(name, model, 1, keep_tokens=1000, tail_tokens=2)
    tokens = (
        2 if name in ("snapkv", "snapkv+", "cake", "compresskv", "prkv", "shadowkv") else 30
    )  # the others choose anew in each step
    with KVSwapCache(model, tmp_path, config) as cache:
        ours = greedy(model, inputs, cache, tokens=tokens)
        assert torch.equal(ours, greedy(model, inputs, tokens=tokens))
        stats = cache.stats()
        assert stats.tokens_kept > 40 and stats.counters["turns"] >= 3 * 3
        assert stats.ledger["kept"] > 0 and "tokens kept" in str(stats)


def test_who_drops_tokens_reads_none_and_gives_other_answers(tmp_path):
    model = model_of(2)
    inputs = prompt(1, 200)
    answers, memory = [], []
    for name in ("streaming", "window", "snapkv"):
        config = small(name, model, 1, **({"keep_tokens": 8} if name == "snapkv" else {}))
        with KVSwapCache(model, tmp_path, config, max_context=400, max_batch=1) as cache:
            answers.append(greedy(model, inputs, cache, tokens=30))
            before = cache.stats()
            with torch.no_grad():
                model(input_ids=answers[-1][:, -1:], past_key_values=cache)
            assert cache.stats().bytes_read == before.bytes_read, "nothing is read in a step"
            memory.append(before.ledger["pages"] + before.ledger["kept"])
            assert memory[-1] < before.kv_bytes_full / 2
    full = greedy(model, inputs, tokens=30)
    assert not any(torch.equal(answer, full) for answer in answers)


def test_the_newest_alone_are_saved(llama, tmp_path):
    with KVSwapCache(llama, tmp_path, small("streaming", llama, 1)) as cache:
        out = greedy(llama, prompt(1, 60), cache, tokens=4)
        cache.save(tmp_path / "book")
        more = {"input_ids": out, "attention_mask": torch.ones_like(out)}
        expected = greedy(llama, more, cache, tokens=8)
    with KVSwapCache.open(llama, tmp_path / "book", path=tmp_path) as cache:
        assert torch.equal(greedy(llama, more, cache, tokens=8), expected)


@pytest.mark.parametrize("kind", ["pca_per_head", "skewed", "channels", "rope_pairs"])
def test_all_columns_are_the_exact_top_k(kind, tmp_path):
    """Groups of single heads, every column of the keys: what attention weighs most."""
    model = tiny_model("llama", num_hidden_layers=1)
    made = {"heads": "each", "rank": 16, "sink_tokens": 0, "tail_tokens": 4}
    budget = {"group_tokens": 16, "groups_max": 2, "pages_max": 8, "projection_kind": kind}
    chosen = []
    for rank, score in ((16, "sum"), (16, "max")):
        config = SwapConfig(**made | budget | {"rank": rank, "score": score})
        with torch.no_grad(), KVSwapCache(model, tmp_path, config) as cache:
            model(**prompt(1, 150), past_key_values=cache)
            keys = cache.driver.session.read_back(0, 0, 144)[0]
            queries = []
            attend = cache.driver.attend

            def seen(layer, query, *rest, attend=attend, queries=queries):
                queries.append(query)
                return attend(layer, query, *rest)

            cache.driver.attend = seen
            model(prompt(1, 1, seed=3)["input_ids"], past_key_values=cache)
            chosen.append(cache.driver.session.last_selection(0))
            products = torch.einsum(
                "hgd,htd->hgt", queries[0][0, :, 0].unflatten(0, (2, -1)), keys[0]
            )
            of_token = products.sum(1) if score == "sum" else products.amax(1)
            of_group = of_token[:, :144].unflatten(1, (9, 16)).amax(2)
            for groups, head in zip(chosen[-1], of_group, strict=True):
                assert_same_choice(groups, head.topk(2).indices.tolist(), head, 2)


def test_one_kv_head_makes_infinigen_of_infinigen_star(tmp_path):
    model = tiny_model("llama", num_key_value_heads=1)
    chosen = []
    for name in ("infinigen", "infinigen-star"):
        # 16 tokens of one head are half of what the disk reads at once.
        config = small(name, model, 3, group_tokens=16)
        with torch.no_grad(), KVSwapCache(model, tmp_path, config) as cache:
            model(**prompt(2, 150), past_key_values=cache)
            model(prompt(2, 1)["input_ids"], past_key_values=cache)
            chosen.append([cache.driver.session.last_selection(i) for i in range(3)])
    assert chosen[0] == chosen[1]


def test_a_cache_takes_a_preset_for_its_model_and_disk(llama, tmp_path):
    for name in NAMES:
        if find(name).needs:
            with pytest.raises(ConfigError, match="belong to a model"):
                KVSwapCache(llama, tmp_path, preset=name)
            continue
        with KVSwapCache(llama, tmp_path, preset=name) as cache:
            config = cache.driver.config
            inputs = prompt(2, 30, padding=(0, 7))
            assert torch.equal(
                greedy(llama, inputs, cache, tokens=4), greedy(llama, inputs, tokens=4)
            )
            if name == "loki":
                assert config.rank == 4 and cache.driver.ranks == [4, 4, 4]
            if name == "kvswap":
                assert cache.driver.given is None
            if config.heads == "each":
                assert config.group_tokens >= 1
    with pytest.raises(ConfigError, match="preset: must be left out with config"):
        KVSwapCache(llama, tmp_path, SwapConfig(), preset="quest")
    with pytest.raises(ConfigError, match="nearest: quest"):
        KVSwapCache(llama, tmp_path, preset="qest")


def test_a_preset_is_plain_settings(tmp_path):
    for name in NAMES:
        config = SwapConfig.preset(name, **given_of(find(name), 32, 32))
        saved = config.save(tmp_path / "config.json")
        assert SwapConfig.load(tmp_path / "config.json") == config
        assert "preset" not in json.loads((tmp_path / "config.json").read_text())
        assert saved == config and not config.provenance
    assert SwapConfig.preset("loki").rank == 32
    assert SwapConfig.preset("loki", model=ModelIdentity(head_dim=64)).rank == 16
    assert SwapConfig.preset("think").rank == 77
    assert SwapConfig.preset("infinigen").group_tokens == 4
    assert SwapConfig.preset("infinigen", Shape(alignment_bytes=512)).group_tokens == 1
    narrow = ModelIdentity(kv_heads=1, head_dim=16)
    assert SwapConfig.preset("kvswap-paper").rank == 32
    assert SwapConfig.preset("kvswap-paper", model=narrow).rank == 16
    assert SwapConfig.preset("kvswap-paper", Shape(kv_heads=1, head_dim=24)).rank == 24
    assert SwapConfig.preset("quest", groups_max=500).pages_max == 500
    assert SwapConfig.preset("quest", model=ModelIdentity(layers=1)).exact_layers == (0,)


@pytest.mark.parametrize(
    ("name", "overrides", "told"),
    [
        ("fasa", {}, "fasa needs its own rule of which pairs .*=rope_pairs"),
        ("qest", {}, "must be one of kvswap, .*nearest: quest"),
        ("", {}, "must be one of"),
        ("dapq", {}, "dapq needs its own rule of who is kept"),
        ("compresskv", {}, r"must be given retention.scoring_heads and .*read_heads\(FILE\)"),
        ("cake", {"keep_interval": 8}, "preset cake: keep_interval: must be left out"),
        ("snapkv", {"keeper": "heavy"}, "retention.policy must stay snapkv"),
        ("streaming", {"keep_tokens": 8}, "preset streaming: keep_tokens: must be left out"),
        ("clusterkv", {}, "clusterkv needs a preset of its own"),
        ("shadowkv", {"keep_window": 8}, "preset shadowkv: keep_window: must be left out"),
        ("quest", {"group_token": 8}, "overrides must be settings, got group_token; did you mean"),
        ("quest", {"version": 1}, "overrides must be settings, got version"),
        ("quest", {"rank": 8}, "preset quest: rank: must be left out where rows is box"),
        ("quest", {"score": "mass"}, "preset quest: score: must be left out"),
        ("exact", {"rows": "box"}, "summary.kind must stay none"),
        ("loki", {"projection_kind": "svd_keys"}, "summary.projection must stay pca_per_head"),
        *((name, {"look_ahead": True}, "prefetch.mode must stay verify") for name in TRUE_QUERY),
        ("kvswap-paper", {"pages_max": 1}, "preset kvswap-paper: pages_max: must be at least"),
    ],
)
def test_what_is_refused(name, overrides, told):
    with pytest.raises(ConfigError, match=told):
        SwapConfig.preset(name, **overrides)


def test_a_ratio_of_one_makes_arkv_origin_of_arkv():
    """Ratios that follow from the model are the only thing between them."""
    assert SwapConfig.preset("arkv", keep_ratio=1.0) == SwapConfig.preset("arkv-origin")


def test_every_system_that_is_not_here_has_a_row_and_a_reason():
    page = (Path(__file__).parents[2] / "docs" / "presets.md").read_text()
    rows = page[page.index("## Not here") :]
    for name in (*MISSING, *NO_PRESETS):
        assert re.search(rf"^\|[^|]*\b{name}\b[^|]*\|", rows, re.MULTILINE), name
        with pytest.raises(ConfigError, match=f"^preset: {name} (needs|is no preset, since) "):
            find(name)


def test_what_is_missing_is_not_listed():
    assert not (set(MISSING) | set(NO_PRESETS)) & set(NAMES) and not set(MISSING) & set(NO_PRESETS)
    assert len(set(NAMES)) == len(NAMES)
    for preset in kvswap_torch.presets():
        for sentence in (preset.take, preset.leave):
            assert sentence[0].isupper() and sentence.endswith(".")


def test_the_command_lists_and_tells():
    listed = CliRunner().invoke(app, ["presets", "--json"])
    assert [each["name"] for each in json.loads(listed.output)] == NAMES
    assert all(name in CliRunner().invoke(app, ["presets"]).output for name in NAMES)
    for name in NAMES:
        told = json.loads(CliRunner().invoke(app, ["presets", name, "--json"]).output)
        memory = told["memory"]
        assert memory["full_kv"] == 32768 * 32 * 2 * 1024 * 2
        assert memory["summary"] + memory["pages"] < memory["total"]
        assert name in CliRunner().invoke(app, ["presets", name]).output
    share = {}
    for name in ("exact", "kvswap", "arkvale", "quest", "loki", "infinigen"):
        memory = json.loads(CliRunner().invoke(app, ["presets", name, "--json"]).output)["memory"]
        share[name] = memory["summary"] / memory["full_kv"]
    assert share["exact"] == 0 and share["kvswap"] < share["arkvale"]
    assert 1 / 34 > share["arkvale"] > 0.9 * 30 / 32 / 32
    assert 1 / 16 > share["quest"] > 0.9 * 30 / 32 / 16
    assert 1 / 8 <= share["loki"] < 0.14 and share["infinigen"] > 0.148
    with pytest.raises(ConfigError, match="its own rule of who is kept"):
        CliRunner().invoke(app, ["presets", "dapq"], catch_exceptions=False)


def test_the_command_refuses_what_is_no_model_with_heads(tmp_path):
    from transformers import MambaConfig

    def told(model):
        CliRunner().invoke(app, ["presets", "quest", "--model", model], catch_exceptions=False)

    for model in ("/nonexistent", str(tmp_path)):
        with pytest.raises(ConfigError, match=f"--model: must be the folder or name.*{model}"):
            told(model)
    MambaConfig(num_hidden_layers=1).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="--model: must have attention heads"):
        told(str(tmp_path))


def test_the_command_line_refuses_a_preset_beside_what_it_says(tmp_path):
    start = ["generate", "--model", str(tmp_path), "--document", str(tmp_path), "--question", "?"]
    for more, told in (
        (["--preset", "qest"], "nearest: quest"),
        (["--preset", "quest", "--rows", "box"], "--rows: must be left out with --preset"),
        (["--preset", "quest", "--heads", "all"], "--heads: must be left out with --preset"),
    ):
        with pytest.raises(ConfigError, match=told):
            CliRunner().invoke(app, [*start, *more], catch_exceptions=False)


def test_rounded_records_divide_a_budget_as_the_default_does(tmp_path):
    model = tiny_model("llama", max_position_embeddings=16384)
    limits = {"kv_memory_bytes": 1_600_000, "max_context": 8192, "max_batch": 1}
    chosen = []
    for name in ("kvswap", "kvswap-fp8", "kvswap-int4"):
        with KVSwapCache(model, tmp_path, preset=name, **limits) as cache:
            chosen.append(cache.driver.config)
    assert [each.records for each in chosen] == ["model", "fp8", "int4"]
    for each in chosen[1:]:
        assert each.summary_dtype == chosen[0].summary_dtype != SwapConfig().summary_dtype
        assert each.rank == chosen[0].rank == 16


def test_four_bits_have_groups_whose_records_fill_half_a_block(tmp_path):
    """Of shapes and disks: the engine refuses smaller ones."""
    for kv_heads, head_dim in ((8, 128), (3, 64), (2, 16)):
        for alignment in (512, 4096):
            shape = Shape(kv_heads=kv_heads, head_dim=head_dim, alignment_bytes=alignment)
            group = SwapConfig.preset("kvswap-int4", shape=shape).group_tokens
            assert group >= 8 and 2 * kv_heads * int4_head_bytes(group, head_dim) >= alignment
    assert SwapConfig.preset("kvswap-int4").group_tokens == 8
    model = tiny_model("llama", head_dim=24)
    with (
        pytest.raises(ValueError, match="int4 head_dim must be a multiple of 16, got 24"),
        KVSwapCache(model, tmp_path, preset="kvswap-int4") as cache,
    ):
        greedy(model, prompt(1, 60), cache, tokens=2)


@pytest.mark.parametrize("name", [each.name for each in kvswap_torch.presets() if each.smaller])
def test_smaller_settings_take_less_and_less(name):
    preset, shape = find(name), Shape()
    steps = [
        SwapConfig.preset(name, settings, shape=shape)
        for settings in ({}, *preset.smaller_settings(shape))
    ]
    few = {"memory.pages_per_layer": 8, "selection.top_k_groups": 8}
    needs = [
        memory_of(each.with_settings(few), shape, heads=32, context=32768)["total"]
        for each in steps
    ]
    assert needs == sorted(needs, reverse=True) and len(set(needs)) == len(needs)
    assert max(map(selected_tokens, steps)) == selected_tokens(steps[0])
    narrow = Shape(layers=2, kv_heads=2, head_dim=16, element_bytes=4)
    ranks = [
        SwapConfig.preset(name, settings, shape=narrow).summary.rank
        for settings in ({}, *preset.smaller_settings(narrow))
    ]
    assert ranks == sorted(ranks, reverse=True)
