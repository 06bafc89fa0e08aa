"""``generate --compare``: both caches' answers, where they part and how likely they are."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from kvswap_torch import SwapConfig
from kvswap_torch.cli.agreement import Agreement, first_difference
from kvswap_torch.cli.conversation import Turn
from kvswap_torch.cli.prompt import PLAIN
from kvswap_torch.cli.report import Result, Run, closing_line, comparison
from kvswap_torch.timeline import Timeline
from tests.python.test_cli import QUESTIONS, document, generate

__all__ = ["document"]  # a fixture


def test_the_cache_on_disk_gives_the_full_caches_answers(
    tiny_model_dir: Path, document: Path, tmp_path: Path
) -> None:
    out, disk = tmp_path / "out.json", tmp_path / "disk"
    disk.mkdir()
    SwapConfig(groups_max=400, pages_max=400).save(tmp_path / "covers.json")
    done = generate(
        tiny_model_dir, document,
        "--compare", "--json", str(out), "--path", str(disk), "--dtype", "float32",
        "--config", str(tmp_path / "covers.json"), "--prefill-chunk", "100",
        "--timeline", str(tmp_path / "trace.json"),
    )  # fmt: skip
    assert done.exit_code == 0
    names = {span.name for span in Timeline.load(tmp_path / "trace.json").spans}
    assert {"model", "attend", "read"} <= names and "ui.perfetto.dev" in done.output
    result = json.loads(out.read_text())
    assert result["answers_equal"] is True
    answers = [turn["answer_ids"] for turn in result["memory"]["turns"]]
    wanted = likelihood(tiny_model_dir, document.read_text(), answers)
    for found, nats in zip(result["agreements"], wanted, strict=True):
        assert found["first_difference"] is None and found["on_disk"] is None
        assert found["log_likelihood_on_disk"] == pytest.approx(nats, abs=1e-3)
        assert found["log_likelihood_in_memory"] == pytest.approx(nats, abs=1e-3)
    assert "no token differs" in done.output
    stats = result["disk"]["stats"]
    assert stats["tokens"] == stats["kv_bytes_full"] // (2 * 2 * 2 * 64 * 4)
    assert stats["bytes_written"] > 0 and stats["reader"]
    assert list(disk.iterdir()) == []


@pytest.mark.parametrize(
    ("ours", "theirs", "place"),
    [([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1], [1, 3], 1), ([], [4], 0), ([], [], None)],
)
def test_the_first_token_that_differs(ours: list[int], theirs: list[int], place: int) -> None:
    assert first_difference(ours, theirs) == place


def test_the_closing_line_says_what_the_cache_tells_and_no_more() -> None:
    told = {"kv_bytes_on_disk": 2 << 20, "missed_mass": 0.0812, "missed_mass_error": 0.013}
    told |= {"missed_mass_excess": 0.02, "wait_seconds": 1.0, "hidden_seconds": 3.0}
    turn = Turn("Q?", "blue", 2, 3, 0.1, 4.0, [5, 6, 7])
    line = closing_line(Run(1000, 2.0, [turn], told))
    assert "prefill 500 tokens/s · answers 4.0 tokens/s · KV on disk 2.00 MiB" in line
    assert "attention missed about 8.1% (± 1.3%)" in line
    assert "above audit.max_missed_mass 2.0% in the worst layer: more memory helps" in line
    assert "of reading waited for 25%" in line
    silent = closing_line(Run(0, 0.5, [turn]))
    assert "opened in 0.50 s, nothing was read" in silent and "missed" not in silent


def test_the_comparison_shows_the_token_that_differs() -> None:
    turn = Turn("Q?", "blue", 2, 1, 0.1, None, [5])
    run = Run(prefill_tokens=9, prefill_seconds=1.0, turns=[turn])
    found = Agreement(0, " blue", None, -3.25, None)
    out = io.StringIO()
    Console(file=out, width=120).print(comparison(Result("m", "d", 9, run, run, [found])))
    for told in ("token 1 differs", "' blue'", "(ended)", "-3.25 nats"):
        assert told in out.getvalue()


def likelihood(model_dir: Path, document: str, answers: list[list[int]]) -> list[float]:
    """Of each turn's answer, without any cache."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    ids, sums = tokenizer(document)["input_ids"], []
    for question, answer in zip(QUESTIONS, answers, strict=True):
        text = PLAIN.split("{document}")[1].replace("{question}", question)
        ids = ids + tokenizer(text)["input_ids"]
        with torch.no_grad():
            scores = model(torch.tensor([ids + answer])).logits[0].log_softmax(-1)
        places = range(len(ids) - 1, len(ids) - 1 + len(answer))
        sums.append(sum(scores[i, token].item() for i, token in zip(places, answer, strict=True)))
        ids = ids + answer
    return sums
