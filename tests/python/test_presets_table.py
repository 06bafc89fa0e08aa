"""The comparison of presets at equal bytes: what is run, and that a failure is shown as one."""

from __future__ import annotations

import json
import re

import pytest

import kvswap_torch
from bench import table
from bench.presets_table import PAPERS, SIGNS, preset_rows
from bench.quality.budget import Bytes
from bench.quality.methods import parse
from bench.quality.plan import SHARES, make_plan, preset_method
from bench.quality.product import Product
from kvswap_torch import BudgetError
from kvswap_torch.hf.families import model_parts
from tests.python.tiny_models import has_native, tiny_model

TOLD = "the papers lose | same sign?"
NAMES = [preset.name for preset in kvswap_torch.presets() if not preset.needs]


def test_the_set_has_every_preset_at_every_share():
    (stretch,) = make_plan([512], [1], ["presets"], 8192, 6)
    assert len(stretch.methods) == 1 + len(NAMES) * len(SHARES)
    asked = [parse(name)[1] for name in stretch.methods[1:]]
    assert [each["preset"] for each in asked] == [name for name in NAMES for _ in SHARES]
    assert set(PAPERS) <= set(NAMES)


@pytest.mark.parametrize("model", SIGNS)
def test_what_papers_say_has_our_sign_or_a_reason(model):
    """Where nothing is said of a figure it is open, as for every other model."""
    for name, told in SIGNS[model].items():
        assert name in PAPERS and re.match(r"(yes|no|open)[:,] \w", told), name
    methods = {"full": right(0.75), preset_method("quest", "1/4"): right(0.5)}
    found = by_name(list(preset_rows([run(methods)])))
    assert found["quest"].endswith(f"| {PAPERS['quest']} | open |")
    assert found["h2o"].endswith("|  |  |")
    found = by_name(list(preset_rows([run(methods, model=model)])))
    assert found["kvswap"].endswith(f"| {PAPERS['kvswap']} | {SIGNS[model]['kvswap']} |")


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
    for name in ("kvswap", "kvswap-fp8"):
        divided = Product.named(name, asked | {"preset": name}, size)
        assert (divided.config, divided.preset) == (None, name)


def run(methods: dict, **changed) -> dict:
    """A results file of one length, made up."""
    part = {"documents": 1, "methods": methods, "impossible": changed.pop("impossible", {})}
    return {"model": "tiny", "digest": "a", "lengths": {"4096": part}} | changed


def right(share: float, read: int = 0) -> dict:
    tasks = {"all": {"answers": 8, "exact": [share, 0, 1]}}
    return {"tasks": tasks, "bytes_read_per_token": read}


def by_name(rows: list[str]) -> dict[str, str]:
    return {row.split("`")[1]: row for row in rows if row.startswith("| `")}


def test_a_row_says_what_was_right_what_was_read_and_what_does_not_fit():
    methods = {
        "full": right(0.75),
        preset_method("quest", "1/4"): right(0.5, 2048),
        preset_method("arkvale", "1/4"): right(0.5, 2048) | {"tasks": {}},
    }
    impossible = {preset_method("loki", "1/13"): "kv_memory_bytes: must be at least"}
    rows = list(preset_rows([run(methods, impossible=impossible)]))
    assert rows[:2] == ["**tiny**, 4,096 tokens, documents: 1, answers: 8", ""]
    assert rows[2] == f"| preset | 1/4 of the memory | 1/13 of the memory | {TOLD} |"
    assert rows[4] == "| full cache, all of the memory | 0.75 | 0.75 |  |  |"
    found = by_name(rows)
    assert "| 0.50, reads 2.00 KiB | not run |" in found["quest"]
    assert "| 0.00, reads 2.00 KiB |" in found["arkvale"]
    assert "| not run | does not fit | 34.0 of 91.6" in found["loki"]


def test_where_the_full_cache_can_do_no_task_all_that_was_asked_counts():
    asked = {"tasks": {"asked": {"answers": 9, "exact": [0.4, 0, 1]}}, "bytes_read_per_token": 0}
    rows = list(preset_rows([run({"full": asked, preset_method("quest", "1/4"): asked})]))
    assert rows[0] == "**tiny**, 4,096 tokens, documents: 1, answers: 9"
    assert "| 0.40, reads 0 B |" in by_name(rows)["quest"]


def test_runs_over_the_same_documents_fill_one_table():
    full, quest, loki = right(0.75), preset_method("quest", "1/4"), preset_method("loki", "1/4")
    earlier = run({"full": full, quest: right(0.25), loki: right(0.5)})
    rows = list(preset_rows([earlier, run({"full": full, quest: right(0.75)})]))
    assert sum("full cache" in row for row in rows) == 1
    found = by_name(rows)
    assert "| 0.75, reads 0 B |" in found["quest"]
    assert "| 0.50, reads 0 B |" in found["loki"]
    later = run({"full": full, loki: right(0.5)}, impossible={quest: "kv_memory_bytes: ..."})
    found = by_name(list(preset_rows([earlier, later])))
    assert "| does not fit |" in found["quest"]
    found = by_name(list(preset_rows([later, earlier])))
    assert "| 0.25, reads 0 B |" in found["quest"]
    assert "needs a file of the model" in found["compresskv"]
    rows = list(preset_rows([earlier, run({"full": full, quest: right(0.5)}, digest="b")]))
    assert sum("full cache" in row for row in rows) == 2


def test_what_the_most_documents_were_not_given_comes_from_fewer():
    quest, loki, later = (
        preset_method(name, share)
        for name, share in (("quest", "1/4"), ("loki", "1/4"), ("loki", "1/13"))
    )
    most = run({"full": right(0.75), quest: right(0.5)})
    most["lengths"]["4096"]["documents"] = 3
    one = {name: right(0.25) | {"documents": 1} for name in ("full", quest, loki, later)}
    rows = list(preset_rows([run(one), most]))
    first = next(at for at, row in enumerate(rows) if row.endswith("documents: 1, answers: 8"))
    found = by_name(rows[:first])
    assert "| 0.25 of 1 document, reads 0 B |" in found["loki"]
    assert "| 0.50, reads 0 B |" in found["quest"]
    # A share that fewer documents alone have stands in a table of its own.
    assert "1/13 of the memory" not in "".join(rows[:first])
    assert "| 0.25, reads 0 B |" in by_name(rows[first:])["loki"]


def test_every_model_has_a_section_of_its_own_on_the_page(tmp_path, monkeypatch):
    """From the results that `bench.quality` leaves, with columns of what was run of it alone."""
    folder = tmp_path / "quality"
    folder.mkdir()
    quest, snapkv = preset_method("quest", "1/4"), preset_method("snapkv", "1/13")
    made = {
        "reference_model": run({"full": right(0.94), quest: right(0.5)}, model="reference_model"),
        "smollm2": run({"full": right(0.66), snapkv: right(0.25)}, model="smollm2", digest="b"),
    }
    for name, results in made.items():
        (folder / f"presets_{name}.json").write_text(json.dumps(results))
    monkeypatch.setattr(table, "RESULTS", tmp_path)
    text = "\n".join(table.TABLES["presets"]())
    page = table.with_tables(
        "<!-- bench:presets -->\nold\n<!-- /bench:presets -->", {"presets": text}
    )
    assert "old" not in page
    ours, theirs = page.split("**smollm2**")
    assert (
        "**reference_model**" in ours and "| full cache, all of the memory | 0.94 |  |  |" in ours
    )
    assert "| `quest` | 0.50, reads 0 B |" in ours and "1/13 of the memory" not in ours
    assert "| full cache, all of the memory | 0.66 |  |  |" in theirs
    assert "| `snapkv` | 0.25, reads 0 B |" in theirs and "1/4 of the memory" not in theirs
    first = theirs.split("---|\n")[1]
    assert first.startswith("| full cache") and first.splitlines()[1].startswith("| `kvswap`")


def test_most_documents_count_and_a_question_at_the_end_stands_beside_one_inside():
    inside = preset_method("snapkv", "1/13")
    after = preset_method("snapkv", "1/13", "after")
    few = run(
        {"full": right(0.75), inside: right(0.5), preset_method("snapkv", "1/4"): right(0.25)}
    )
    many = run({"full": right(0.7), inside: right(0.1), after: right(0.6)})
    part = many["lengths"]["4096"]
    part["documents"] = 12
    part["methods"][inside]["tasks"]["all"]["exact_difference"] = [-0.6, -0.7, -0.5]
    first, second = "\n".join(preset_rows([few, many])).split("**tiny**")[1:]
    assert "documents: 12" in first and "1/4 of the memory" not in first
    told = "| 0.10, -0.60 (-0.70 to -0.50), reads 0 B; at the end 0.60 |"
    assert told in by_name(first.splitlines())["snapkv"]
    assert "documents: 1," in second and "1/13 of the memory" not in second
    assert "| 0.25, reads 0 B |" in by_name(second.splitlines())["snapkv"]
