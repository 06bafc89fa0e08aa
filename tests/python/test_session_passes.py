"""What a pass is, prefill or decode, is said by who drives a session."""

from __future__ import annotations

import random

import pytest
import torch

from tests.how_long import lives
from tests.python.test_session import HEAD_DIM, KV_HEADS, LAYERS, Twins, native, options


@pytest.mark.parametrize("rows", ["low_rank", "box"])
@pytest.mark.parametrize("extends", [False, True])
def test_a_prefill_is_exact_however_short(tmp_path, rows, extends):
    """Also the piece that a long prompt ends with: nothing is guessed from its length."""
    twins = Twins(options(tmp_path, rows=rows))
    twins.extends = extends
    twins.forward(2, 150)
    for tokens in (1, 3, 1, 4):
        twins.pass_("prefill", 2, tokens)
        twins.forward(2, 1)
    assert twins.sessions[0].counters()["steps"] == 4 * LAYERS


@pytest.mark.parametrize("seed", range(lives(2, 6)))
@pytest.mark.parametrize("heads", ["all", "each"])
def test_random_passes_of_any_length_and_kind(tmp_path, seed, heads):
    rng = random.Random(seed)
    kept = rng.choice([{}, {"keeper": "observed", "keep_tokens": 12, "keep_window": 8}])
    made = options(tmp_path, rows=rng.choice(["low_rank", "box"]), heads=heads, score="max", **kept)
    twins = Twins(made, seed)
    for _ in range(25):
        kind = rng.choice(["prefill", "decode"])
        most = made.select_queries_max if kind == "decode" else rng.choice([3, 60])
        twins.pass_(kind, 2, rng.randint(1, most), look_ahead=rng.random() < 0.8)
        if rng.random() < 0.2:
            positions = twins.sessions[1].positions(0)
            twins.all("crop", rng.randint(max(1, positions - 40), positions))


def test_a_pass_is_one_of_two_and_a_step_is_short(tmp_path):
    session = native(options(tmp_path))
    keys = torch.randn(1, KV_HEADS, 5, HEAD_DIM)
    with pytest.raises(ValueError, match="must be prefill or decode, got question"):
        session.begin_pass("question")
    session.begin_pass("decode")
    with pytest.raises(ValueError, match=r"at most selection.max_step_tokens \(4\) tokens, got 5"):
        session.append(0, keys, keys)
    session.begin_pass("prefill")
    session.append(0, keys, keys)
    session.begin_pass("decode")
    session.reset()
    session.append(0, keys, keys)
    assert session.positions(0) == 5, "what is read after a reset is a prefill"
