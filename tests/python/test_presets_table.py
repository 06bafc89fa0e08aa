"""The comparison of presets at equal bytes: what is run, and that a failure is shown as one."""

from __future__ import annotations

import pytest

import kvswap_torch
from bench.presets_table import PAPERS, preset_rows
from bench.quality.budget import Bytes
from bench.quality.methods import parse
from bench.quality.plan import SHARES, make_plan, preset_method
from bench.quality.product import Product
from kvswap_torch import BudgetError
from kvswap_torch.hf.families import model_parts
from tests.python.tiny_models import has_native, tiny_model

NAMES = [preset.name for preset in kvswap_torch.presets() if not preset.needs]


def test_the_set_has_every_preset_at_every_share():
    (stretch,) = make_plan([512], [1], ["presets"], 8192, 6)
    assert len(stretch.methods) == 1 + len(NAMES) * len(SHARES)
    asked = [parse(name)[1] for name in stretch.methods[1:]]
    assert [each["preset"] for each in asked] == [name for name in NAMES for _ in SHARES]
    assert set(PAPERS) <= set(NAMES)


@pytest.mark.skipif(not has_native(), reason="kvswap_torch._C is not built")
def test_columns_of_a_preset_are_not_lowered_to_fit():
    model = tiny_model("llama", max_position_embeddings=65536)
    size = Bytes(model, model_parts(model).shape, 60000)
    asked = {"preset": "loki", "memory": "1/4"}
    loki = Product.named("loki", asked, size).config
    assert loki.rank == 4 and loki.groups_max > 0
    with pytest.raises(BudgetError, match="kv_memory_bytes"):
        Product.named("loki", asked | {"memory": "1/34"}, size)
    # These divide a budget themselves, as the cache does that is given one.
    assert Product.named("kvswap", asked | {"preset": "kvswap"}, size).config is None
    lowered = Product.named("fp8", {"preset": "kvswap-fp8", "memory": "1/4"}, size).config
    assert lowered.records == "fp8" and lowered.rank < 32


def test_a_row_says_what_was_right_what_was_read_and_what_does_not_fit():
    right = {"tasks": {"all": {"exact": [0.5, 0.25, 0.75]}}, "bytes_read_per_token": 2048}
    part = {
        "documents": 2,
        "methods": {
            "full": {"tasks": {"all": {"exact": [0.75, 0.5, 1.0]}}},
            preset_method("quest", "1/4"): right,
            preset_method("arkvale", "1/4"): right | {"tasks": {}},
        },
        "impossible": {preset_method("loki", "1/13"): "kv_memory_bytes: must be at least"},
    }
    rows = list(preset_rows([{"model": "tiny", "lengths": {"4096": part}}]))
    assert rows[0] == "| preset | 1/4 of the memory | 1/13 of the memory | the papers lose |"
    assert rows[2] == "| *tiny, 4,096 tokens, documents: 2* | *full cache: 0.75* | | |"
    by_name = {row.split("`")[1]: row for row in rows[3:]}
    assert "| 0.50, reads 2.00 KiB | not run |" in by_name["quest"]
    assert "| 0.00, reads 2.00 KiB |" in by_name["arkvale"]
    assert "| not run | does not fit | 34.0 of 91.6" in by_name["loki"]


def test_runs_over_the_same_documents_fill_one_table():
    def run(methods: dict, **changed) -> dict:
        part = {"documents": 1, "methods": methods, "impossible": {}}
        return {"model": "tiny", "digest": "a", "lengths": {"4096": part}} | changed

    def right(share: float) -> dict:
        return {"tasks": {"all": {"exact": [share, 0, 1]}}, "bytes_read_per_token": 0}

    full, quest, loki = right(0.75), preset_method("quest", "1/4"), preset_method("loki", "1/4")
    earlier = run({"full": full, quest: right(0.25), loki: right(0.5)})
    rows = list(preset_rows([earlier, run({"full": full, quest: right(0.75)})]))
    assert sum("full cache" in row for row in rows) == 1
    by_name = {row.split("`")[1]: row for row in rows[3:]}
    assert "| 0.75, reads 0 B |" in by_name["quest"]
    assert "| 0.50, reads 0 B |" in by_name["loki"]
    assert "needs a file of the model" in by_name["compresskv"]
    rows = list(preset_rows([earlier, run({"full": full}, digest="b")]))
    assert sum("full cache" in row for row in rows) == 2
