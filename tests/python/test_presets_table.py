"""The comparison of presets at equal bytes: what is run, and that a failure is shown as one."""

from __future__ import annotations

import pytest

import kvswap_torch
from bench.pages.presets import joined, preset_rows
from bench.quality.methods import parse
from bench.quality.plan import SHARES, make_plan, preset_method
from bench.quality.product import Product
from kvswap_torch import BudgetError, SwapConfig
from kvswap_torch.compare.budget import Bytes, selected_tokens
from kvswap_torch.hf.families import model_parts
from tests.python.tiny_models import has_native, tiny_model

NAMES = [preset.name for preset in kvswap_torch.presets() if not preset.needs]
MACHINE = {"cpu": "some", "cores": 2, "file_system": "ext4", "date": "2026-11-25", "simd": "AVX2"}
TIMED = {"machine": MACHINE, "contenders": {"preset:quest": {"ms": 316.04}}}


def test_the_set_has_every_preset_at_every_share():
    (stretch,) = make_plan([512], [1], ["presets"])
    assert len(stretch.methods) == 1 + len(NAMES) * len(SHARES)
    asked = [parse(name)[1] for name in stretch.methods[1:]]
    assert [each["preset"] for each in asked] == [name for name in NAMES for _ in SHARES]


@pytest.mark.skipif(not has_native(), reason="kvswap_torch._C is not built")
def test_columns_of_a_preset_are_lowered_where_they_do_not_fit_alone():
    model = tiny_model("llama", max_position_embeddings=65536)
    size = Bytes(model_parts(model), 60000)
    asked = {"preset": "loki", "memory": "1/4"}
    loki = Product.named("loki", asked, size)
    assert loki.config.rank == 4 and loki.config.groups_max > 0 and loki.smaller == {}
    less = Product.named("loki", asked | {"memory": "1/10"}, size)
    assert less.smaller == {"summary.rank": less.config.rank} and less.config.rank < 4
    # Larger chunks, as many tokens: not more of them than its own.
    for share in ("1/8", "1/12", "1/14"):
        few = Product.named("shadowkv", {"preset": "shadowkv", "memory": share}, size)
        assert selected_tokens(few.config) <= selected_tokens(SwapConfig.preset("shadowkv"))
    # Groups of a user's own: smaller ones still attend no more, and his pages suffice.
    named = {"selection.top_k_groups": "128", "memory.pages_per_layer": "128"}
    for more in (named, {"selection.top_k_groups": "128"}):
        quest = {"preset": "quest", "memory": "1/20"} | more
        own = SwapConfig.preset("quest", {path: int(value) for path, value in more.items()})
        few = Product.named("quest", quest, size)
        assert selected_tokens(few.config) <= selected_tokens(own)
        assert few.config.selection.group_tokens == few.smaller.get(
            "selection.group_tokens", own.selection.group_tokens
        )
    # A step that does not go with what was asked for is passed over.
    asked_of = {"preset": "dynakv", "clusters.max_tokens": "20", "memory": "1/400"}
    with pytest.raises(BudgetError, match="kv_memory_bytes"):
        Product.named("dynakv", asked_of, size)
    own = SwapConfig.preset("loki", model=size.identity)
    assert 2 * selected_tokens(less.config) >= selected_tokens(own)
    # What is asked for by name stays as asked.
    with pytest.raises(BudgetError, match="kv_memory_bytes"):
        Product.named("loki", asked | {"memory": "1/10", "summary.rank": "4"}, size)
    with pytest.raises(BudgetError, match="kv_memory_bytes"):
        Product.named("loki", asked | {"memory": "1/400"}, size)
    # These divide a budget themselves, as the cache does that is given one.
    for name in ("kvswap", "kvswap-fp8", "kvswap-int4"):
        divided = Product.named(name, asked | {"preset": name}, size)
        assert (divided.config, divided.preset) == (None, name)


@pytest.mark.skipif(not has_native(), reason="kvswap_torch._C is not built")
@pytest.mark.parametrize("preset", NAMES)
def test_the_cache_has_the_settings_that_were_found_for_its_budget(preset, tmp_path):
    model = tiny_model("llama", max_position_embeddings=65536)
    size = Bytes(model_parts(model), 12064, tmp_path, 12000)
    opened = 0
    for share in ("1/2", "1/4", "1/7"):
        asked = {"preset": preset, "memory": share}
        try:
            product = Product.named(preset, asked, size)
        except BudgetError:
            continue
        if product.config is None:
            continue  # the cache divides
        with product.opened(model, tmp_path, size.context) as cache:
            has, wanted = cache.driver.config, product.config
            assert has.selection == wanted.selection and has.summary == wanted.summary
            assert has.retention == wanted.retention and has.clusters == wanted.clusters
            assert has.memory == wanted.memory
        opened += 1
    assert opened > 0 or preset in ("kvswap", "kvswap-fp8", "kvswap-int4")


def run(methods: dict, documents: int = 1, **changed) -> dict:
    """A results file of one length, made up."""
    part = {"documents": documents, "methods": methods}
    part["impossible"] = changed.pop("impossible", {})
    of = {"model": "tiny_model", "digest": "a", "machine": MACHINE}
    return of | {"lengths": {"4096": part}} | changed


def right(share: float, read: int = 0, documents: int = 1) -> dict:
    tasks = {"all": {"answers": 8, "exact": [share, 0, 1]}}
    return {"tasks": tasks, "bytes_read_per_token": read, "documents": documents}


def by_name(*results: dict) -> dict[str, str]:
    rows = preset_rows(list(results), "4096", TIMED)
    return {row.split("`")[1]: row for row in rows if row.startswith("| `")}


def test_a_row_says_what_was_right_what_was_read_and_what_does_not_fit():
    methods = {
        "full": right(0.75),
        preset_method("quest", "1/13"): right(0.5, 2048),
        preset_method("arkvale", "1/13"): right(0.5, 2048)
        | {"tasks": {}, "smaller": {"summary.rank": 6}},
    }
    impossible = {preset_method("loki", "1/13"): "kv_memory_bytes: must be at least"}
    told = run(methods, impossible=impossible)
    caption = next(iter(preset_rows([told], "4096", TIMED)))
    assert "1/13 of the full cache's memory: tiny model, 4,096 tokens, 1 documents" in caption
    assert "8 answers, of which the full cache has 0.75 right" in caption
    assert "some with AVX2, 2 cores" in caption and "Date: 2026-11-25" in caption
    found = by_name(told)
    assert set(found) == {preset.name for preset in kvswap_torch.presets()}
    assert found["quest"] == "| `quest` |  | 0.50 |  | not measured | 2.00 KiB | 316.0 |"
    assert found["arkvale"].startswith("| `arkvale` | `summary.rank` 6 | 0.00 |  | not measured |")
    assert found["loki"] == "| `loki` |  | does not fit |  |  |  | not measured |"
    assert found["h2o"] == "| `h2o` |  | not measured |  |  |  | not measured |"


def test_where_the_full_cache_can_do_no_task_all_that_was_asked_counts():
    asked = right(0.0) | {"tasks": {"asked": {"answers": 9, "exact": [0.4, 0, 1]}}}
    told = run({"full": asked, preset_method("quest", "1/13"): asked})
    assert "9 answers, of which the full cache has 0.40" in next(preset_rows([told], "4096", TIMED))
    assert by_name(told)["quest"].startswith("| `quest` |  | 0.40 |")


def test_runs_over_the_same_documents_fill_one_table():
    full, quest = right(0.75), preset_method("quest", "1/13")
    loki = preset_method("loki", "1/13")
    earlier = run({"full": full, quest: right(0.25), loki: right(0.5)})
    found = by_name(earlier, run({"full": full, quest: right(0.75)}))
    assert found["quest"].startswith("| `quest` |  | 0.75 |")
    assert found["loki"].startswith("| `loki` |  | 0.50 |")
    later = run({"full": full}, impossible={quest: "kv_memory_bytes: ..."})
    assert "| does not fit |" in by_name(earlier, later)["quest"]
    assert by_name(later, earlier)["quest"].startswith("| `quest` |  | 0.25 |")
    with pytest.raises(ValueError, match="one model and one set of questions"):
        joined([earlier, run({"full": full}, digest="b")], "4096")


def test_what_the_most_documents_were_not_given_comes_from_fewer_and_says_so():
    quest, loki = preset_method("quest", "1/13"), preset_method("loki", "1/13")
    known = preset_method("quest", "1/13", "after")
    most = right(0.1, documents=12)
    most["tasks"]["all"]["exact_difference"] = [-0.6, -0.7, -0.5]
    many = run({"full": right(0.75, documents=12), quest: most}, documents=12)
    few = run({name: right(0.25) for name in ("full", quest, loki, known)})
    found = by_name(many, few)
    told = "|  | 0.10 | -0.60 (-0.70 to -0.50) | 0.25 of 1 document | 0 B | 316.0 |"
    assert found["quest"] == f"| `quest` {told}"
    assert "| 0.25 of 1 document |" in found["loki"]
