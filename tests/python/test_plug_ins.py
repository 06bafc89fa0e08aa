"""`group_scores`: somebody else says what groups are worth, the engine keeps its promises."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.plug_ins import MostSimilarKey
from kvswap_torch import KVSwapCache, SwapConfig
from kvswap_torch.errors import BudgetError, ConfigError
from kvswap_torch.plug_ins import GroupRows, GroupScores
from tests.python.reference_methods import quest
from tests.python.tiny_models import SMALL, has_native, tiny_model, tokens_of

pytestmark = [
    pytest.mark.skipif(not has_native(), reason="kvswap_torch._C is not built"),
    pytest.mark.usefixtures("one_thread"),
]
PARTS = {name: value for name, value in SMALL.items() if name != "rank"}


class Boxes(GroupRows):
    """Quest's boxes, kept here: what `rows="box"` does."""

    @property
    def width(self) -> int:
        return 2 * self.shape.head_dim

    def rows(self, layer: int, keys: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
        assert valid.shape == (len(keys), keys.shape[2])
        groups = keys.float().unflatten(2, (-1, self.shape.group_tokens))
        padding = ~valid.unflatten(1, (-1, self.shape.group_tokens))[:, None, :, :, None]
        low = groups.masked_fill(padding, torch.inf).amin(3)
        high = groups.masked_fill(padding, -torch.inf).amax(3)
        return torch.cat([low, high], -1)

    def scores_of(self, layer, query, rows, scale):
        low, high = (side[:, :, None, None] for side in rows.chunk(2, -1))
        asked = query.float().unflatten(1, (self.shape.kv_heads, -1))[..., None, :]
        # [batch, kv_heads, of each, queries, groups]
        bounds = torch.maximum(asked * low, asked * high).sum(-1).nan_to_num(-torch.inf)
        of_heads = bounds.sum(2)
        return of_heads if self.shape.heads_apart else of_heads.sum(1)


def settings(**changes: Any) -> SwapConfig:
    return SwapConfig(**PARTS | {"groups_max": 5, "pages_max": 8, "rows": "given"} | changes)


@torch.no_grad()
def converse(model: Any, cache: KVSwapCache, batch: int) -> list[torch.Tensor]:
    """Passes of every kind; logits."""
    mask = torch.ones(batch, 61, dtype=torch.bool)
    mask[0, :9] = False
    told = []

    def forward(new: torch.Tensor) -> None:
        nonlocal mask
        mask = torch.cat([mask, torch.ones(len(new), new.shape[1], dtype=torch.bool)], 1)
        mask = mask[:, : cache.get_seq_length() + new.shape[1]]
        told.append(model(new, attention_mask=mask, past_key_values=cache).logits[:, -1])

    forward(tokens_of(batch, 61))
    for seed in range(9):
        forward(tokens_of(batch, 1 + seed % 4, seed))
    forward(tokens_of(batch, 30))
    for seed in range(4):
        forward(tokens_of(batch, 1, seed))
    cache.crop(-23)
    for seed in range(6):
        forward(tokens_of(batch, 1, seed))
    order = torch.arange(batch).flip(0)
    cache.batch_select_indices(order)
    mask = mask[order]
    for seed in range(4):
        forward(tokens_of(batch, 2, seed))
    return told


@pytest.mark.parametrize("heads", ["all", "each"])
@pytest.mark.parametrize("look_ahead", [True, False])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.pairs
def test_boxes_kept_here_choose_as_boxes_kept_there(family, look_ahead, heads, tmp_path) -> None:
    model = tiny_model(family)
    changes = {"heads": heads, "look_ahead": look_ahead, "exact_layers": (0,)}
    with KVSwapCache(model, tmp_path, settings(rows="box", **changes)) as cache:
        expected = converse(model, cache, 3)
        counters = cache.stats().counters
    plug_in = Boxes()
    with KVSwapCache(model, tmp_path, settings(**changes), group_scores=plug_in) as cache:
        told = converse(model, cache, 3)
        stats = cache.stats()
        held = sum(part.nbytes for parts in plug_in._rows for part in parts)
        assert held <= stats.ledger["plug_in"]
        assert stats.resident_bytes == sum(stats.ledger.values())
        for name in ("groups_attended", "groups_loaded", "bytes_read"):
            assert stats.counters[name] == counters[name], name
        cache.reset()
        assert not any(plug_in._rows)
        again = converse(model, cache, 3)
    torch.testing.assert_close(told, expected, rtol=0, atol=0)
    torch.testing.assert_close(again, expected, rtol=0, atol=0)


def test_the_reference_of_boxes_is_the_same(tmp_path: Path) -> None:
    """So that what is compared above is Quest's."""
    boxes = Boxes()
    keys, query = torch.randn(1, 2, 24, 8), torch.randn(1, 4, 3, 8)
    valid = torch.ones(1, 24, dtype=torch.bool)
    valid[:, :6] = False
    model = tiny_model("llama")
    with KVSwapCache(model, tmp_path, settings(group_tokens=4), group_scores=boxes):
        boxes.seal(0, keys, valid)
        mine = boxes.scores(0, query, 1.0)[0]
    expected = quest.group_scores(keys[0], valid[0], query[0], 4)
    torch.testing.assert_close(mine[:, 1:], expected[:, 1:])
    assert torch.isneginf(expected[:, 0]).all()


def test_generate_with_beams_and_lookup(tmp_path: Path) -> None:
    model = tiny_model("llama")
    prompt = torch.cat([tokens_of(1, 12)] * 4, 1)
    for way in ({"num_beams": 3}, {"prompt_lookup_num_tokens": 2}, {}):
        told = []
        for config, plug_in in ((settings(rows="box"), None), (settings(), Boxes())):
            with KVSwapCache(model, tmp_path, config, group_scores=plug_in) as cache:
                options = {"max_new_tokens": 24, "do_sample": False} | way
                told.append(model.generate(prompt, past_key_values=cache, **options))
        assert torch.equal(*told), way


class Wrong(Boxes):
    """Fails where it is told to."""

    def __init__(self, answer: Any):
        self.answer = answer

    def scores(self, layer: int, query: torch.Tensor, scale: float) -> Any:
        right = super().scores(layer, query, scale)
        return right if self.answer is None else self.answer(right)


def raises(right: torch.Tensor) -> torch.Tensor:
    raise ZeroDivisionError("of my own")


@pytest.mark.parametrize(
    ("answer", "kind", "message"),
    [
        (lambda right: right[:, :, :-1], ValueError, r"must be a tensor \[1, 1, \d+\] of floating"),
        (lambda right: right[0], ValueError, r"by Wrong must be a tensor .* got \[1, \d+\]"),
        (lambda right: right.long(), ValueError, r"got \[1, 1, \d+\] of torch.int64"),
        (lambda right: None, ValueError, "got None"),
        (lambda right: right.to("meta"), ValueError, r"by Wrong must be .* got .*device='meta'"),
        (lambda right: right * torch.nan, ValueError, "must be numbers, got NaN in layer 0 for"),
        (raises, ZeroDivisionError, "of my own"),
    ],
)
def test_a_wrong_answer_is_named_and_the_cache_goes_on(answer, kind, message, tmp_path) -> None:
    model = tiny_model("llama")
    plug_in = Wrong(None)
    config = settings(look_ahead=False)
    with KVSwapCache(model, tmp_path, config, group_scores=plug_in) as cache, torch.no_grad():
        model(tokens_of(1, 60), past_key_values=cache)
        plug_in.answer = answer
        with pytest.raises(kind, match=message) as raised:
            model(tokens_of(1, 1), past_key_values=cache)
        if kind is ZeroDivisionError:
            assert raised.value.__notes__ == [
                "KVSwapCache: raised by group_scores, in scores of layer 0"
            ]
        plug_in.answer = None
        told = model(tokens_of(1, 1), past_key_values=cache).logits
        assert cache.get_seq_length() == 61
    with KVSwapCache(model, tmp_path, config, group_scores=Boxes()) as cache, torch.no_grad():
        model(tokens_of(1, 60), past_key_values=cache)
        assert torch.equal(told, model(tokens_of(1, 1), past_key_values=cache).logits)


class Raising(Boxes):
    """Raises once in one call, in the middle of what that changes."""

    call = ""

    def _raise_in(self, call: str) -> None:
        if self.call == call:
            self.call = ""
            self._rows[1].clear()  # so that what is left is of no use
            raise ZeroDivisionError(call)

    def seal(self, layer: int, keys: torch.Tensor, valid: torch.Tensor) -> None:
        super().seal(layer, keys, valid)
        self._raise_in("seal")

    def truncate(self, layer: int, tokens: int) -> None:
        super().truncate(layer, tokens)
        self._raise_in("truncate")

    def select_sequences(self, indices) -> None:
        super().select_sequences(indices)
        self._raise_in("select_sequences")

    def reset(self) -> None:
        super().reset()
        self._raise_in("reset")


def step(model: Any, cache: KVSwapCache, new: torch.Tensor) -> torch.Tensor:
    """Logits of new tokens; what was padding stays so."""
    held = cache.get_seq_length()
    mask = torch.ones(len(new), held + new.shape[1], dtype=torch.bool)
    mask[:, :held] = cache.driver.padding.between(len(new), 0, held)
    return model(new, attention_mask=mask, past_key_values=cache).logits


CHANGES = {
    "seal": lambda model, cache: step(model, cache, tokens_of(2, 20)),
    "truncate": lambda model, cache: cache.crop(-30),
    "select_sequences": lambda model, cache: cache.batch_repeat_interleave(2),
    "select_sequences of beams": lambda model, cache: cache.reorder_cache(torch.tensor([1, 0])),
    "reset": lambda model, cache: cache.reset(),
}


@pytest.mark.parametrize("look_ahead", [True, False])
@pytest.mark.parametrize("heads", ["all", "each"])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.pairs
def test_a_change_that_raises_is_named_and_not_made(
    change, heads, look_ahead, tmp_path, monkeypatch
) -> None:
    """And the cache answers as one whose plug-in never raised."""
    monkeypatch.setattr("kvswap_torch.hf.scored_session.TOLD_ANEW_TOKENS", 9)
    model = tiny_model("llama")
    told, config = [], settings(heads=heads, look_ahead=look_ahead)
    call = change.split()[0]
    for fails in (False, True):
        plug_in = Raising()
        with KVSwapCache(model, tmp_path, config, group_scores=plug_in) as cache, torch.no_grad():
            mask = torch.ones(2, 60, dtype=torch.bool)
            mask[0, :9] = False
            model(tokens_of(2, 60), attention_mask=mask, past_key_values=cache)
            steps = [step(model, cache, tokens_of(2, 1))]
            if fails:
                plug_in.call = call
                with pytest.raises(ZeroDivisionError) as raised:
                    CHANGES[change](model, cache)
                (note,) = raised.value.__notes__
                assert note.startswith(f"KVSwapCache: raised by group_scores, in {call}")
                assert (cache.get_seq_length(), cache.batch_size) == (61, 2)
                plug_in.call = "reset"  # telling it anew fails too, at first
                if change != "seal":  # whose pass is taken back first
                    with pytest.raises(ZeroDivisionError, match="reset"):
                        step(model, cache, tokens_of(2, 1))
            plug_in.call = ""
            steps += [step(model, cache, tokens_of(2, 1, i)) for i in range(3)]
            cache.crop(-7)
            cache.reorder_cache(torch.tensor([1, 0]))
            steps += [step(model, cache, tokens_of(2, 1, i)) for i in range(9)]
            CHANGES[change](model, cache)
            steps.append(step(model, cache, tokens_of(max(2, cache.batch_size), 1, 9)))
        told.append(steps)
    torch.testing.assert_close(told[1], told[0], rtol=0, atol=0)


def test_a_change_that_raises_in_a_pass_that_is_taken_back(tmp_path: Path) -> None:
    """A pass failed, and so does shortening the plug-in after it: the next use tries again."""
    model = tiny_model("llama")
    told = []
    for fails in (False, True):
        plug_in = Raising()
        with (
            KVSwapCache(model, tmp_path, settings(), group_scores=plug_in) as cache,
            torch.no_grad(),
        ):
            model(tokens_of(1, 60), past_key_values=cache)
            if fails:
                last = model.model.layers[-1].mlp
                hook = last.register_forward_pre_hook(raises)
                with pytest.raises(TypeError):
                    model(tokens_of(1, 40), past_key_values=cache)
                hook.remove()
                plug_in.call = "truncate"
                with pytest.raises(ZeroDivisionError, match="truncate"):
                    cache.get_seq_length()
            assert cache.get_seq_length() == 60
            told.append(model(tokens_of(1, 1), past_key_values=cache).logits)
    assert torch.equal(*told)


def test_a_query_that_a_plug_in_changes_is_its_own(tmp_path: Path) -> None:
    class Careless(MostSimilarKey):
        def scores(self, layer, query, scale):
            query *= 0
            return super().scores(layer, query, scale)

    class Careful(MostSimilarKey):
        def scores(self, layer, query, scale):
            return super().scores(layer, torch.zeros_like(query), scale)

    model, told = tiny_model("llama"), []
    for plug_in in (Careless(), Careful()):
        with KVSwapCache(model, tmp_path, settings(), group_scores=plug_in) as cache:
            told.append(torch.stack(converse(model, cache, 1)))
    assert torch.equal(*told)


def test_what_is_refused(tmp_path: Path) -> None:
    model = tiny_model("llama")
    with pytest.raises(ConfigError, match="group_scores: must be given where summary.kind is user"):
        KVSwapCache(model, tmp_path, settings())
    with pytest.raises(ConfigError, match="must be an object of a class made from"):
        KVSwapCache(model, tmp_path, group_scores=print)
    with pytest.raises(ConfigError, match="must come with summary.kind='user' in the config, got"):
        KVSwapCache(model, tmp_path, settings(rows="box"), group_scores=Boxes())
    with pytest.raises(ConfigError, match="must come with summary.kind='user'"):
        KVSwapCache(model, tmp_path, preset="quest", group_scores=Boxes())
    with pytest.raises(TypeError, match="abstract"):
        GroupScores()
    plug_in = Boxes()
    plug_in.nbytes = lambda batch, tokens: -1
    with pytest.raises(ValueError, match=r"nbytes\(1, 1\) of Boxes must be an int of at least 0"):
        KVSwapCache(model, tmp_path, group_scores=plug_in)
    with KVSwapCache(model, tmp_path, settings(), group_scores=Boxes()) as cache:
        with torch.no_grad():
            model(tokens_of(1, 60), past_key_values=cache)
        with pytest.raises(ValueError, match="save: summary.kind must not be 'user'"):
            cache.save(tmp_path / "saved")
        with pytest.raises(ValueError, match="fork: summary.kind must not be 'user'"):
            cache.fork()


def test_one_open_cache_has_it(tmp_path: Path) -> None:
    model, scores = tiny_model("llama"), MostSimilarKey()
    one = KVSwapCache(model, tmp_path, settings(), group_scores=scores)
    with pytest.raises(ConfigError, match="group_scores: must be of one open cache"):
        KVSwapCache(model, tmp_path, settings(), group_scores=scores)
    one.close()
    KVSwapCache(model, tmp_path, settings(), group_scores=scores).close()


def test_what_it_keeps_is_of_the_budget(tmp_path: Path) -> None:
    model = tiny_model("llama", max_position_embeddings=4096)
    limits = {"kv_memory_bytes": "3MiB", "max_context": 2000, "max_batch": 1}
    with KVSwapCache(model, tmp_path, settings(), **limits, group_scores=Boxes()) as cache:
        with torch.no_grad():
            model(tokens_of(1, 1500), past_key_values=cache)
        stats = cache.stats()
        assert stats.ledger["plug_in"] > 100_000
        assert stats.resident_bytes_peak <= 3 << 20
    large = Boxes()
    large.nbytes = lambda batch, tokens: batch * tokens * 1500
    with pytest.raises(BudgetError, match="plug_in"):
        KVSwapCache(model, tmp_path, settings(), **limits, group_scores=large)
    with (
        KVSwapCache(
            model, tmp_path, settings(), kv_memory_bytes="6MiB", group_scores=large
        ) as cache,
        torch.no_grad(),
    ):
        model(tokens_of(1, 600), past_key_values=cache)  # set aside: as for 1,624 tokens
        with pytest.raises(BudgetError, match="open the cache with max_context and max_batch"):
            model(tokens_of(1, 1200), past_key_values=cache)
        assert cache.get_seq_length() == 600
        model(tokens_of(1, 1), past_key_values=cache)
    gc.collect()
