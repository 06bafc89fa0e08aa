"""`bench real_speed`: rows by mode and device, what each keeps, and that it is resumed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import DynamicCache, StaticCache

from bench.headline import made_of
from bench.quality.methods import product_settings
from bench.quality.product import Product
from bench.reading import read, step
from bench.real_rows import FULL, IN_MEMORY, STATIC, WARM, Timed, Work, decode, rounds, told
from bench.real_speed import cost_lines, open_journal
from kvswap_torch.compare.budget import Bytes
from kvswap_torch.compare.journal import Journal
from kvswap_torch.hf.families import model_parts
from tests.python.tiny_models import has_native, tiny_model, tokens_of

needs_native = pytest.mark.skipif(not has_native(), reason="needs the compiled library")
BIG = "product"  # without a budget, which is more than so short a text needs
OFF, EMMC = f"{BIG}:prefetch.mode=off", f"{BIG}:storage.simulated_device=emmc"


def work(path: Path, steps: int = 12) -> Work:
    model, ids = tiny_model("llama"), tokens_of(1, 200 + WARM + steps)[0]
    return Work(model, ids, 200, Bytes(model_parts(model), len(ids), path, 200), path)


def test_rows_are_of_each_mode_and_device_and_full_caches_stand_once():
    names = rounds(["product:memory=1/8", "quest"], ["own", "off"], ["local", "emmc"])
    assert names == [
        ["product:memory=1/8", "product:memory=1/8,prefetch.mode=off", "quest",
         "quest:prefetch.mode=off", *IN_MEMORY],
        ["product:memory=1/8,storage.simulated_device=emmc",
         "product:memory=1/8,prefetch.mode=off,storage.simulated_device=emmc",
         "quest:storage.simulated_device=emmc",
         "quest:prefetch.mode=off,storage.simulated_device=emmc"],
    ]  # fmt: skip
    for name in (name for each in names for name in each if name not in IN_MEMORY):
        product_settings(name)
    assert rounds(["p", "p"], ["own", "own"], ["ufs", "ufs"]) == [
        ["p:storage.simulated_device=ufs", *IN_MEMORY]
    ]


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ((["p"], ["on"], ["local"]), "prefetch: must be among own, verify, off, trust, got on"),
        ((["p"], ["own"], ["sd"]), "devices: must be among local, nvme, ufs, emmc, got sd"),
        (([], ["own"], ["local"]), "methods: must be at least one"),
    ],
)
def test_unknown_modes_and_devices_are_refused(given, why):
    with pytest.raises(ValueError, match=why):
        rounds(*given)


def test_speeds_are_paired_with_the_first():
    times = {"a": [0.01, 0.02, 0.03], "b": [0.02, 0.04, 0.06], "c": [0.02, 0.01, 0.03]}
    rows = {name: Timed(each).facts(Timed(times["a"])) for name, each in times.items()}
    assert rows["a"] == {"ms": 20.0, "quartiles": [10.0, 30.0], "ratio": 1.0}
    assert rows["b"]["ratio"] == 2.0 and rows["b"]["ms"] == 40.0
    assert rows["c"]["ratio"] == 1.0


def test_waiting_is_kept_beside_the_time():
    reads = {"wait_seconds": 0.3, "hidden_seconds": 0.1}
    row = Timed([0.1, 0.2, 0.3], reads).facts(Timed([0.1, 0.2, 0.3]))
    assert row["wait_seconds"] == 0.3 and row["hidden_seconds"] == 0.1
    assert row["wait_ms"] == 100.0 and row["hidden_share"] == 0.25
    nothing = Timed([0.1, 0.2], dict.fromkeys(reads, 0.0)).facts(Timed([0.1, 0.2]))
    assert nothing["hidden_share"] is None and nothing["wait_ms"] == 0.0


def test_the_static_cache_answers_as_the_dynamic_one(tmp_path):
    each = work(tmp_path)
    caches = [
        DynamicCache(config=each.model.config),
        StaticCache(config=each.model.config, max_cache_len=len(each.ids)),
    ]
    logits = []
    for cache in caches:
        read(each.model, cache, each.ids[: each.first])
        logits.append([step(each.model, cache, token)[1] for token in each.ids[each.first :]])
    torch.testing.assert_close(torch.cat(logits[0]), torch.cat(logits[1]), rtol=1e-4, atol=1e-5)


@needs_native
def test_what_is_waited_for_is_of_the_counted_steps_alone(tmp_path, monkeypatch):
    """The reads of the first steps are taken off, not those of the document alone."""
    each = work(tmp_path)
    product = Product.named("p", {}, each.size)
    with product.opened(each.model, tmp_path, len(each.ids)) as cache:
        seen = []
        plain = type(cache).stats
        monkeypatch.setattr(type(cache), "stats", lambda self: seen.append(plain(self)) or seen[-1])
        timed = decode(each.model, {"p": cache, FULL: DynamicCache()}, each.ids, each.first)
    begun, ended = seen
    assert ended.decoded - begun.decoded == 12 == len(timed["p"].seconds)
    waited = ended.wait_seconds - begun.wait_seconds
    assert timed["p"].reads["wait_seconds"] == pytest.approx(waited)
    assert timed[FULL].reads == {} and len(timed[FULL].seconds) == 12


@needs_native
def test_rows_in_the_journal_are_not_measured_again(tmp_path):
    each, path = work(tmp_path, 4), tmp_path / "journal.jsonl"
    first = [[BIG, OFF], []]
    each.run(first[0], Journal(path, ("name",)))
    before = path.read_text()
    names = [[BIG, OFF, FULL, STATIC], [EMMC, "product:memory=1/500"]]
    journal = Journal(path, ("name",))
    assert [each.missing(of, journal) for of in names] == [[FULL, STATIC], names[1]]
    assert cost_lines(each, names, journal)[0].startswith("6 rows, 2 in the journal")
    for of_device in names:
        each.run(of_device, journal)
    assert path.read_text().startswith(before)
    rows = dict(told(names, Journal(path, ("name",))))
    assert list(rows) == [name for of_device in names for name in of_device]
    assert rows[OFF]["together"] == [BIG, OFF] and rows[STATIC]["together"] == [FULL, STATIC]
    assert "impossible" in rows["product:memory=1/500"]
    assert rows[BIG]["device"] == "local disk" and rows[EMMC]["device"] == "emmc"
    assert (rows[BIG]["prefetch"], rows[OFF]["prefetch"]) == ("verify", "off")
    assert made_of(rows[BIG]) == made_of(rows[OFF]) == made_of(rows[EMMC])
    assert cost_lines(each, names, journal) == ["all 6 rows are in the journal"]
    assert "wait_ms" in rows[OFF] and "wait_ms" not in rows[FULL]


@needs_native
def test_how_groups_are_read_changes_nothing_that_is_selected(tmp_path):
    """Longer texts have more groups by default; a mode without prefetch has as many."""
    model, settings = tiny_model("llama"), []
    size = Bytes(model_parts(model), 8192, tmp_path)
    for more in ({}, {"prefetch.mode": "off"}, {"storage.simulated_device": "ufs"}):
        product = Product.named("p", {"memory": "1/2"} | more, size)
        with product.opened(model, tmp_path, 8192) as cache:
            settings.append(cache.driver.config)
    own, off, slow = settings
    assert own.selection == off.selection == slow.selection
    assert own.memory == off.memory == slow.memory and own.summary == off.summary
    assert (own.prefetch.mode, off.prefetch.mode) == ("verify", "off")
    assert (own.storage.simulated_device, slow.storage.simulated_device) == (None, "ufs")


def test_a_journal_is_of_one_text_and_count_of_threads(tmp_path):
    model, ids = tmp_path / "model", torch.arange(9)
    model.mkdir()
    paths = {
        open_journal(model, tmp_path, *rest, False).path
        for rest in ((ids, 4, 1), (ids, 4, 2), (ids, 5, 1), (ids + 1, 4, 1))
    }
    assert len(paths) == 4
    same = open_journal(model, tmp_path, ids, 4, 1, False)
    same.add({"name": BIG})
    assert open_journal(model, tmp_path, ids, 4, 1, False).has(BIG)
    assert not open_journal(model, tmp_path, ids, 4, 1, True).has(BIG)
