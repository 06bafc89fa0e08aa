"""What an earlier run of the tuner measured, and for whom it still holds."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from kvswap_torch import SwapConfig
from kvswap_torch.tuning import timing
from kvswap_torch.tuning.api import _lengths, _text_key
from kvswap_torch.tuning.timing import TimingPlan


def plan_of(context: int) -> TimingPlan:
    return TimingPlan(2, context, 64, (8, 16), (1, 8), 16)


def timed_again(known: TimingPlan, wanted: TimingPlan, monkeypatch: pytest.MonkeyPatch) -> list:
    """Places that are measured for a plan, where all of another plan are known."""
    asked = []
    monkeypatch.setattr(timing, "measure_session", lambda *args: asked.append(args[2]) or [])
    timings = [SimpleNamespace(place=place) for place in known.places()]
    list(timing.measure(None, Path(), wanted, SwapConfig(), None, timings))
    return asked


def test_steps_are_timed_anew_for_a_longer_context_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    short, long = plan_of(1024), plan_of(16384)
    assert timed_again(short, short, monkeypatch) == []
    assert timed_again(long, short, monkeypatch) == []
    assert timed_again(short, long, monkeypatch) == long.places()


def test_texts_are_told_apart_by_tokenizer_file_and_length(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    keys = [
        _text_key(*asked)
        for asked in [
            (None, None, None, _lengths(1024)),
            (None, None, None, _lengths(6000)),
            ("b", None, None, _lengths(1024)),
            ("b", [tmp_path / "a.txt"], None, _lengths(1024)),
        ]
    ]
    assert len(set(keys)) == len(keys)
    assert _lengths(8192) == _lengths(131072) == (4096, 8192)
    assert _text_key("b", None, None, _lengths(8192)) == _text_key(
        SimpleNamespace(name_or_path="b"), None, None, _lengths(9000)
    )
