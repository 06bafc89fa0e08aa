"""Tables of the real model, and what they are measured by: stages of a score, look-ups."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import typer

from bench.lookups import Lookups, parse
from bench.quality.swap import Swap
from bench.rank_settings import measured_settings, rank_correlation, ranks
from bench.real_speed import compare
from bench.real_table import (
    _label,
    lookup_rows,
    product_rows,
    speed_rows,
    stage_rows,
    task_rows,
    verdict,
)
from bench.score_stages import RANK, Scores, best_of, measure_layer, summarised, ways_of
from bench.table import TABLES
from kvswap_torch.tuning.observe import Observed
from kvswap_torch.tuning.recall import Choice, Steps
from kvswap_torch.tuning.samples import Sample
from tests.python import test_quality_parts as parts

EIGHTH = "product:memory=1/8"

HEADS, KV_HEADS, HEAD_DIM, TOKENS, FOCUS = 4, 2, 16, 400, 360


def seen_of(seed: int = 0) -> Observed:
    """A layer whose keys have as many columns as a summary keeps."""
    generator = torch.Generator().manual_seed(seed)
    query, keys = (
        2 * torch.randn(1, heads, TOKENS, HEAD_DIM, generator=generator)
        for heads in (HEADS, KV_HEADS)
    )
    return Observed(3, query, None, keys, HEAD_DIM**-0.5)


def sample_of() -> Sample:
    """Tokens that all stand there once, but for those of the questions."""
    ids = torch.arange(TOKENS)
    ids[FOCUS:] = torch.arange(50, 50 + TOKENS - FOCUS)
    return Sample(ids, FOCUS)


def test_by_all_columns_a_groups_mass_is_what_attention_gives_it():
    seen, positions = seen_of(), torch.tensor([370, 399])
    steps = Steps(seen, positions, Choice(groups_max=9))
    actual = Scores(seen, sample_of(), steps).by_mass(RANK, steps.choosable)
    keys = seen.keys[0].repeat_interleave(HEADS // KV_HEADS, 0)
    for step, position in enumerate(positions):
        last = (int(position) - 32) // 4 * 4
        logits = (keys[:, 4:last] @ seen.query[0, :, position, :, None])[..., 0] * seen.scale
        expected = logits.softmax(1).sum(0).unflatten(0, (-1, 4)).sum(1)
        # Rows and queries are int8.
        torch.testing.assert_close(actual[step, 1 : last // 4], expected, rtol=0.1, atol=0.02)
        assert actual[step, last // 4 :].sum() == actual[step, 0] == 0


def test_a_second_stage_over_all_groups_makes_the_choice_of_all_columns():
    seen, sample = seen_of(), sample_of()
    steps = Steps(seen, torch.tensor([365, 398]), Choice(groups_max=9))
    scores = Scores(seen, sample, steps)
    everything = best_of(scores.by_product(8), steps.choosable, 1.0, 9)
    assert torch.equal(everything, steps.choosable)
    few = best_of(scores.by_product(8), steps.choosable, 0.1, 9)
    assert few.sum(1).tolist() == [10, 10] and not (few & ~steps.choosable).any()
    ways = ways_of(scores, steps)
    assert {groups.shape for groups in ways.values()} == {(2, 9)}
    traffic = dict(ways.keys())
    assert traffic["8 of 32 columns by mass alone"] == 0.25
    assert traffic["16 of 32 columns by product, then the best 40%"] == pytest.approx(0.7)
    kept = measure_layer(seen, sample, 9)
    told = {way: summarised([found]) for (way, _), found in kept.items()}
    alone, staged = (
        told[f"8 of 32 columns by mass{end}"] for end in (" alone", ", then the best 40%")
    )
    assert alone["chosen"] < staged["chosen"] <= 1.0
    assert alone["held"] < staged["held"]


def test_in_two_stages_the_best_fifth_by_few_columns_is_scored_by_all():
    view = parts.make_view(predicted=False)
    identity = (torch.eye(parts.KV_HEADS * parts.HEAD_DIM),) * 2
    frame = dataclasses.replace(parts.FRAME, groups_max=1)
    whole, staged = (Swap(frame, [identity], (16,), score="mass", first=n) for n in (0, 8))
    sample, row = 1, 4
    choosable = slice(8, (parts.TOKENS + row - 10) // 4 * 4)
    keys, query = view.past.keys[choosable], view.query[sample, :, row] * view.scale
    # The first eight columns are those of the first KV head: of its two heads alone.
    early = (query[:2] @ keys[:, 0].T).softmax(1).sum(0)
    early += (parts.HEADS - 2) / len(keys)
    kept = early.unflatten(0, (-1, 4)).sum(1).topk(round(0.2 * (view.columns // 4))).indices
    tokens = (4 * kept[:, None] + torch.arange(4)).flatten()
    masses = sum((query[h] @ keys[tokens, h // 2].T).softmax(0) for h in range(parts.HEADS))
    masses = masses.unflatten(0, (-1, 4)).sum(1)
    scores = staged._scores(view)[sample, 0, row]
    torch.testing.assert_close(scores[2 + kept], masses)
    assert scores.isfinite().sum() == len(kept)
    chosen = frame.best(staged._scores(view), view)[sample, 0, row].nonzero().flatten()
    assert chosen.tolist() == [2 + kept[masses.argmax()]]
    assert not torch.equal(whole.choose(view), staged.choose(view))
    with pytest.raises(ValueError, match="first: must be left out unless score is one of mass"):
        Swap(parts.FRAME, [identity], (16,), first=8)


def test_look_ups_are_found_where_their_groups_are_chosen():
    seen, sample = seen_of(), sample_of()
    # In the first head every query of a question looks where its next token stands.
    places = sample.ids[FOCUS:] + 1
    generator = torch.Generator().manual_seed(1)
    seen.keys[0, 0] *= 0.2
    for offset, place in enumerate(places):
        if int(place) < FOCUS:
            seen.keys[0, 0, place] = torch.randn(HEAD_DIM, generator=generator)
            seen.query[0, 0, FOCUS + offset] = 8 * seen.keys[0, 0, place]
    lookups = Lookups(parse("32x1,32x60,8x60xint4"))
    lookups.add(seen, sample)
    found = lookups.as_dict()
    (layer,) = found["by_layer"]
    assert (layer["layer"], layer["share"], layer["head"]) == (3, 1.0, 0)
    one, many, coarse = found["settings"]
    assert (many["columns"], many["groups"]) == (32, 60)
    assert one["found"] < many["found"] <= 1.0
    assert many["found"] > 0.9
    assert 0 < one["held"] < many["held"] <= 1.0
    assert one["found_by_step"] < many["found_by_step"] <= 1.0
    assert coarse["summary_dtype"] == "int4" and coarse["found"] < many["found"]
    assert layer["found"] == [one["found"], many["found"], coarse["found"]]
    rows = list(lookup_rows([found]))
    assert rows[0].count("32 columns,") == 2 and "8 columns in int4, 60" in rows[0]
    assert rows[-1].startswith("| all 1 | 1.00 |")
    for wrong in ("32", "32x0", "32x9xint3"):
        with pytest.raises(typer.BadParameter, match=f"COLUMNSxGROUPS, .* got '{wrong}'"):
            parse(wrong)


def test_settings_rank_alike_where_more_of_one_is_less_of_the_other():
    assert rank_correlation([1.0, 2.0, 5.0], [10.0, 20.0, 30.0]) == 1.0
    assert rank_correlation([1.0, 2.0, 5.0], [3.0, 2.0, 0.0]) == -1.0
    assert rank_correlation([1.0, 1.0], [3.0, 2.0]) == 0.0
    assert ranks([4.0, 1.0, 4.0]) == [1.5, 0.0, 1.5]
    told = {"tasks": {"asked": {"kl": (0.25, 0.2, 0.3)}}}
    by_mass = "kvswap:rank=16,groups=13,dtype=int4,score=mass"
    methods = {"full": told, by_mass: told, "kvswap:rank=16,groups=13": told}
    assert measured_settings(methods) == {(16, 13, "int4"): 0.25}


def method(difference: float, kl: float, same: float) -> dict[str, Any]:
    around = (difference, difference - 0.02, difference + 0.02)
    asked = {"answers": 50, "exact": (0.6, 0.5, 0.7), "exact_difference": around}
    asked |= {"kept": (0.9, 0.8, 1.0), "kl": (kl, kl, kl), "agree": (same, same, same)}
    tasks = {"asked": asked, "language": asked}
    chosen = {"ranks": [16, 32], "groups_per_step": 26.0, "selected_tokens": 52}
    return {"documents": 3, "tasks": tasks} | chosen


@pytest.mark.parametrize(
    ("name", "given", "told"),
    [
        ("product:memory=1/8", (0.0, 0.02, 0.98), "met"),
        ("product:memory=1/8", (-0.01, 0.03, 0.97), "met"),  # an interval with 0 in it
        ("product:memory=1/8", (-0.03, 0.02, 0.98), "missed: answers"),
        ("product:memory=1/13", (-0.04, 0.5, 0.5), "met"),
        ("product:memory=1/13", (-0.06, 0.0, 1.0), "missed: answers"),
        ("product:config=t.json,memory=1/34", (-0.09, 0.09, 0.5),
         "missed: KL (answers and text)"),
        ("product:memory=1/34", (-1.0, 1.0, 0.0), ""),
        ("product:memory=1/8,score=sum", (-1.0, 1.0, 0.0), ""),
    ],
)  # fmt: skip
def test_a_target_is_met_or_what_is_missed_is_named(name, given, told):
    assert verdict(name, method(*given)) == told


def test_a_line_for_each_budget_and_one_for_what_does_not_fit():
    methods = {
        "full": method(0.0, 0.0, 1.0),
        "product:memory=1/13": method(0.0, 0.0, 1.0),
        "product:memory=1/8": method(-0.1, 0.1, 0.9),
        "kvswap:rank=8": method(0.0, 0.0, 1.0),
    }
    why = "kv_memory_bytes: must be at least 3 (3 B) for max_context 4"
    part = {"methods": methods, "impossible": {"product:config=a/b.json,memory=1/34": why}}
    result = {"model": "smollm2", "lengths": {"4096": part}}
    rows = list(product_rows([result]))
    columns = rows[0].count("|")
    assert all(row.count("|") == columns for row in rows)
    assert rows[2].startswith("| smollm2, 4,096, 3 | all | | 30 of 50 |")
    assert rows[3].startswith(
        "| 4,096, 3 | 1/8, the defaults | 16 to 32, 26 of 2 | 30 of 50 | -0.10"
    )
    assert rows[3].endswith(
        "missed: answers, KL (answers and text), same token (answers and text) |"
    )
    assert rows[4].startswith("| 4,096, 3 | 1/13, the defaults |") and rows[4].endswith("met |")
    assert rows[5].startswith("| 4,096 | 1/34, tuned | does not fit: at least 3 (3 B) |")
    assert len(rows) == 6
    others = list(product_rows([result | {"model": "another"}]))
    assert others[3].endswith("|  |"), "targets are the real model's"


def test_every_table_is_written_from_the_results_that_stand_here():
    for name, table in TABLES.items():
        rows = list(table())
        assert len(rows) > 2 or name == "real-speed", name


def test_stages_name_their_model_once():
    way = {"way": "12 of 32", "traffic": 0.5, "chosen": 0.9, "chosen_worst": 0.8, "held": 0.99}
    ways = [way | {"found": None}, way | {"found": 0.5}, way | {"way": "8 of 32"}]
    result = {"model": "m", "length": 4096, "chosen": 100, "ways": ways}
    rows = list(stage_rows([result]))
    assert rows[2] == "| m, 4,096 tokens, 100 groups | 12 of 32 | 0.50 | 0.90 (0.80) | 0.99 |  |"
    assert len(rows) == 4 and rows[3] == "|  | 12 of 32 | 0.50 | 0.90 (0.80) | 0.99 | 0.50 |"


def test_by_task_answers_have_a_difference_and_continuations_a_loss():
    def methods(difference: float) -> dict[str, Any]:
        told = method(difference, 0.1, 0.9)["tasks"]["asked"]
        told |= {"loss": (1.5, 1.4, 1.6), "loss_difference": (0.02, 0.01, 0.03)}
        return {"documents": 2, "tasks": {"quote": told, "language": told}}

    names = ("full", "product:memory=1/8", "product:memory=1/13")
    part = {"methods": dict(zip(names, map(methods, (0.0, -0.1, -0.3)), strict=True))}
    part |= {"able": {"quote": 0.6}, "left_out": {"turns": 0.4}}
    without = {"methods": {"full": methods(0.0)}, "able": {}, "left_out": {"quote": 0.1}}
    result = {"text": "code", "lengths": {"2048": without, "4096": part}}
    rows = list(task_rows([{"rows": "of another kind"}, result]))
    assert rows[2] == "| code, 2,048, 2 | quote | 0.10 | left out | |"
    assert rows[3] == (
        "| code, 4,096, 2 | quote | 0.60 of 50 | -0.10 (-0.12 to -0.08); KL 0.100, same 0.90 "
        "| -0.30 (-0.32 to -0.28); KL 0.100, same 0.90 |"
    )
    assert rows[4].startswith("|  | language | loss 1.50 | +0.020 (+0.010 to +0.030); KL 0.100")
    assert rows[5] == "|  | turns | 0.40 | left out | |" and len(rows) == 6
    assert {row.count("|") for row in rows} == {6}


def test_what_does_not_fit_is_said_and_conversations_are_told_by_turn():
    told = method(-0.1, 0.1, 0.9)["tasks"]["asked"] | {"by_turn": [0.25, 0.5]}
    methods = {name: {"documents": 2, "tasks": {"turns": told}} for name in ("full", EIGHTH)}
    part = {"methods": methods, "able": {"turns": 0.6}, "left_out": {}}
    refused = {"impossible": {"product:memory=1/13": "kv_memory_bytes: must be at least 3 (3 B)"}}
    row = list(task_rows([{"text": "held-out", "lengths": {"2048": part | refused}}]))[2]
    assert "0.60 of 50 (by turn 0.25, 0.50) | -0.10" in row
    assert row.endswith("(by turn 0.25, 0.50); KL 0.100, same 0.90 | does not fit |")
    left = {"text": "held-out", "lengths": {"2048": part | {"impossible": {}}}}
    assert list(task_rows([left]))[2].endswith("same 0.90 | not run |")


def test_speeds_are_paired_with_the_first():
    told = compare({"a": [0.01, 0.02, 0.03], "b": [0.02, 0.04, 0.06], "c": [0.02, 0.01, 0.03]}, "a")
    assert told["a"] == {"ms": 20.0, "quartiles": [10.0, 30.0], "ratio": 1.0}
    assert told["b"]["ratio"] == 2.0 and told["b"]["ms"] == 40.0
    assert told["c"]["ratio"] == 1.0
    cache = {"ranks": [8, 32], "groups_max": 12, "group_tokens": 4, "bytes_read_per_token": 2048}
    named = {"product:config=t.json,memory=1/8": told["a"] | cache, "full": told["b"]}
    rows = list(speed_rows([{"tokens": 4100, "methods": named}]))
    assert rows[2:] == [
        "| 4,100 | 1/8, tuned | 8 to 32, 12 of 4 | 20.0 (10.0 to 30.0) | 1.00 | 2.00 KiB |",
        "|  | all (`DynamicCache`) | | 40.0 (20.0 to 60.0) | 2.00 | |",
    ]


def test_a_config_without_look_ahead_says_so():
    name = "product:config=build/tuned_8_true.json,memory=1/8"
    assert _label(name) == "1/8, tuned, true query"
    assert _label("product:config=true.json,memory=1/8") == "1/8, tuned"
