"""Which heads find what is asked for, and what layers lose: by their rules, from a model's text."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache
from typer.testing import CliRunner

from bench.quality.heads import stored_heads
from kvswap_torch import ConfigError, KVSwapCache, SwapConfig
from kvswap_torch.cli.app import app
from kvswap_torch.cli.load import load_model, load_tokenizer
from kvswap_torch.heads_file import HEADS, read_heads
from kvswap_torch.hf.families import model_parts
from kvswap_torch.tuning import searches
from kvswap_torch.tuning.heads import (
    KEPT,
    SMALL,
    WINDOW,
    answered_of,
    counts_of,
    fact_masses,
    find_heads,
    lost,
)
from kvswap_torch.tuning.observe import Calibrator, Observed
from kvswap_torch.tuning.searches import Search, SearchSample, search_samples
from tests.python.tiny_models import greedy, has_native, prompt, tiny_model

pytestmark = [
    pytest.mark.skipif(not has_native(), reason="kvswap_torch._C is not built"),
    pytest.mark.usefixtures("one_thread"),
]
REFERENCE = Path(__file__).resolve().parents[2] / "examples" / "reference_model"
SAMPLE = SearchSample(
    prompt(1, 80, seed=4)["input_ids"][0], 60, (Search(10, 16, 65, 67), Search(30, 33, 70, 73))
)


@pytest.fixture(scope="module")
def reference():
    return load_model(str(REFERENCE)), load_tokenizer(str(REFERENCE))


def test_facts_and_answers_stand_where_they_are_said_to(reference) -> None:
    _, tokenizer = reference
    samples = search_samples(tokenizer, lengths=(1000, 1500), count=4)
    assert [len(each.searches) for each in samples] == [searches.FACTS] * 4
    told = set()
    for sample, most in zip(samples, (1000, 1500, 1000, 1500), strict=True):
        assert 0.7 * most < len(sample.ids) <= most
        for search in sample.searches:
            fact = tokenizer.decode(sample.ids[search.fact_begin : search.fact_end])
            answer = tokenizer.decode(sample.ids[search.answer_begin : search.answer_end])
            assert fact.endswith("\n") and answer.strip() in fact
            assert search.fact_end <= sample.focus < search.answer_begin
            told.add(fact)
    assert len(told) == 4 * searches.FACTS
    again = search_samples(tokenizer, lengths=(1000, 1500), count=4)
    assert all(torch.equal(a.ids, b.ids) for a, b in zip(samples, again, strict=True))
    with pytest.raises(ConfigError, match=r"must have at least 128 tokens in a sample of 300, got"):
        search_samples(tokenizer, lengths=(300,), count=1)


def test_an_answer_counts_where_more_than_half_of_it_is_said() -> None:
    ids = torch.arange(80)
    ids[65:67], ids[70:73] = torch.tensor([12, 12]), torch.tensor([30, 31, 99])
    ids[11] = 12  # the first answer's token stands in its fact twice
    sample = dataclasses.replace(SAMPLE, ids=ids)
    one_of_two_and_two_of_three = torch.tensor([12, 5, 30, 31, 4])
    assert answered_of(sample, one_of_two_and_two_of_three).searches == (SAMPLE.searches[1],)
    assert counts_of(sample, one_of_two_and_two_of_three, SAMPLE.searches[1:]).tolist() == [
        0,
        0,
        1,
        1,
        0,
    ]
    all_of_it = torch.tensor([12, 12, 30, 31, 99])
    assert answered_of(sample, all_of_it).searches == SAMPLE.searches
    assert counts_of(sample, all_of_it, SAMPLE.searches).tolist() == [2, 2, 1, 1, 0]


def test_masses_and_losses_are_those_of_plain_attention() -> None:
    model = tiny_model("llama")
    model.set_attn_implementation("eager")
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        weights = model(SAMPLE.ids[None], past_key_values=cache, output_attentions=True).attentions
    seen: list[Observed] = []
    Calibrator(model).read(SAMPLE, seen.append)
    heads = torch.tensor([0, 2, 3])
    for layer, each in enumerate(seen):
        paid = weights[layer][0]  # [heads, tokens, tokens]
        rows = [(64, 10, 16), (65, 10, 16), (69, 30, 33), (70, 30, 33), (71, 30, 33)]
        expected = torch.stack([paid[:, row, begin:end].sum(-1) for row, begin, end in rows], 1)
        torch.testing.assert_close(fact_masses(each, SAMPLE), expected)

        search = SAMPLE.searches[1]
        values = cache.layers[layer].values[0].repeat_interleave(2, 0)
        begin = search.answer_begin - WINDOW
        score = paid[heads, begin : search.answer_begin, :begin].sum((0, 1))
        padded = torch.cat([torch.zeros(2), score, torch.zeros(2)])
        pooled = torch.stack([padded[at : at + 5].mean() for at in range(begin)])
        kept = pooled.topk(KEPT).indices
        total = 0.0
        for row in range(search.answer_begin, search.answer_end):
            few = paid[:, row].clone()
            few[:, [at for at in range(begin) if at not in kept.tolist()]] = 0
            out = torch.stack([(few[h] / few[h].sum()) @ values[h] for h in range(4)])
            full = torch.stack([paid[h, row] @ values[h] for h in range(4)])
            total += float((out - full).norm() / (full.norm() + SMALL))
        assert lost(each, search, heads) == pytest.approx(total, rel=1e-4)


def test_a_model_that_answers_nothing_is_told_so() -> None:
    with pytest.raises(ConfigError, match="some of 2 questions .* and answers none"):
        find_heads(tiny_model("llama"), [SAMPLE])
    with pytest.raises(ConfigError, match="samples must be at least one, got 0"):
        find_heads(tiny_model("llama"), [])


def test_the_command_finds_heads_that_a_cache_keeps_by(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(searches, "LENGTHS", (1000,))
    monkeypatch.setattr(searches, "COUNT", 1)
    out = tmp_path / "found.json"
    words = ["calibrate", "--model", str(REFERENCE), "--preset", "compresskv", "--out", str(out)]
    told = CliRunner().invoke(app, [*words, "--path", str(tmp_path), "--json"])
    assert told.exit_code == 0, told.output
    files = json.loads(told.stdout)
    assert files["config"] == str(out) and files["projections"] is None
    found = json.loads(Path(files["heads"]).read_text())
    assert found["asked"] == searches.FACTS and 0 < found["answered"] <= searches.FACTS
    assert sum(found["layers"]) == pytest.approx(1) and min(found["layers"]) > 0
    assert all(sorted(heads) == list(range(8)) for heads in found["heads"])
    config = SwapConfig.load(out)
    assert config.keep_layer_shares == tuple(found["layers"])
    assert config.keep_heads == read_heads(files["heads"])["retention.scoring_heads"]
    assert len(config.keep_heads) == HEADS * len(found["heads"])

    model = load_model(str(REFERENCE))
    with KVSwapCache(model, config=dataclasses.replace(config, keep_tokens=40)) as cache:
        greedy(model, prompt(1, 300), cache, tokens=2)
        assert cache.stats().tokens_dropped > 0
    identity = model_parts(model).identity
    assert stored_heads(identity, tmp_path)["retention.scoring_heads"] == config.keep_heads
    with pytest.raises(ConfigError, match="must have a heads file of this model; `kvswap calibrat"):
        stored_heads(dataclasses.replace(identity, layers=7), tmp_path)
