"""What a user sees of a cache beside its answers: a progress bar, a log, a table in a notebook."""

import io
import logging
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from rich.progress import Progress

from kvswap_torch.cli.reading import ReadingLines, counted_by_layers, waiting
from kvswap_torch.hf import pieces, prefill_bar
from kvswap_torch.hf.prefill_bar import PrefillBar
from tests.python.tiny_models import TIGHT, greedy, prompt, tiny_model


def test_a_prefill_shows_a_bar_and_a_decoding_step_none(llama: Any, open_cache: Any) -> None:
    cache = open_cache(llama, TIGHT, progress=True)
    shown = io.StringIO()
    queries_max = TIGHT.select_queries_max
    cache._bar = PrefillBar(2, queries_max, Console(file=shown, force_terminal=True, width=80))
    greedy(llama, prompt(1, 30), cache, tokens=1)
    assert "prefill, 30 tokens" in shown.getvalue()
    written = len(shown.getvalue())
    greedy(llama, prompt(1, 32), cache, tokens=1)
    assert len(shown.getvalue()) == written


def test_a_bar_ends_with_a_pass_that_fails() -> None:
    shown = io.StringIO()
    bar = PrefillBar(4, 8, Console(file=shown, force_terminal=True, width=80))
    bar.layer(0, 9)
    bar.layer(1, 9)
    bar.end()
    bar.end()
    assert bar._bar is None and "layer 1 of 4" in shown.getvalue()


def test_a_bar_counts_the_layers_of_all_pieces(monkeypatch, llama: Any, open_cache: Any) -> None:
    monkeypatch.setattr(pieces, "PIECE_TOKENS", 10)
    cache, shown = open_cache(llama, progress=True), io.StringIO()
    console = Console(file=shown, force_terminal=True, width=80)
    bar = cache._bar = PrefillBar(3, 4, console)
    counted = []
    update = Progress.update
    monkeypatch.setattr(
        Progress,
        "update",
        lambda self, task, **told: (counted.append(told["completed"]), update(self, task, **told)),
    )
    greedy(llama, prompt(1, 30), cache, tokens=2)
    assert counted == list(range(9))
    assert bar._bar is None and "layer 8 of 9" in shown.getvalue()


def test_without_a_terminal_there_is_a_line_every_ten_seconds(monkeypatch) -> None:
    now, shown = [0.0], io.StringIO()
    monkeypatch.setattr(prefill_bar.time, "monotonic", lambda: now[0])
    bar = PrefillBar(4, 8, Console(file=shown, force_terminal=False, width=80))
    for layer in range(4):
        bar.layer(layer, 9)
        now[0] += 6
    bar.end()
    assert shown.getvalue() == "prefill, 9 tokens: layer 2 of 4, 12 s so far\n"
    lines, shown = io.StringIO(), [0.0]
    read = ReadingLines(900, Console(file=lines, width=80), lambda: shown[0])
    for _ in range(9):
        shown[0] += 4
        read.advance(50.0)
    said = lines.getvalue().splitlines()
    assert said[0] == "reading the document: 150 of 900 tokens, about 60 s left"
    assert len(said) == 3


def test_reading_advances_layer_by_layer_with_any_cache(llama: Any) -> None:
    advanced: list[float] = []
    with torch.no_grad(), counted_by_layers(llama, advanced.append):
        llama(prompt(1, 30)["input_ids"])
    assert advanced == [10.0] * 3
    with torch.no_grad():
        llama(prompt(1, 30)["input_ids"])
    assert len(advanced) == 3  # the hooks are gone


def test_the_log_says_what_was_chosen_and_estimated(
    llama: Any, open_cache: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="kvswap_torch")
    greedy(llama, prompt(2, 30), open_cache(llama, TIGHT), tokens=2)
    assert "settings: SwapConfig(" in caplog.text
    assert "layer 0: projection (query_aware" in caplog.text


def test_more_tokens_than_the_model_was_made_for_are_warned_of_once(open_cache: Any) -> None:
    model = tiny_model("llama", max_position_embeddings=24)
    cache = open_cache(model, TIGHT)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        greedy(model, prompt(1, 20), cache, tokens=4)
    with pytest.warns(RuntimeWarning, match="the model was made for 24; .* yarn") as told:
        greedy(model, prompt(1, 30), cache, tokens=4)
    assert len(told) == 1
    scaled = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10_000.0}
    model = tiny_model("llama", max_position_embeddings=24, rope_parameters=scaled)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        greedy(model, prompt(1, 30), open_cache(model, TIGHT), tokens=4)


def test_the_log_is_silent_by_default(capsys: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("kvswap_torch")
    assert any(isinstance(handler, logging.NullHandler) for handler in logger.handlers)
    logger.warning("nobody hears this")
    assert capsys.readouterr().err == ""


def test_a_notebook_shows_a_table_with_everything_escaped(llama: Any, open_cache: Any) -> None:
    import dataclasses

    stats = dataclasses.replace(open_cache(llama, TIGHT).stats(), fallbacks="<b>no io_uring")
    table = stats._repr_html_()
    assert table.startswith("<table>") and "hit rate" in table and "&lt;b&gt;no io_uring" in table


def test_what_cannot_say_how_far_it_is_says_that_it_goes_on() -> None:
    """In a pipe, as often as it is asked to, until its body ends; then no more."""
    lines = io.StringIO()
    with waiting("loading the model", Console(file=lines, width=80), every_seconds=0.001):
        while lines.getvalue().count("\n") < 2:
            pass
    told = lines.getvalue()
    assert re.fullmatch(r"(loading the model: 0 s so far\n)+", told)
    assert told == lines.getvalue()


def test_a_document_that_a_preset_reads_with_its_question_is_not_read_in_silence(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is read within generate(), of which the question's tokens are counted too."""
    from typer.testing import CliRunner

    from kvswap_torch.cli import reading as reading_module
    from kvswap_torch.cli.app import app

    monkeypatch.setattr(reading_module, "LINE_SECONDS", 0.0)
    text = tmp_path / "a.txt"
    text.write_text("The colour of the house is blue. " * 12)
    asked = [
        "generate",
        "--model",
        str(tiny_model_dir),
        "--document",
        str(text),
        "--preset",
        "snapkv",
    ]
    done = CliRunner().invoke(app, [*asked, "--question", "What?", "--max-new-tokens", "4"])
    assert done.exit_code == 0, done.output
    assert "reading the document: " in done.output
