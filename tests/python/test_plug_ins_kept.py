"""`token_scores`: somebody else says which tokens stay; and the examples' plug-ins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import DynamicCache

from examples.plug_ins import (
    AskedFromAhead,
    DefensiveKV,
    LearnedRetention,
    MostSimilarKey,
    turned,
)
from kvswap_torch import KVSwapCache, ops
from kvswap_torch.errors import ConfigError
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
TAIL, SINKS = SMALL["tail_tokens"], SMALL["sink_tokens"]


class Told(TokenScores):
    """Worth what it was told for each position, counted by layer; what is not told is worth 0."""

    def __init__(
        self, worth: dict[int, float] | None = None, decay: dict[int, float] | None = None
    ):
        self._worth, self._decay = worth or {}, decay or {}
        self.queries: list[Any] = []

    def open(self, shape) -> None:
        super().open(shape)
        self._seen = [0] * shape.layers

    def worth(self, layer, query, keys, values):
        self.queries.append(None if query is None else tuple(query.shape))
        batch, heads, tokens, _ = keys.shape
        places = range(self._seen[layer], self._seen[layer] + tokens)
        self._seen[layer] += tokens
        size = (batch, heads, tokens) if self.shape.heads_apart else (batch, tokens)
        now = torch.tensor([self._worth.get(place, 0.0) for place in places]).expand(size)
        return Worth(now, torch.tensor([self._decay.get(p, 0.0) for p in places]).expand(size))


@torch.no_grad()
def attending(model: Any, ids: torch.Tensor, attended: set[int], new: torch.Tensor) -> torch.Tensor:
    """Logits of `new` after `ids` where only these positions, and itself, are attended."""
    cache = DynamicCache(config=model.config)
    model(ids, past_key_values=cache)
    positions = ids.shape[1] + 1
    mask = torch.full((1, 1, 1, positions), -torch.inf)
    mask[..., [*attended, positions - 1]] = 0
    return model(new, past_key_values=cache, attention_mask=mask).logits[:, -1]


@pytest.mark.parametrize("heads", ["all", "each"])
def test_what_is_worth_most_is_attended_and_nothing_else(heads: str, tmp_path: Path) -> None:
    model = tiny_model("llama")
    ids, new = tokens_of(1, 80), tokens_of(1, 1, 6)
    worth = dict.fromkeys(range(80), -1.0) | {5: 2.0, 17: 1.0, 40: 9.0, 41: 3.0, 60: 4.0}
    config = retaining_by_worth(heads=heads, keep_tokens=4)
    with KVSwapCache(model, tmp_path, config, token_scores=Told(worth)) as cache, torch.no_grad():
        model(ids, past_key_values=cache)
        told = model(new, past_key_values=cache).logits[:, -1]
        stats = cache.stats()
    assert stats.tokens_kept == 4
    tail = range((80 - TAIL) // 2 * 2, 80)
    attended = {*range(SINKS), 5, 40, 41, 60, *tail}
    assert stats.tokens_dropped == 81 - len(attended) - 1
    torch.testing.assert_close(told, attending(model, ids, attended, new), rtol=2e-5, atol=2e-5)


class Observed(TokenScores):
    """What a prompt's newest queries pay its keys, without reading them from disk."""

    window = 6

    def worth(self, layer, query, keys, values):
        newest = query[:, :, -self.window :]
        mean, _ = ops.observe_keys(newest, keys, keys.shape[-1] ** -0.5)
        return Worth(mean if self.shape.heads_apart else mean.sum(1))


@pytest.mark.parametrize("heads", ["all", "each"])
def test_observe_keys_is_what_the_keeper_observed_goes_by(heads: str, tmp_path: Path) -> None:
    model = tiny_model("llama")
    ids, new = tokens_of(2, 80), tokens_of(2, 1, 6)
    told = []
    for changes, plug_in in (
        ({"keeper": "observed", "keep_window": Observed.window, "keep_pool": 1}, {}),
        ({}, {"token_scores": Observed()}),
    ):
        config = retaining_by_worth(heads=heads, keep_tokens=9, **changes)
        with KVSwapCache(model, tmp_path, config, **plug_in) as cache, torch.no_grad():
            model(ids, past_key_values=cache)
            told.append(model(new, past_key_values=cache).logits)
            assert cache.stats().tokens_kept == 9
    torch.testing.assert_close(*told, rtol=2e-5, atol=2e-5)


def test_worth_decays_until_the_next_turn(tmp_path: Path) -> None:
    model = tiny_model("llama")
    ids = tokens_of(1, 80)
    # 30 is worth more than 50 at first, and loses a tenth with each token.
    plug_in = Told({30: 9.0, 50: 1.0}, {30: 0.1})
    config = retaining_by_worth(keep_tokens=1, keep_interval=12)
    with KVSwapCache(model, tmp_path, config, token_scores=plug_in) as cache, torch.no_grad():
        model(ids, past_key_values=cache)
        first = model(tokens_of(1, 1, 6), past_key_values=cache).logits[:, -1]
        for seed in range(48):
            model(tokens_of(1, 1, seed), past_key_values=cache)
        counters = cache.stats().counters
    layers = model.config.num_hidden_layers
    assert counters["turns"] == layers * (1 + 48 // 12)
    tail = range((80 - TAIL) // 2 * 2, 80)
    for place, decides in ((30, True), (50, False)):
        attended = {*range(SINKS), place, *tail}
        same = attending(model, ids, attended, tokens_of(1, 1, 6))
        assert torch.allclose(first, same, rtol=2e-5, atol=2e-5) == decides


@pytest.mark.parametrize("rows", ["none", "box"])
def test_who_keeps_everything_has_dynamic_caches_tokens(rows: str, tmp_path: Path) -> None:
    model = tiny_model("qwen3")
    prompt = torch.cat([tokens_of(2, 12)] * 4, 1)
    options = {"max_new_tokens": 20, "do_sample": False}
    expected = model.generate(prompt, **options)
    config = retaining_by_worth(rows=rows, keep_tokens=400, keep_interval=1, tail_tokens=8)
    with KVSwapCache(model, tmp_path, config, token_scores=Told()) as cache:
        told = model.generate(prompt, past_key_values=cache, **options)
        assert cache.stats().tokens_kept > 40
    assert torch.equal(told, expected)


class Raising(Told):
    fails = False

    def worth(self, layer, query, keys, values):
        if self.fails and layer == 1:
            raise ZeroDivisionError("of my own")
        return Worth(keys.float().square().sum((1, 3)))


@pytest.mark.parametrize("way", ["a pass", "a crop", "sequences"])
def test_a_worth_that_raises_is_named_and_the_cache_goes_on(way: str, tmp_path: Path) -> None:
    model = tiny_model("llama")
    told, config = [], retaining_by_worth(keep_tokens=6, keep_interval=4)
    full = DynamicCache(config=model.config)
    with torch.no_grad():
        model(tokens_of(2, 80), past_key_values=full)
    for fails in (False, True):
        plug_in = Raising()
        with torch.no_grad():
            if way == "a pass":
                cache = KVSwapCache(model, tmp_path, config, token_scores=plug_in)
                model(tokens_of(2, 80), past_key_values=cache)
            else:  # what came without queries is valued when something happens to it
                cache = KVSwapCache.from_cache(
                    model, full, tmp_path, config=config, token_scores=plug_in
                )
        act = {
            "a pass": lambda cache: model(tokens_of(2, 12), past_key_values=cache),
            "a crop": lambda cache: model(tokens_of(2, 1), past_key_values=cache),
            "sequences": lambda cache: cache.reorder_cache(torch.tensor([1, 0])),
        }[way]
        with cache, torch.no_grad():
            if way == "a crop":
                plug_in.fails = fails
                cache.crop(-9)
            if fails:
                plug_in.fails = True
                with pytest.raises(ZeroDivisionError, match="of my own") as raised:
                    act(cache)
                assert raised.value.__notes__ == [
                    "KVSwapCache: raised by token_scores, in worth in layer 1"
                ]
                plug_in.fails = False
                assert cache.get_seq_length() == (71 if way == "a crop" else 80)
            act(cache)
            steps = [model(tokens_of(2, 1, i), past_key_values=cache).logits for i in range(9)]
        told.append(steps)
    torch.testing.assert_close(*told, rtol=0, atol=0)


def test_tokens_without_queries(tmp_path: Path) -> None:
    model = tiny_model("llama")
    full = DynamicCache(config=model.config)
    with torch.no_grad():
        model(tokens_of(1, 50), past_key_values=full)
    plug_in = Told({7: 1.0})
    config = retaining_by_worth(keep_tokens=1)
    opened = KVSwapCache.from_cache(model, full, tmp_path, config=config, token_scores=plug_in)
    with opened as cache, torch.no_grad():
        cache.crop(-2)
        cache.batch_repeat_interleave(2)
        assert plug_in.queries == [None] * model.config.num_hidden_layers
        model(tokens_of(2, 1), past_key_values=cache)
        assert cache.stats().tokens_kept == 1
    with KVSwapCache.from_cache(model, full, tmp_path, config=config, token_scores=Told()) as cache:
        cache.batch_repeat_interleave(2)  # before anybody has asked what they are worth
        with torch.no_grad():
            model(tokens_of(2, 1), past_key_values=cache)
        assert cache.stats().tokens_kept == 1


class Wrong(Told):
    def __init__(self, answer: Any):
        super().__init__()
        self.answer = answer

    def worth(self, layer, query, keys, values):
        right = super().worth(layer, query, keys, values)
        return right if self.answer is None else self.answer(right)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (
            lambda right: None,
            r"a Worth whose now is a tensor \[1, 1\] of floating numbers, got None",
        ),
        (lambda right: Worth(right.now[:, :0]), r"got \[1, 0\] of torch.float32"),
        (lambda right: Worth(right.now.long()), "whose now is a tensor"),
        (lambda right: Worth(right.now.expand(1, 3).int()), r"got \[1, 3\] of torch.int32"),
        (lambda right: right.now.expand(1, 3), r"whose now is a tensor \[1, 1\]"),
        (lambda right: Worth(right.now, right.now[0]), "whose decay is a tensor"),
        (lambda right: Worth(right.now * torch.nan), "must be told numbers, got NaN"),
    ],
)
def test_a_wrong_answer_is_named_and_the_cache_goes_on(answer, message, tmp_path: Path) -> None:
    model = tiny_model("llama")
    plug_in = Wrong(None)
    config = retaining_by_worth(keep_tokens=4)
    with KVSwapCache(model, tmp_path, config, token_scores=plug_in) as cache, torch.no_grad():
        model(tokens_of(1, 60), past_key_values=cache)
        plug_in.answer = answer
        with pytest.raises(ValueError, match=message):
            model(tokens_of(1, 1), past_key_values=cache)
        plug_in.answer = None
        model(tokens_of(1, 1), past_key_values=cache)
        assert cache.get_seq_length() == 61


def test_what_is_refused(tmp_path: Path) -> None:
    model = tiny_model("llama")
    with pytest.raises(
        ConfigError, match="token_scores: must be given where retention.policy is user"
    ):
        KVSwapCache(model, tmp_path, retaining_by_worth())
    with pytest.raises(ConfigError, match="token_scores: must come with retention.policy='user'"):
        KVSwapCache(model, tmp_path, token_scores=Told())
    with pytest.raises(ConfigError, match="token_scores: must be an object of a class made from"):
        KVSwapCache(model, tmp_path, retaining_by_worth(), token_scores=print)


# The examples.


def test_queries_are_turned_as_rope_turns_them() -> None:
    query = torch.randn(1, 2, 3, 8)
    torch.testing.assert_close(turned(turned(query, 5, 1e4), 7, 1e4), turned(query, 12, 1e4))
    torch.testing.assert_close(turned(query, 0, 1e4), query)
    key = torch.randn(1, 2, 3, 8)
    # Products depend on distances alone.
    moved = (turned(query, 9, 1e4) * turned(key, 4, 1e4)).sum(-1)
    torch.testing.assert_close(moved, (turned(query, 5, 1e4) * key).sum(-1))


def outputs_of(model: Any) -> list[torch.Tensor]:
    return [layer.self_attn.o_proj.weight for layer in model.model.layers]


def test_the_examples_generate(tmp_path: Path) -> None:
    model = tiny_model("llama")
    width = (model.config.num_key_value_heads, 2 * model.config.head_dim)
    generator = torch.Generator().manual_seed(1)
    gates = {
        f"layers.{layer}.{name}": torch.randn(width, generator=generator)
        for layer in range(model.config.num_hidden_layers)
        for name in ("worth", "forget")
    }
    save_file(gates, tmp_path / "gates.safetensors")
    prompt = torch.cat([tokens_of(2, 20)] * 4, 1)
    for heads in ("all", "each"):
        kept = retaining_by_worth(heads=heads, keep_tokens=12, keep_interval=4)
        for config, plug_in in (
            (kept, {"token_scores": LearnedRetention(tmp_path / "gates.safetensors")}),
            (kept, {"token_scores": AskedFromAhead(1e4)}),
            (kept, {"token_scores": DefensiveKV(output=outputs_of(model))}),
            (
                retaining_by_worth(rows="given", keeper="none", heads=heads),
                {"group_scores": MostSimilarKey()},
            ),
            (
                retaining_by_worth(rows="given", heads=heads, keep_tokens=12),
                {"group_scores": MostSimilarKey(), "token_scores": AskedFromAhead(1e4)},
            ),
        ):
            with KVSwapCache(model, tmp_path, config, **plug_in) as cache:
                options = {"max_new_tokens": 12, "do_sample": False}
                model.generate(prompt, past_key_values=cache, **options)
                assert cache.stats().decoded > 0
    del gates["layers.0.forget"]
    save_file(gates, tmp_path / "gates.safetensors")
    with pytest.raises(ValueError, match=r"layers.0.forget: must be \[2, 32\], got nothing"):
        KVSwapCache(
            model,
            tmp_path,
            retaining_by_worth(),
            token_scores=LearnedRetention(tmp_path / "gates.safetensors"),
        )


def chunk_of(seed: int) -> list[torch.Tensor]:
    """Queries, keys and values of a pass: ``[2, 4 or 2, 50, 16]``."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(2, heads, 50, 16, generator=generator) for heads in (4, 2, 2)]


def shape_of(heads_apart: bool) -> CacheShape:
    sizes = {"layers": 1, "exact_layers": (), "heads": 4, "kv_heads": 2, "head_dim": 16}
    where = {"dtype": torch.float32, "device": torch.device("cpu")}
    return CacheShape(**sizes, group_tokens=4, heads_apart=heads_apart, **where)


@pytest.mark.parametrize("heads_apart", [True, False])
def test_pseudo_queries_value_tokens_by_attention_from_ahead(heads_apart: bool) -> None:
    """DapQ's rule in double precision: RoPE as rotations of pairs of channels."""
    window, ahead, theta, (query, keys, values) = 8, 30, 1e4, chunk_of(1)
    plug_in = AskedFromAhead(theta, window, ahead)
    plug_in.open(shape_of(heads_apart))
    told = plug_in.worth(0, query, keys, values)
    pairs = torch.complex(*query[:, :, -window:].double().unflatten(-1, (2, -1)).unbind(-2))
    turn = torch.polar(torch.ones(8).double(), ahead * theta ** (-torch.arange(8).double() / 8))
    asked = torch.view_as_real(pairs * turn).transpose(-1, -2).flatten(-2)
    expected = torch.zeros(2, 2, 50).double()
    for head in range(4):
        products = asked[:, head] @ keys[:, head // 2].double().mT / 4
        expected[:, head // 2] += products.softmax(-1).mean(1) / 2
    expected = expected if heads_apart else expected.mean(1)
    torch.testing.assert_close(told.now.double(), expected, rtol=1e-5, atol=1e-7)
    assert told.decay is None


@pytest.mark.parametrize("heads_apart", [True, False])
def test_learned_retention_is_what_its_file_says(heads_apart: bool, tmp_path: Path) -> None:
    """In double precision; a share that is kept with each token is what it decays by, as a log."""
    query, keys, values = chunk_of(2)
    generator = torch.Generator().manual_seed(3)
    gates = {
        f"layers.0.{name}": torch.randn(2, 32, generator=generator) for name in ("worth", "forget")
    }
    save_file(gates, tmp_path / "gates.safetensors")
    plug_in = LearnedRetention(tmp_path / "gates.safetensors")
    plug_in.open(shape_of(heads_apart))
    told = plug_in.worth(0, query, keys, values)
    seen = torch.cat([keys, values], -1).double()
    now, share = ((seen * gate.double()[None, :, None]).sum(-1) for gate in gates.values())
    if not heads_apart:
        now, share = now.mean(1), share.mean(1)
    torch.testing.assert_close(told.now.double(), now, rtol=1e-4, atol=1e-5)
    decay = -torch.log(1 / (1 + torch.exp(-share)))
    torch.testing.assert_close(told.decay.double(), decay, rtol=1e-4, atol=1e-5)


def defended(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, window: int, kernel: int, output
) -> torch.Tensor:
    """DefensiveKV's rule in double precision, query by query: ``[batch, kv_heads, tokens]``."""
    tokens, ratio = keys.shape[2], query.shape[1] // keys.shape[1]
    before = tokens - window
    most = torch.zeros(*keys.shape[:2], before).double()
    norms = torch.ones_like(most) if output is None else torch.zeros_like(most)
    for head in range(query.shape[1]):
        of = head // ratio
        for place in range(before, tokens):
            asked = query[:, head, place].double()[:, None]
            products = (asked * keys[:, of, : place + 1].double()).sum(-1) / keys.shape[-1] ** 0.5
            weights = products.softmax(-1)[:, :before]
            padded = torch.nn.functional.pad(weights, (kernel // 2, kernel // 2))
            near = padded.unfold(1, kernel, 1).mean(-1)
            near *= weights.sum(1, keepdim=True) / near.sum(1, keepdim=True)
            most[:, of] = most[:, of].maximum(near)
        if output is not None:
            part = output[:, head * 16 : (head + 1) * 16].double()
            norms[:, of] += (values[:, of, :before].double() @ part.T).abs().sum(-1) / ratio
    worth = most.maximum(most.mean(-1, keepdim=True)) * norms
    return torch.cat([worth, worth.amax(-1, keepdim=True).expand(-1, -1, window)], -1)


@pytest.mark.parametrize("heads_apart", [True, False])
@pytest.mark.parametrize("weighs_values", [True, False])
def test_the_most_of_any_query_is_defensive_kvs(weighs_values: bool, heads_apart: bool) -> None:
    query, keys, values = chunk_of(4)
    output = torch.randn(24, 64, generator=torch.Generator().manual_seed(5))
    output = output if weighs_values else None
    plug_in = DefensiveKV(8, 5, None if output is None else [output])
    plug_in.open(shape_of(heads_apart))
    told = plug_in.worth(0, query, keys, values)
    expected = defended(query, keys, values, 8, 5, output)
    floor = expected[..., :42].amin(-1)
    assert output is not None or ((expected == floor[..., None]).sum(-1) > 1).all()
    expected = expected if heads_apart else expected.mean(1)
    torch.testing.assert_close(told.now.double(), expected, rtol=1e-4, atol=1e-6)
    assert told.decay is None
    step = plug_in.worth(0, query[:, :, :1], keys[:, :, :1], values[:, :, :1])
    assert not step.now.any() and not plug_in.worth(0, None, keys, values).now.any()


def test_who_stays_is_defensive_kvs_choice(tmp_path: Path) -> None:
    """Of one layer and each head: those with most of the rule's worth are attended."""
    model = tiny_model("llama", num_hidden_layers=1)
    output, seen = outputs_of(model), []

    class Recorded(DefensiveKV):
        def worth(self, layer, query, keys, values):
            if keys.shape[2] > 1:
                seen.append(defended(query, keys, values, 8, 5, output[0].detach()))
            return super().worth(layer, query, keys, values)

        def attended(self, layer, weights, notes):
            received.append(weights[0].clone())

    received: list[torch.Tensor] = []
    config = retaining_by_worth(heads="each", keep_tokens=6)
    plug_in = Recorded(8, 5, output)
    with KVSwapCache(model, tmp_path, config, token_scores=plug_in) as cache, torch.no_grad():
        model(tokens_of(1, 60), past_key_values=cache)
        model(tokens_of(1, 1, 3), past_key_values=cache)
    (worth,) = seen
    among = torch.arange(SINKS, 60 - TAIL)
    for head in range(2):
        best = among[worth[0, head, among].topk(6).indices].tolist()
        attended = received[0][head].nonzero().flatten().tolist()
        assert [each for each in attended if SINKS <= each < 60 - TAIL] == sorted(best)
