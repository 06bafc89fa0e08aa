"""The benchmark pages: every table from its results, with a caption; plots that do not change."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import table
from bench.long_decode import by_marks, in_passes, run
from bench.machine import RESULTS
from bench.pages import answers, home, plots, presets, speed
from bench.pages.answers import real_rows
from kvswap_torch import KVSwapCache
from tests.python.tiny_models import tiny_model, tokens_of

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "benchmarks"
MACHINE = {"cpu": "some", "cores": 2, "file_system": "ext4", "date": "2026-11-25", "simd": "AVX3"}


@pytest.mark.parametrize("name", table.TABLES)
def test_every_table_is_on_a_page_as_its_results_make_it(name):
    shown = "\n".join(page.read_text(encoding="utf-8") for page in table_pages())
    begin, end = f"<!-- bench:{name} -->\n", f"\n<!-- /bench:{name} -->"
    assert shown.count(begin) == shown.count(end) == 1
    made = "\n".join(table.TABLES[name]())
    assert shown.partition(begin)[2].partition(end)[0] == made, "python -m bench table"
    # Of shapes, not measured; docs/gpu.md has a table of its own for what a visit was.
    if name != "headline" and not name.startswith(("fit", "gpu")):
        caption = made.partition("\n")[0]
        assert re.search(r"Machine: .*cores.*Date: 2026-.*(low|high)er is better", caption, re.I)
    rows = [line for line in made.splitlines() if line.startswith("|")]
    assert len(rows) > 3 and len({row.count("|") for row in rows}) == 1


def table_pages() -> list[Path]:
    return [ROOT / page for page in table.PAGES]


def test_only_results_that_a_page_shows_are_kept(monkeypatch):
    """Files that no table reads would grow old unseen."""
    read: set[Path] = set()
    plain = Path.read_text
    monkeypatch.setattr(
        Path, "read_text", lambda path, *a, **k: read.add(path.resolve()) or plain(path, *a, **k)
    )
    for made in table.TABLES.values():
        list(made())
    kept = {path.resolve() for path in RESULTS.rglob("*") if path.is_file()}
    heads = {path for path in kept if path.parent.name == "heads"}  # bench/quality/heads.py
    assert kept - heads - read == set()


def test_at_most_four_plots_and_each_is_on_the_page(tmp_path):
    index = (FOLDER / "index.md").read_text(encoding="utf-8")
    drawn = sorted(path.name for path in FOLDER.glob("*.svg"))
    assert 1 <= len(drawn) <= 4 and all(f"]({name})" in index for name in drawn)
    of_presets = presets.joined(table.preset_results(), "16384")
    given = table.load_cells(), table.real_results(), of_presets
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        plots.draw_all(tmp_path / name, *given)
    assert sorted(path.name for path in (tmp_path / "one").iterdir()) == drawn
    for name in drawn:
        one, two = ((tmp_path / which / name).read_bytes() for which in ("one", "two"))
        assert one == two and b"<svg" in one


def test_a_page_without_marks_stays_as_it_is(tmp_path, monkeypatch):
    page = tmp_path / "page.md"
    page.write_text("# No tables here\n")
    monkeypatch.setattr(table, "PAGES", (page,))
    monkeypatch.setattr(table.plots, "draw_all", lambda *given: None)
    table.main()
    assert page.read_text() == "# No tables here\n"
    marks = "<!-- bench:speed -->\nold\n<!-- /bench:speed -->"
    assert table.with_tables(marks, {"speed": "new"}) == marks.replace("old", "new")


def test_where_the_defaults_are_slower_the_table_says_so():
    rows = {name: {"ms": ms} for name, ms in (("default", 30.0), ("static", 20.0))}
    assert speed.over(rows, "default", "static") == "1.50, slower"
    assert speed.over(rows, "static", "default") == "0.67, faster"
    assert speed.over({}, "default", "static") == "not measured"


def quality(documents: int, methods: dict[str, Any], impossible: dict[str, str]) -> dict[str, Any]:
    part = {"documents": documents, "methods": methods, "impossible": impossible}
    return {"machine": MACHINE, "lengths": {"4096": part}}


def answered(kept: float) -> dict[str, Any]:
    asked = {"answers": 50, "exact": (0.6, 0.5, 0.7), "kept": (kept, 0.8, 1.0)}
    asked |= {"kl": (0.02, 0.0, 1.0), "agree": (0.9, 0.0, 1.0), "loss": (0.345, 0.3, 0.4)}
    made = {"ranks": [16, 32], "summary_dtype": "int4", "groups_per_step": 26.0}
    made |= {"selected_tokens": 52, "memory_share": 0.125}
    return {"tasks": {"asked": asked, "language": asked}} | made


NAMES = ("full", "product:memory=1/8", "product:config=t.json,memory=1/8")


def test_real_answers_are_of_most_documents_and_times_of_the_same_settings():
    few = quality(3, {name: answered(0.5) for name in NAMES[:2]}, {})
    many = quality(12, {name: answered(0.9) for name in NAMES}, {"product:memory=1/34": "at least"})
    same = {"ms": 47.8, "ranks": [16, 32], "summary_dtype": "int4", "groups_max": 26}
    same["prefetch"] = "verify"
    methods = {
        NAMES[0]: {"ms": 155.7},
        "static": {"ms": 101.5},
        NAMES[1]: same | {"group_tokens": 2},
    }
    methods[NAMES[2]] = same | {"group_tokens": 4}
    timed = {"machine": MACHINE, "tokens": 4152, "methods": methods}
    rows = [row for row in real_rows([few, many], [timed]) if row.startswith("| 4")]
    full = "101.5 (StaticCache)"  # the faster one
    assert rows[0] == f"| 4,096, 12 | full cache | all |  | 30 of 50 |  | 0.345 |  |  |  | {full} |"
    made = "| 1/8.0 | 16 to 32 in int4, 26 of 2 | 30 of 50 | 0.90 (0.80 to 1.00) "
    made += "| 0.345 | 0.020 | 0.900 |"
    assert rows[1] == f"| 4,096, 12 | defaults, 1/8 {made} 47.8 | {full} |"
    assert rows[2].startswith("| 4,096 | defaults, 1/34 |  |  | does not fit |")
    assert rows[3] == f"| 4,096, 12 | tuned, 1/8 {made} not measured |  |"
    far = timed | {"tokens": 4096 + answers.NEAR_TOKENS + 1}
    assert "47.8" not in "".join(real_rows([many], [far]))
    methods[NAMES[1]]["prefetch"] = "off"
    assert f"| 47.8, no prefetch | {full} |" in "".join(real_rows([many], [timed]))


def test_a_default_that_was_measured_without_prefetch_is_marked():
    def row(mode: str | None, predict: float) -> dict[str, Any]:
        config = {} if mode is None else {"prefetch": mode}
        return {"ms": 30.0, "kv_memory_bytes": 1, "config": config,
                "parts_ms": {"predict": predict}}  # fmt: skip

    shown = []
    for default in (row("verify", 0.0), row("off", 0.1), row(None, 0.0), row(None, 0.1)):
        cell = {"machine": MACHINE, "shape": "1b", "layers": 4, "context": 8192, "batch": 1,
                "device": "local disk", "kv_bytes_full": 13, "empty": {},
                "contenders": {"default": default, "kvswap": row("off", 0.0)}}  # fmt: skip
        last = list(speed.speed_rows([cell]))[-1].split(" | ")
        assert last[3] == "30.0", "published settings are what they are"
        shown.append(last[4])
    assert shown == ["30.0", "30.0, no prefetch", "30.0, no prefetch", "30.0"]


def test_the_homes_numbers_are_of_the_configuration_that_their_line_names():
    asked = {"answers": 174, "kept": (0.94, 0.9, 1.0)}
    method = {"memory_bytes": 3 << 20, "memory_share": 1 / 13, "tasks": {"asked": asked}}
    other = {"memory_bytes": 5 << 20, "memory_share": 1 / 8, "tasks": {"asked": {}}}
    part = {"documents": 6, "full_bytes": 39 << 20}
    part["methods"] = {home.METHOD: method, "product:memory=1/8": other}
    memory, kept = home.answered_rows({"lengths": {"8192": {}, home.LENGTH: part}})
    assert "| **1/13.0** | of the full cache's memory: 3.00 MiB instead of 39.00 MiB |" in memory
    assert memory.endswith("| defaults, reference model, 32,768 tokens, batch 1 |")
    assert kept.startswith("| **0.94** |") and "0.90 to 1.00" in kept and "174 questions" in kept
    times = {"static": 70.0, "dynamic": 90.0, "default": 46.25, "kvswap": 20.0}
    told = {"kv_memory_bytes": 1 << 20, "config": {"prefetch": "verify"}}
    rows = {name: {"ms": ms, **told} for name, ms in times.items()}
    cell = {"shape": "1b", "layers": 4, "context": 32768, "batch": 1, "kv_bytes_full": 13 << 20}
    cell |= {"choices": "random", "device": "local disk", "contenders": rows}
    row = home.time_row(cell)
    assert "| **46.2 ms** | a step; the full cache (`StaticCache`) takes 70.0 ms |" in row
    assert "random choices, 32,768 tokens, batch 1, local disk, 1.00 MiB (1/13.0)" in row


def test_a_long_decoding_is_judged_between_its_marks():
    likely, lost = torch.tensor([1, 2, 3, 4]), torch.tensor([0.5, 0.5, 1.0, 2.0])
    full = (torch.tensor([1, 2, 3, 9]), torch.tensor([0.5, 0.25, 1.0, 1.0]))
    rows = by_marks((likely, lost), full, [2, 4])
    assert rows == [{"same_token": 1.0, "nats": 0.125}, {"same_token": 0.5, "nats": 0.5}]


def test_a_long_decoding_through_a_cache_that_holds_everything_is_the_full_caches(tmp_path):
    model, ids = tiny_model("llama"), tokens_of(1, 81)[0]
    full = in_passes(model, ids, prompt=40)
    assert len(full[0]) == len(full[1]) == 40
    with KVSwapCache(model, path=tmp_path) as cache:
        told, times = run(model, cache, ids, prompt=40)
    assert len(times) == 40
    assert torch.equal(told[0], full[0])
    torch.testing.assert_close(told[1], full[1], rtol=1e-3, atol=1e-3)
