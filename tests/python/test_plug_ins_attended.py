"""`TokenScores.attended`: who says which tokens stay sees what each step attended."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from examples.plug_ins import LazyEviction
from kvswap_torch import KVSwapCache
from kvswap_torch.errors import BudgetError
from kvswap_torch.hf.token_notes import TokenNotes
from kvswap_torch.plug_ins import CacheShape, TokenScores, Worth
from tests.python.tiny_models import (
    SMALL,
    has_native,
    retaining_by_worth,
    tiny_model,
    tokens_of,
)

pytestmark = [
    pytest.mark.skipif(not has_native(), reason="kvswap_torch._C is not built"),
    pytest.mark.usefixtures("one_thread"),
]
TAIL, SINKS, GROUP = SMALL["tail_tokens"], SMALL["sink_tokens"], SMALL["group_tokens"]


class Seeing(TokenScores):
    """Later tokens are worth more; records what it sees, and notes the sum that each received."""

    notes = 2

    def __init__(self) -> None:
        self.seen: list[tuple[int, torch.Tensor]] = []
        self.noted: dict[int, torch.Tensor] = {}

    def worth(self, layer, query, keys, values):
        batch, heads, tokens, _ = keys.shape
        size = (batch, heads, tokens) if self.shape.heads_apart else (batch, tokens)
        return Worth(torch.zeros(size))

    def attended(self, layer, weights, notes):
        self.seen.append((layer, weights.clone()))
        notes[..., 0] += weights
        notes[..., 1] += 1
        self.noted[layer] = notes.clone()
        sums = notes[..., 0]
        return Worth(sums if self.shape.heads_apart else sums.mean(1))


class Eager:
    """The same model over a `DynamicCache`, with the attention that it pays."""

    def __init__(self, ids: torch.Tensor, **changes: Any):
        self._model = tiny_model("llama", **changes)
        self._model.set_attn_implementation("eager")
        self._cache = DynamicCache(config=self._model.config)
        self.step(ids)

    @torch.no_grad()
    def step(self, ids: torch.Tensor, **mask: torch.Tensor) -> tuple[torch.Tensor, list]:
        """Logits, and by layer the mean over the step and query heads: ``[batch, 2, tokens]``."""
        out = self._model(ids, past_key_values=self._cache, output_attentions=True, **mask)
        return out.logits, [each.unflatten(1, (2, 2)).mean((2, 3)) for each in out.attentions]


@pytest.mark.parametrize("heads", ["all", "each"])
def test_the_weights_are_those_of_eager_attention(heads: str, tmp_path: Path) -> None:
    model, plug_in = tiny_model("llama"), Seeing()
    config = retaining_by_worth(heads=heads, keep_tokens=400, keep_interval=1)
    full = Eager(tokens_of(2, 40))
    with KVSwapCache(model, tmp_path, config, token_scores=plug_in) as cache, torch.no_grad():
        model(tokens_of(2, 40), past_key_values=cache)
        assert plug_in.seen == [], "a prompt is no step"
        for seed, length in enumerate((1, 1, 3, 1, 2, 1, 1, 1)):
            new = tokens_of(2, length, seed)
            logits, weights = full.step(new)
            told = model(new, past_key_values=cache).logits
            torch.testing.assert_close(told, logits, rtol=2e-5, atol=2e-5)
            assert [layer for layer, _ in plug_in.seen] == [0, 1, 2]
            for (_, seen), expected in zip(plug_in.seen, weights, strict=True):
                torch.testing.assert_close(seen, expected, rtol=1e-4, atol=1e-6)
            plug_in.seen.clear()
        assert cache.stats().tokens_kept > 20


def test_padding_and_what_was_evicted_received_nothing(tmp_path: Path) -> None:
    model, plug_in = tiny_model("llama"), Seeing()
    mask = torch.ones(2, 60, dtype=torch.long)
    mask[1, :7] = 0
    config = retaining_by_worth(keep_tokens=6, keep_interval=4)
    with KVSwapCache(model, tmp_path, config, token_scores=plug_in) as cache, torch.no_grad():
        model(tokens_of(2, 60), past_key_values=cache, attention_mask=mask)
        model(
            tokens_of(2, 1),
            past_key_values=cache,
            attention_mask=torch.cat([mask, mask[:, -1:]], 1),
        )
    for _, weights in plug_in.seen:
        assert weights.shape == (2, 2, 61)
        torch.testing.assert_close(weights.sum(-1), torch.ones(2, 2))
        assert (weights[1, :, :7] == 0).all(), "padding"
        received = (weights > 0).sum(-1)
        # Sinks are the first group of valid tokens; the tail begins with a whole group.
        assert (received <= SINKS + 6 + TAIL + GROUP).all()


@pytest.mark.parametrize("heads", ["all", "each"])
@pytest.mark.parametrize("rows", ["none", "box"])
def test_who_keeps_everything_has_dynamic_caches_tokens(
    rows: str, heads: str, tmp_path: Path
) -> None:
    model = tiny_model("qwen3")
    prompt = torch.cat([tokens_of(2, 12)] * 4, 1)
    options = {"max_new_tokens": 20, "do_sample": False}
    expected = model.generate(prompt, **options)
    kept = {"keep_tokens": 400, "keep_interval": 1, "tail_tokens": 8}
    config = retaining_by_worth(rows=rows, heads=heads, **kept)
    with KVSwapCache(model, tmp_path, config, token_scores=LazyEviction()) as cache:
        told = model.generate(prompt, past_key_values=cache, **options)
        assert cache.stats().tokens_kept > 40
    assert torch.equal(told, expected)


class Rule:
    """LazyEviction's rule of one KV head, from the history of its weights alone."""

    def __init__(self, alpha: float):
        self._alpha = alpha
        self._steps: list[tuple[int, list[float]]] = []  # (now, weights)

    def add(self, weights: torch.Tensor) -> None:
        self._steps.append((len(weights), weights.tolist()))

    def importance(self, token: int) -> float:
        now = self._steps[-1][0]
        seen = [(then, weights[token]) for then, weights in self._steps if token < len(weights)]
        times = [seen[0][0]] + [then for then, weight in seen[1:] if weight >= self._alpha]
        longest = max((b - a for a, b in itertools.pairwise(times)), default=0)
        if longest == 0:
            return 1.0 if now == times[-1] else 0.0
        sigmoid = torch.tensor([-(now - times[-1]) / longest, 1.0 - longest]).double().sigmoid()
        return float(2 * sigmoid.sum())


def test_who_stays_is_lazy_evictions_choice(tmp_path: Path) -> None:
    """Of one layer, whose keys do not depend on what was attended: by masks of a full cache."""
    kept, interval, alpha, length = 8, 5, 0.03, 60
    model, full = (
        tiny_model("llama", num_hidden_layers=1),
        Eager(tokens_of(1, length), num_hidden_layers=1),
    )

    class Recorded(LazyEviction):
        def attended(self, layer, weights, notes):
            received.append(weights[0].clone())
            return super().attended(layer, weights, notes)

    received: list[torch.Tensor] = []
    rules, refreshed, sets = [Rule(alpha), Rule(alpha)], [], []
    config = retaining_by_worth(keep_tokens=kept, keep_interval=interval)
    plug_in = Recorded(alpha)
    with KVSwapCache(model, tmp_path, config, token_scores=plug_in) as cache, torch.no_grad():
        model(tokens_of(1, length), past_key_values=cache)
        for step in range(32):
            held = length + step
            new = tokens_of(1, 1, step)
            told = model(new, past_key_values=cache).logits
            sealed = (held - TAIL) // GROUP * GROUP
            among = range(SINKS, sealed)
            if step == 0:  # chosen by the prompt's own queries
                stay = [i for i in among if received[0][:, i].any()]
                assert len(stay) == kept
            elif step % interval == 0:
                worth = {i: sum(rule.importance(i) for rule in rules) / 2 for i in among}
                # What has left is no less on disk: it may come back.
                stay = sorted(among, key=lambda i: (-worth[i], i))[:kept]
                refreshed.append(stay)
            attended = [*range(SINKS), *sorted(stay), *range(sealed, held + 1)]
            sets.append(sorted(stay))
            assert received[-1].any(0).nonzero().flatten().tolist() == attended
            mask = torch.full((1, 1, 1, held + 1), -torch.inf)
            mask[..., attended] = 0
            logits, weights = full.step(new, attention_mask=mask)
            torch.testing.assert_close(told, logits, rtol=2e-5, atol=2e-5)
            torch.testing.assert_close(received[-1], weights[0][0], rtol=1e-4, atol=1e-6)
            for rule, each in zip(rules, weights[0][0], strict=True):
                rule.add(each)
    assert len(refreshed) == 6 and len({tuple(each) for each in sets}) > 3


def test_a_second_prompt_is_worth_more_than_what_has_paused() -> None:
    plug_in = LazyEviction(0.01)
    plug_in.open(CacheShape(1, (), 4, 2, 16, 4, False, torch.float32, torch.device("cpu")))
    keys = torch.randn(1, 2, 40, 16, generator=torch.Generator().manual_seed(0))
    new = plug_in.worth(0, keys.repeat_interleave(2, 1), keys, keys).now
    # Last activated ten steps ago, and five apart before.
    notes = torch.tensor([30.0, 5.0]).expand(1, 2, 40, 2).clone()
    paused = plug_in.attended(0, torch.zeros(1, 2, 40), notes).now
    assert paused.min() > 0.2 and paused.max() < 1 <= new.min()


def test_a_summary_is_estimated_once_a_part_is_attended(tmp_path: Path) -> None:
    """A short prompt, all of which is attended, and a long answer, of which a part is."""
    model, plug_in = tiny_model("llama"), Seeing()
    config = retaining_by_worth(rows="low_rank", rank=8, keep_tokens=6, keep_interval=4)
    with KVSwapCache(model, tmp_path, config, token_scores=plug_in) as cache, torch.no_grad():
        model(tokens_of(1, 8), past_key_values=cache)
        for seed in range(60):
            model(tokens_of(1, 1, seed), past_key_values=cache)
    weights = plug_in.seen[-1][1]
    assert weights.shape[-1] == 68 and not weights[0].any(0).all()


def test_what_is_gone_without_a_path_does_not_come_back() -> None:
    model, plug_in, gone = tiny_model("llama"), Seeing(), [set(), set(), set()]
    config = retaining_by_worth(keep_tokens=6, keep_interval=3, select_queries_max=1)
    with KVSwapCache(model, None, config, token_scores=plug_in) as cache, torch.no_grad():
        model(tokens_of(1, 60), past_key_values=cache)
        for seed in range(24):
            model(tokens_of(1, 1, seed), past_key_values=cache)
    for layer, weights in plug_in.seen:
        torch.testing.assert_close(weights.sum(-1), torch.ones(1, 2))
        received = set(weights[0].any(0).nonzero().flatten().tolist())
        assert not received & gone[layer]
        # Those that had their chance at the newest refresh.
        had = 60 + (weights.shape[-1] - 61) // 3 * 3
        gone[layer] |= set(range(had - TAIL - GROUP)) - received
    assert all(len(each) > 40 for each in gone)


def test_dense_layers_are_not_asked(tmp_path: Path) -> None:
    model, plug_in = tiny_model("llama"), Seeing()
    config = retaining_by_worth(keep_tokens=6, exact_layers=(1,))
    with KVSwapCache(model, tmp_path, config, token_scores=plug_in) as cache, torch.no_grad():
        model(tokens_of(1, 60), past_key_values=cache)
        model(tokens_of(1, 1), past_key_values=cache)
    assert [layer for layer, _ in plug_in.seen] == [0, 2]


# What happens to the text happens to notes and worth.


def live(cache: KVSwapCache, model: Any, plug_in: Any, seeds: range) -> list[torch.Tensor]:
    batch = cache.layers[0].driver.session.batch()
    told = [model(tokens_of(batch, 1, seed), past_key_values=cache).logits for seed in seeds]
    return [*told, *(plug_in.noted[layer] for layer in sorted(plug_in.noted))]


def test_a_step_that_is_cropped_has_noted_nothing(tmp_path: Path) -> None:
    model, told = tiny_model("llama"), []
    config = retaining_by_worth(keep_tokens=6, keep_interval=3)
    for is_cropped in (False, True):
        plug_in = Seeing()
        with KVSwapCache(model, tmp_path, config, token_scores=plug_in) as cache, torch.no_grad():
            model(tokens_of(2, 60), past_key_values=cache)
            live(cache, model, plug_in, range(4))
            if is_cropped:
                model(tokens_of(2, 1, 90), past_key_values=cache)
                cache.crop(-1)
            told.append(live(cache, model, plug_in, range(4, 6)))
    noted = [each[-3:] for each in told]  # of three layers
    torch.testing.assert_close(noted[0], noted[1], rtol=0, atol=0)
    assert noted[0][-1][..., 1].max() == 6, "steps"


def test_reorder_repeat_and_reset(tmp_path: Path) -> None:
    model, told = tiny_model("llama"), []
    config = retaining_by_worth(keep_tokens=6, keep_interval=3)
    for is_turned in (False, True):
        plug_in = Seeing()
        with KVSwapCache(model, tmp_path, config, token_scores=plug_in) as cache, torch.no_grad():
            if is_turned:  # another text before it
                model(tokens_of(3, 30, 8), past_key_values=cache)
                live(cache, model, plug_in, range(3))
                cache.reset()
            ids = tokens_of(2, 60)
            model(ids.flip(0) if is_turned else ids, past_key_values=cache)
            for seed in range(4):
                new = tokens_of(2, 1, seed)
                model(new.flip(0) if is_turned else new, past_key_values=cache)
            if is_turned:
                cache.reorder_cache(torch.tensor([1, 0]))
            cache.batch_repeat_interleave(2)
            told.append(live(cache, model, plug_in, range(4, 9)))
    for one, other in zip(*told, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_notes_follow_the_text() -> None:
    notes = TokenNotes(1)
    for began, tokens in ((5, 6), (6, 8)):
        step = notes.copy(0, 2, 1, tokens)
        step += tokens
        notes.keep(0, step, began)
    assert notes.copy(0, 2, 1, 9)[0, 0, :, 0].tolist() == [14] * 6 + [8, 8, 0]
    notes.crop(7)  # within the newest step
    assert notes.copy(0, 2, 1, 8)[0, 0, :, 0].tolist() == [14] * 6 + [8, 0]
    notes.crop(6)  # all of it
    assert notes.copy(0, 2, 1, 6)[0, 0, :, 0].tolist() == [6] * 6
    notes.crop(4)
    notes.select_sequences([1, 1, 0])
    assert notes.copy(0, 3, 1, 5)[2, 0, :, 0].tolist() == [6] * 4 + [0]
    notes.reset()
    assert not notes.copy(0, 2, 1, 6).any()
    notes.keep(0, notes.copy(0, 2, 1, 6) + 1, 5)
    notes.crop(5)
    assert not notes.copy(0, 2, 1, 6).any(), "before the first step there was nothing"


class Failing(Seeing):
    """`answer`, in layer 1, in the place of what it would say."""

    answer: Any = None

    def attended(self, layer, weights, notes):
        right = super().attended(layer, weights, notes)
        return self.answer(right, notes) if self.answer and layer == 1 else right


def raising(right: Worth, notes: torch.Tensor) -> Worth:
    raise ZeroDivisionError("of my own")


@pytest.mark.parametrize(
    ("answer", "error", "message"),
    [
        (raising, ZeroDivisionError, "of my own"),
        (
            lambda right, notes: right.now[:, 1:],
            ValueError,
            r"token_scores: Failing must say what tokens of layer 1 are worth by a Worth whose now "
            r"is a tensor \[2, 65\] of floating numbers, got \[2, 64\]",
        ),
        (lambda right, notes: 3, ValueError, "of floating numbers, got 3"),
        (lambda right, notes: Worth(right.now, right.now[0]), ValueError, "whose decay is"),
        (
            lambda right, notes: Worth(right.now * torch.nan),
            ValueError,
            "layer 1 must be told numbers, got NaN",
        ),
        (
            lambda right, notes: notes.resize_(1, 2, 3, 4) is None,
            ValueError,
            r"must write its notes of layer 1 in place, \[2, 2, 65, 2\], got \[1, 2, 3, 4\]",
        ),
    ],
)
def test_one_that_raises_or_is_wrong_ends_the_pass_and_counts_once(
    answer, error, message, tmp_path: Path
) -> None:
    model, told = tiny_model("llama"), []
    config = retaining_by_worth(keep_tokens=6, keep_interval=3)
    for fails in (False, True):
        plug_in = Failing()
        with KVSwapCache(model, tmp_path, config, token_scores=plug_in) as cache, torch.no_grad():
            model(tokens_of(2, 60), past_key_values=cache)
            live(cache, model, plug_in, range(4))
            if fails:
                plug_in.answer = answer
                for _ in range(2):
                    with pytest.raises(error, match=message) as raised:
                        model(tokens_of(2, 1, 4), past_key_values=cache)
                if answer is raising:
                    notes = ["KVSwapCache: raised by token_scores, in attended in layer 1"]
                    assert raised.value.__notes__ == notes
                assert cache.get_seq_length() == 64
                plug_in.answer = None
            told.append(live(cache, model, plug_in, range(4, 12)))
    torch.testing.assert_close(*told, rtol=0, atol=0)


def test_a_worth_of_all_decays_from_where_it_was_said(tmp_path: Path) -> None:
    """30 is worth more than 50 when it is said, and less after ten more tokens."""

    class Decaying(Seeing):
        said = 0

        def attended(self, layer, weights, notes):
            super().attended(layer, weights, notes)
            tokens = weights.shape[-1]
            if tokens != 81 + self.said:
                return None
            now, decay = torch.zeros(1, tokens), torch.zeros(1, tokens)
            now[0, 30], now[0, 50], decay[0, 30] = 9.0, 5.0, 0.5
            return Worth(now, decay)

    model = tiny_model("llama")
    config = retaining_by_worth(keep_tokens=1, keep_interval=12)
    for said, stays in ((2, 50), (8, 30)):
        plug_in = Decaying()
        plug_in.said = said
        with KVSwapCache(model, tmp_path, config, token_scores=plug_in) as cache, torch.no_grad():
            model(tokens_of(1, 80), past_key_values=cache)
            for seed in range(13):
                model(tokens_of(1, 1, seed), past_key_values=cache)
        weights = plug_in.seen[-1][1][0].sum(0)
        assert (weights[stays] > 0) and weights[{50: 30, 30: 50}[stays]] == 0


def test_a_budget_counts_notes(tmp_path: Path) -> None:
    model, sizes = tiny_model("llama"), {"max_context": 128, "max_batch": 1}
    config = retaining_by_worth(keep_tokens=6)
    opened = {"kv_memory_bytes": "2MiB", **sizes, "token_scores": Seeing()}
    with KVSwapCache(model, tmp_path, config, **opened) as cache, torch.no_grad():
        model(tokens_of(1, 60), past_key_values=cache)
        model(tokens_of(1, 1), past_key_values=cache)
        # Two numbers of fp32, twice for 3 layers, of a step once more; and its weights.
        assert cache.stats().ledger["plug_in"] == 4 * 2 * 61 * (2 * 2 * 3 + 2 + 1)
    with (
        KVSwapCache(model, tmp_path, config, kv_memory_bytes="2MiB", token_scores=Seeing()) as (
            cache
        ),
        torch.no_grad(),
    ):
        model(tokens_of(1, 60), past_key_values=cache)
        with pytest.raises(BudgetError, match="token_scores: Seeing must note within the"):
            model(tokens_of(1, 2000, 3), past_key_values=cache)

    class Many(Seeing):
        notes = -1

    with pytest.raises(ValueError, match="notes of Many must be an int of at least 0, got -1"):
        KVSwapCache(model, tmp_path, config, token_scores=Many())


def test_who_sees_nothing_pays_nothing(tmp_path: Path) -> None:
    class Blind(Seeing):
        attended = TokenScores.attended

    model, ledgers = tiny_model("llama"), []
    config = retaining_by_worth(keep_tokens=6, keep_interval=3)
    for plug_in in (Blind(), Seeing()):
        with KVSwapCache(model, tmp_path, config, token_scores=plug_in) as cache, torch.no_grad():
            model(tokens_of(1, 60), past_key_values=cache)
            model(tokens_of(1, 1), past_key_values=cache)
            ledgers.append(dict(cache.stats().ledger))
            assert bool(plug_in.seen) == (type(plug_in) is Seeing)
            for call in (lambda: cache.save(tmp_path / "kept"), cache.fork):
                with pytest.raises(ValueError, match="must not be 'user', since what scores"):
                    call()
    assert "plug_in" not in ledgers[0] and ledgers[0]["scratch"] < ledgers[1]["scratch"]
