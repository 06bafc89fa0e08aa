"""What the benchmarks of kept tokens tell, by hand and by plain attention."""

from __future__ import annotations

import ast

import pytest
import torch

from bench import kept_recall, kept_turns
from bench.kept_recall import INTERVAL, LOCAL, PAGE, TOKENS, WINDOW, HeadRun, Mix
from tests.python.tiny_models import has_native


def step(seconds: float, turns: int, read: int) -> dict[str, float]:
    """Half of a step with turns goes to them; nothing else is read."""
    turn_seconds = 0.5 * seconds if turns else 0.0
    told = {"seconds": seconds, "turns": turns, "turn_seconds": turn_seconds, "bytes_read": read}
    return told | {"turn_bytes_read": read if turns else 0}


def test_turns_are_told_beside_the_steps_they_fall_in():
    told = kept_turns.told([step(0.002, 0, 100), step(0.010, 2, 900), step(0.002, 0, 200)])
    assert (told["steps"], told["ms"], told["ms_longest"]) == (3, 2.0, 10.0)
    assert (told["turns"], told["turns_of_a_step"], told["turn_ms"]) == (2, 2, 2.5)
    assert told["share_of_time"] == round(0.005 / 0.014, 5)
    assert (told["bytes_read"], told["bytes_read_longest"]) == (400, 900)
    assert told["turn_bytes_read"] == 900


def test_steps_without_turns_are_told_too():
    told = kept_turns.told([step(0.002, 0, 100)] * 2)
    assert (told["turns"], told["turn_ms"], told["share_of_time"]) == (0, 0.0, 0.0)


@pytest.mark.skipif(not has_native(), reason="kvswap_torch._C is not built")
def test_turns_are_counted_from_the_second_step_on(tmp_path, capsys):
    kept_turns.main("tiny", 2, 4096, 1, "prkv,snapkv+", 130, 1, tmp_path, "")
    lines = dict(line.split(" ", 1) for line in capsys.readouterr().out.splitlines())
    for name in ("prkv", "snapkv+"):
        told = ast.literal_eval(lines[name])
        assert told["steps"] == 130
        assert told["turns"] == 2 * 2, "one of each layer and KV head in 128 tokens"


def sealed_of(columns: int) -> int:
    return max(0, columns - LOCAL) // PAGE * PAGE


def head_run(prompt: int, decoded: int, heads: int = 2) -> HeadRun:
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(prompt + decoded, 8, generator=generator)
    return HeadRun(keys, torch.randn(heads, WINDOW + decoded, 8, generator=generator), 0.3)


def test_weights_are_causal_attention():
    run = head_run(256, 2 * INTERVAL)
    weights = run.weights(300, 5)
    for query in range(5):
        scores = run.query[:, 300 - 256 + WINDOW + query] @ run.keys[: 301 + query].T * 0.3
        expected = torch.nn.functional.pad(scores.softmax(-1), (0, 4 - query))
        torch.testing.assert_close(weights[:, query], expected)


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_a_step_attends_the_newest_what_stays_and_the_best_pages(share):
    mix = Mix(4 * PAGE, share)
    paid = torch.zeros(8 * PAGE)
    paid[PAGE : 3 * PAGE] = torch.arange(2.0 * PAGE, 0, -1)  # two whole pages
    paid[200] = 100
    mix.choose_kept(paid)
    kept = {200, *range(PAGE, 3 * PAGE)} if share else set()
    kept = {0.0: set(), 0.5: {200, *range(PAGE, 3 * PAGE - 1)}}.get(share, kept)
    assert set(mix.kept.tolist()) == kept
    bounds = torch.tensor([[8.0, 9, 7, 1, 2, 3, 4, 5]])
    columns = 9 * PAGE + LOCAL
    mask = mix.attended(bounds, torch.tensor([7 * PAGE]), columns)[0]
    # Page 1 stays whole where half stays; the last is not sealed yet.
    best = {0.0: [1, 0, 2, 6], 0.5: [0, 2], 1.0: []}[share]
    pages = {page * PAGE + token for page in best for token in range(PAGE)}
    assert set(mask.nonzero().flatten().tolist()) == pages | kept | set(range(7 * PAGE, columns))


def test_shares_of_attention_are_held_as_plain_sums_say():
    """Of S = 0 in the first interval: the newest tokens and the pages with the largest bounds."""
    prompt, decoded = 512, 2 * INTERVAL
    run = head_run(prompt, decoded)
    mixes = [Mix(2 * PAGE, 0.0), Mix(prompt + decoded, 0.0), Mix(prompt + decoded, 1.0)]
    run.start(mixes)
    run.follow(mixes, is_exact=True)
    held = 0.0
    for at in range(prompt, prompt + INTERVAL):
        weights = run.weights(at, 1)[:, 0]
        query = run.query[:, at - prompt + WINDOW]
        sealed = sealed_of(at)
        of_pages = run.keys[:sealed].unflatten(0, (-1, PAGE))
        bounds = torch.stack(
            [torch.maximum(q * of_pages.amin(1), q * of_pages.amax(1)).sum(-1) for q in query]
        ).sum(0)
        best = bounds.topk(2).indices
        held += weights[:, sealed:].sum().item()
        held += weights[:, :sealed].unflatten(1, (-1, PAGE))[:, best].sum().item()
    assert mixes[0].held[0] == pytest.approx(held / INTERVAL / 2, rel=1e-5)
    assert mixes[1].held == pytest.approx([1.0, 1.0]), "all pages"
    assert mixes[2].held[-1] > 0.9, "all tokens but those since the last choice"


def test_by_the_prompt_all_heads_of_a_layer_keep_as_many_and_at_most_three_quarters():
    runs = [head_run(512, 2 * INTERVAL), head_run(512, 2 * INTERVAL)]
    of_heads = kept_recall.mixes_of(runs)
    for first, second in zip(*of_heads, strict=True):
        assert (first.tokens, first.share) == (second.tokens, second.share)
        assert 0 <= first.share <= (1 if first.share in kept_recall.SHARES else 0.75)
    alike = run_with_one_query()
    for tokens, mix in zip(TOKENS, kept_recall.mixes_of([alike])[0][5::6], strict=True):
        agreed = min(tokens, 512 - WINDOW)  # its first query is its last
        assert mix.share * tokens == min(agreed // PAGE, tokens * 3 // 4 // PAGE) * PAGE


def run_with_one_query() -> HeadRun:
    run = head_run(512, 2 * INTERVAL)
    run.query[:] = run.query[:, :1]
    return run


def test_a_line_for_each_number_of_tokens():
    rows = [
        {"tokens": tokens, "share": share, "kept": 0.4, "first": 0.8, "last": 0.75}
        for tokens in TOKENS
        for share in kept_recall.SHARES
    ]
    told = kept_recall.lines({"rows": rows})
    assert [line[0] for line in told] == ["256", "512", "1,024", "2,048"]
    assert all(len(line) == len(kept_recall.COLUMNS) for line in told)
    assert told[0][1] == "0.800, 0.750" and told[0][-1] == "0.800, 0.750 (*S* 0.40)"
