"""Sessions without a directory, against the executable specification: what is dropped is gone."""

from __future__ import annotations

import random

import pytest
import torch

from kvswap_torch.errors import KVSwapError
from tests.how_long import lives
from tests.python.test_session import LAYERS, Twins, native, options

KEEPERS = ["observed", "heavy", "arkv", "cake", "given", "newest"]


def dropping(rng: random.Random, keeper: str, heads: str, **changes):
    kept = {
        "keep_tokens": rng.choice([7, 16, 30]),
        "keep_window": 32 if keeper == "given" else rng.choice([1, 5, 20]),
        "keep_pool": rng.choice([1, 2, 5]) if keeper in ("observed", "arkv", "cake") else 5,
        "keep_interval": 0 if keeper in ("arkv", "cake") else rng.choice([0, 1, 3, 8]),
    }
    if keeper == "cake":
        kept |= {"keep_variance": rng.choice([0.0, 200.0]), "keep_layer_most": 2.0}
    if keeper == "arkv":
        kept |= {"keep_variance": 263.8, "keep_ratio": rng.choice([None, 0.0, 0.3, 1.0])}
    made = options(
        "",
        rows="none",
        heads=heads,
        keeper=keeper,
        **(kept if keeper != "newest" else {}),
        group_tokens=rng.choice([1, 3, 4]),
        groups_max=rng.choice([1, 3]),
        tail_tokens=rng.choice([0, 3, 32]),
        sink_tokens=rng.choice([0, 4, 6]),
        select_queries_max=rng.choice([1, 4, 8]),
        **changes,
    )
    made.pages_max = max(made.groups_max, made.select_queries_max) + rng.choice([0, 2, 20])
    rounded = ["fp8", "int4"] if made.group_tokens > 3 else ["fp8"]
    made.records = rng.choice(["model", *rounded]) if made.group_tokens > 1 else "model"
    return made


# In the specification each head has a life of its own; layers that share room (cake) are weighed
# over all heads at once, which the next test asks for.
KEEPERS_AND_HEADS = [
    (keeper, heads)
    for keeper in KEEPERS
    for heads in ("all", "each")
    if (keeper, heads) != ("cake", "each")
]


@pytest.mark.parametrize(("keeper", "heads"), KEEPERS_AND_HEADS)
@pytest.mark.parametrize("seed", range(lives(2, 8)))
def test_random_operations(seed, keeper, heads):
    rng = random.Random(f"{seed} {keeper}")
    twins = Twins(dropping(rng, keeper, heads), seed)
    live(twins, rng)
    assert twins.sessions[0].counters()["tokens_dropped"] > 0


@pytest.mark.parametrize(("keeper", "heads"), KEEPERS_AND_HEADS)
@pytest.mark.parametrize("seed", range(lives(1, 4)))
def test_random_operations_where_layers_share_pages(seed, keeper, heads):
    rng = random.Random(f"{seed} {keeper} {heads}")
    made = dropping(rng, keeper, heads, layers=5, resident_layers=rng.choice([2, 3]))
    made.groups_max = rng.choice([3, 20])
    made.pages_max = made.groups_max + made.select_queries_max
    live(Twins(made, seed), rng)


@pytest.mark.parametrize("keeper", ["observed", "newest"])
def test_what_was_attended_before_it_was_dropped_is_not_read_again(keeper):
    """Layers with pages for two at a time read beforehand what they attended in the last step."""
    made = dropping(random.Random(1), keeper, "all", layers=5, resident_layers=2)
    made.group_tokens, made.groups_max, made.pages_max = 4, 12, 20
    made.tail_tokens = made.sink_tokens = 0
    twins = Twins(made, 1)
    for tokens in (40, 1, 1, 60, 60, 1, 1):
        twins.forward(1, tokens, look_ahead=False)
    assert twins.sessions[0].counters()["tokens_dropped"] > 0


def live(twins: Twins, rng: random.Random) -> None:
    """Chunks, crops and other batches, in both sessions."""
    batch = rng.choice([1, 2, 3])
    valid = torch.ones(batch, 60, dtype=torch.bool)
    valid[0, : rng.randrange(30)] = False
    twins.forward(batch, 60, valid=valid)
    refused = 0
    for _ in range(25):
        kind, positions = rng.random(), twins.sessions[1].positions(0)
        if kind < 0.6:
            tokens = min(rng.randint(1, 4), twins.options.select_queries_max)
            twins.forward(batch, tokens, look_ahead=rng.random() < 0.8)
        elif kind < 0.7:
            twins.forward(batch, rng.randint(9, 50))
        elif kind < 0.85:
            refused += crop(twins, rng.randint(max(32, positions - 20), positions))
        else:
            indices = [rng.randrange(batch) for _ in range(rng.randint(1, 3))]
            twins.all("select_sequences", indices)
            batch = len(indices)
    counters = twins.sessions[0].counters()
    assert counters["bytes_read"] == counters["bytes_written"] == counters["bytes_on_disk"] == 0


@pytest.mark.parametrize("heads", ["all", "each"])
def test_layers_give_up_what_others_need(heads):
    """The cascade keeps what is kept where all layers are weighed at once, from disk."""
    import tempfile

    changes = {"rows": "none", "heads": heads, "keeper": "cake", "keep_tokens": 20}
    with tempfile.TemporaryDirectory() as folder:
        one, other = (native(options(path, **changes)) for path in ("", folder))
        generator, most = torch.Generator().manual_seed(1), []
        for session_tokens in (150, 1):
            for session in (one, other):
                session.begin_pass("decode" if session_tokens == 1 else "prefill")
            for layer in range(LAYERS):
                size = (1, 2, session_tokens, 64)
                keys, values = torch.randn(2, *size, generator=generator) * (1 + layer)
                query = torch.randn(1, 4, session_tokens, 64, generator=generator)
                outputs = [s.extend(layer, query, keys, values, 0.125) for s in (one, other)]
                assert torch.equal(*outputs)
                most.append(one.counters()["tokens_kept"] * LAYERS)
        names = [f"tokens_kept_{layer}" for layer in range(LAYERS)]
        assert [one.counters()[n] for n in names] == [other.counters()[n] for n in names]
        assert len({one.counters()[n] for n in names}) > 1
        assert max(most) <= 20 * LAYERS, "while layers come, too"


def crop(twins: Twins, positions: int) -> bool:
    """Both sessions refuse it, or none does."""
    refusals = []
    for session in twins.sessions:
        try:
            session.crop(positions)
        except KVSwapError as error:
            refusals.append(str(error))
    assert len(refusals) in (0, 2)
    assert not refusals or "dropped for good" in refusals[0]
    return bool(refusals)


def test_a_prompt_is_let_go_layer_by_layer():
    made = options("", rows="none", keeper="observed", keep_tokens=20, group_tokens=4)
    session, generator = native(made), torch.Generator().manual_seed(0)
    token_bytes = 2 * 2 * 64 * 4
    for layer in range(LAYERS):
        keys, values = torch.randn(2, 2, 2, 3000, 64, generator=generator)
        query = torch.randn(2, 4, 3000, 64, generator=generator)
        before = session.ledger()["staging"]
        session.extend(layer, query, keys, values, 0.125)
        # Two steps of 4 tokens and a group stay, for a crop, in blocks of 64 KiB.
        assert session.ledger()["staging"] - before <= 2 * 4 * 4 * token_bytes
        assert session.counters()["bytes_allocated"] <= (layer + 1) * 2 * (64 << 10)
    ledger = session.ledger()
    full = 2 * 3000 * token_bytes
    assert ledger["peak"] - ledger["total"] < 1.05 * full, "one layer's prompt"
    assert ledger["peak"] - ledger["total"] > 0.9 * full
    assert session.counters()["tokens_dropped"] > 2900 - 20


def test_a_budget_counts_one_layers_prompt():
    made = options("", rows="none", keeper="observed", keep_tokens=20, group_tokens=4)
    with_path = options("/tmp", rows="none", keeper="observed", keep_tokens=20, group_tokens=4)
    none, some = (
        {tokens: native_need(each, tokens) for tokens in (0, 3000)} for each in (made, with_path)
    )
    grown = none[3000]["staging"] - none[0]["staging"]
    assert some[3000]["staging"] == some[0]["staging"]
    layer = 3000 * 2 * 2 * 64 * 4
    assert 0.9 * layer < grown < 1.1 * layer


def native_need(made, context: int) -> dict[str, int]:
    from kvswap_torch import _C

    target = _C.CacheOptions()
    for name, value in vars(made).items():
        setattr(target, name, value)
    return _C.memory_need(target, 1, context, 512)


def test_what_is_gone_is_refused_by_name_and_nothing_changes():
    made = options("", rows="none", keeper="observed", keep_tokens=20)
    twins = Twins(made)
    twins.forward(2, 150)
    session = twins.sessions[0]
    for ask in (lambda: session.crop(100), lambda: session.read_back(0, 100, 120)):
        with pytest.raises(KVSwapError, match="dropped for good"):
            ask()
    with pytest.raises(ValueError, match="must have a directory"):
        session.fork()
    keys, _ = session.read_back(1, 145, 150)
    assert torch.equal(keys, twins.sessions[1].read_back(1, 145, 150)[0])
    twins.forward(2, 1)
    twins.forward(2, 40)
    twins.all("crop", 151)  # a later chunk may be taken back whole
    twins.forward(2, 40)
    twins.forward(2, 1)
    twins.all("crop", 0)
    twins.forward(2, 150)
    twins.forward(2, 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "directory must be given where every token is kept"),
        ({"rows": "none"}, "directory must be given where every token is kept"),
        (
            {"rows": "none", "keeper": "observed", "exact_layers": [0]},
            "selection.dense_layers must be empty",
        ),
        (
            {"rows": "none", "keeper": "observed", "keep_interval": 8, "keep_scores": "disk"},
            "retention.refresh_scores must be attended",
        ),
    ],
)
def test_without_a_directory_only_what_drops(changes, message):
    with pytest.raises(ValueError, match=message):
        native(options("", **changes))
