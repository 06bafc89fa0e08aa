"""The C++ session against the executable specification, over back ends and operations."""

from __future__ import annotations

import random

import pytest
import torch

from kvswap_torch import _C, SwapConfig
from kvswap_torch.chunks import pass_of
from kvswap_torch.config.engine import WORDS
from kvswap_torch.errors import BudgetError, ClosedError, StorageError
from tests.how_long import lives
from tests.python.reference_heads import reference
from tests.python.reference_methods import METHODS
from tests.python.reference_options import Options
from tests.selections import assert_same_choices

LAYERS, HEADS, KV_HEADS, HEAD_DIM = 2, 4, 2, 64
ROUNDED_MAX = 1  # of a test's choices
BACK_ENDS = [
    {"reader": "sync", "io_mode": "buffered"},
    {"reader": "sync", "io_mode": "direct"},
    {"reader": "threads", "io_mode": "direct"},
    {"reader": "uring", "io_mode": "direct"},
    {"reader": "auto", "io_mode": "auto", "device": "host"},
    {"reader": "sync", "io_mode": "buffered", "device": "host"},
]


def options(directory, **changes) -> Options:
    made = Options(
        layers=LAYERS,
        query_heads=HEADS,
        kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        directory=str(directory),
        ranks=[16],
        group_tokens=4,
        groups_max=5,
        pages_max=12,
        tail_tokens=8,
        sink_tokens=4,
        select_queries_max=4,
    )
    for name, value in changes.items():
        setattr(made, name, value)
    if not METHODS[made.rows].takes_projections:
        made.ranks = []
    if made.rows == "given":
        made.score = "sum"
    return made


def native(made: Options) -> _C.TensorCache:
    target = _C.CacheOptions()
    for name, value in vars(made).items():
        setattr(target, name, value)
    return _C.TensorCache(target)


def projection(seed: int, rank: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (KV_HEADS * HEAD_DIM, rank)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


class Twins:
    """The same calls to both sessions; everything they answer is compared."""

    def __init__(self, made: Options, seed: int = 0):
        self.sessions = (native(made), reference(made))
        self.options = made
        self.extends = seed % 2 == 1
        self.rounded = 0  # choices that differ by rounding
        self.generator = torch.Generator().manual_seed(seed)
        # Products of a size that attention has: a softmax that knows one token only has many ties.
        size = 1.0 if made.score == "sum" else 0.3
        for layer in range(made.layers if METHODS[made.rows].takes_projections else 0):
            if layer in made.exact_layers:
                continue
            for session in self.sessions:
                session.set_projection(layer, *(size * part for part in projection(layer)))

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator).to(self.options.dtype)

    def forward(self, batch: int, tokens: int, look_ahead: bool = True, valid=None) -> None:
        kind = pass_of(tokens, self.options.select_queries_max)
        self.pass_(kind, batch, tokens, look_ahead, valid)

    def pass_(self, kind: str, batch: int, tokens: int, look_ahead: bool = True, valid=None):
        self.all("begin_pass", kind, valid)
        for layer in range(self.options.layers):
            keys = self.random(batch, KV_HEADS, tokens, HEAD_DIM)
            values = self.random(batch, KV_HEADS, tokens, HEAD_DIM)
            query = self.random(batch, HEADS, tokens, HEAD_DIM)
            predicted = query + 0.1 * self.random(batch, HEADS, tokens, HEAD_DIM)
            outputs = []
            if kind == "decode":
                self.give_scores(layer, batch, tokens)
            for session in self.sessions:
                if look_ahead and layer > 0:
                    session.look_ahead(layer, predicted)
                if self.extends:
                    outputs.append(session.extend(layer, query, keys, values, 0.125))
                else:
                    session.append(layer, keys, values)
                    outputs.append(session.attend(layer, query, 0.125))
            self.give_worth(layer, batch, tokens)
            if valid is not None:
                outputs = [torch.where(valid[..., None, None], out, 0.0) for out in outputs]
            if kind == "prefill" or self.chose_the_same(layer):
                torch.testing.assert_close(outputs[0], outputs[1], rtol=2e-5, atol=2e-5)

    def chose_the_same(self, layer: int) -> bool:
        """False where the two differ by rounding: seldom, since scores are random."""
        mine, theirs = (session.last_selection(layer) for session in self.sessions)
        by = self.sessions[1].last_judged(layer) or [None] * len(theirs)
        same = assert_same_choices(mine, theirs, by)
        self.rounded += not same
        assert self.rounded <= ROUNDED_MAX
        return same

    def pad_later(self, rng: random.Random) -> None:
        """Some tokens, alone and in runs, in each sequence's beginning, middle or end."""
        valid = self.sessions[1].held_valid()
        for sequence in range(len(valid)):
            begin = rng.randrange(valid.shape[1])
            valid[sequence, begin : begin + rng.choice([0, 1, 3, 20])] = False
        self.all("declare_held", valid)

    def give_scores(self, layer: int, batch: int, tokens: int) -> None:
        """With rows=given, before each choice; many are alike."""
        made, specified = self.options, self.sessions[1]
        if made.rows != "given" or layer in made.exact_layers or specified.attends_all(layer):
            return
        parts = batch * (KV_HEADS if made.heads == "each" else 1)
        size = (parts, tokens, specified.sealed_groups(layer))
        scores = torch.randint(0, 9, size, generator=self.generator).float()
        self.all("give_scores", layer, scores)

    def give_worth(self, layer: int, batch: int, tokens: int) -> None:
        """With keeper=given, after each append; some decay."""
        made = self.options
        if made.keeper != "given" or self.sessions[1]._is_exact(layer):
            return
        size = (batch * (KV_HEADS if made.heads == "each" else 1), tokens)
        worth = torch.randint(-5, 5, size, generator=self.generator).float()
        decay = torch.randint(0, 4, size, generator=self.generator) / 8
        self.all("give_worth", layer, worth, None if tokens % 2 else decay)

    def all(self, name: str, *arguments) -> None:
        for session in self.sessions:
            getattr(session, name)(*arguments)


@pytest.mark.parametrize("back_end", BACK_ENDS, ids=lambda b: "-".join(map(str, b.values())))
def test_decode_after_a_long_prompt(tmp_path, back_end):
    twins = Twins(options(tmp_path, **back_end))
    twins.forward(2, 150)
    twins.extends = True
    for _ in range(30):
        twins.forward(2, 1)
    twins.forward(2, 3)
    twins.forward(2, 40)
    twins.forward(2, 1)
    counters = twins.sessions[0].counters()
    assert counters["bytes_read"] > 0
    assert 0 < counters["groups_loaded"] < counters["groups_attended"]


def test_every_method_is_a_setting() -> None:
    assert set(WORDS["rows"].values()) == set(METHODS)
    for name, method in METHODS.items():
        more = {"grouping": "clusters"} if name == "centroid" else {}
        assert SwapConfig(rows=name, **more).takes_projections == method.takes_projections


#: Of groups; of clusters test_session_clusters.py has the same.
OF_GROUPS = [rows for rows in METHODS if rows != "centroid"]


def few(rows: str, number: int) -> bool:
    """Rows that share most of their code with others are tried on fewer back ends and seeds."""
    return rows in ("low_rank", "box") or number % 5 == 4


@pytest.mark.parametrize(
    ("rows", "number"), [(r, n) for r in OF_GROUPS for n in range(len(BACK_ENDS)) if few(r, n)]
)
@pytest.mark.parametrize("heads", ["all", "each"])
def test_every_method_chooses_as_its_reference(tmp_path, rows, heads, number):
    back_end = BACK_ENDS[number]
    made = options(tmp_path, rows=rows, heads=heads, score="max", exact_layers=[1], **back_end)
    if heads == "all":
        made.score, made.exact_layers = "sum", []
    twins = Twins(made, seed=1)
    valid = torch.ones(2, 150, dtype=torch.bool)
    valid[0, :37] = False
    twins.forward(2, 150, valid=valid)
    for tokens in (1, 3, 1, 40, 1, 2):
        twins.forward(2, tokens)
    twins.all("crop", 120)
    twins.all("select_sequences", [1, 1, 0])
    for _ in range(12):
        twins.forward(3, 1)
    assert twins.sessions[0].counters()["groups_loaded"] > 0


@pytest.mark.parametrize(
    ("rows", "seed"), [(r, s) for r in OF_GROUPS for s in range(lives(5, 12)) if few(r, s)]
)
@pytest.mark.parametrize("heads", ["all", "each"])
def test_random_operations(tmp_path, seed, rows, heads):
    rng = random.Random(seed)
    made = options(
        tmp_path,
        rows=rows,
        heads=heads,
        score=rng.choice(["sum", "max"]),
        exact_layers=rng.choice([[], [], [1], [0, 1]]),
        group_tokens=rng.choice([1, 2, 3, 4, 7, 16]),
        groups_max=rng.choice([1, 3, 8]),
        tail_tokens=rng.choice([0, 3, 8, 32]),
        sink_tokens=rng.choice([0, 1, 4, 6]),
        select_queries_max=rng.choice([1, 4, 8]),
        replacement=rng.choice(["fifo", "lru", "unused", "none", "score"]),
        **rng.choice(BACK_ENDS),
    )
    if rows == "box":
        made.bound_weight = [1.0, 0.5, 0.0][seed % 3]
    live(made, rng, seed)


@pytest.mark.parametrize("score", ["sum", "max"])
@pytest.mark.parametrize("heads", ["all", "each"])
@pytest.mark.parametrize("seed", range(lives(2, 6)))
def test_random_operations_where_groups_are_scored_in_two_stages(tmp_path, seed, score, heads):
    rng = random.Random(seed)
    made = options(
        tmp_path,
        score=score,
        heads=heads,
        score_columns=rng.choice([1, 6, 12]),
        score_share=rng.choice([0.0, 0.2, 0.6]),
        group_tokens=rng.choice([1, 3, 4, 16]),
        groups_max=rng.choice([1, 3]),
        tail_tokens=rng.choice([0, 3, 32]),
        sink_tokens=rng.choice([0, 4, 6]),
        select_queries_max=rng.choice([1, 4, 8]),
        **rng.choice(BACK_ENDS),
    )
    live(made, rng, seed)


@pytest.mark.parametrize("rows", ["low_rank", "box", "none"])
@pytest.mark.parametrize("heads", ["all", "each"])
@pytest.mark.parametrize("seed", range(lives(1, 3)))
def test_random_operations_where_layers_share_pages(tmp_path, seed, rows, heads):
    rng = random.Random(seed)
    kept = {} if rows != "box" else {"keeper": "observed", "keep_tokens": 12, "keep_window": 8}
    made = options(
        tmp_path,
        layers=5,
        rows=rows,
        heads=heads,
        resident_layers=rng.choice([2, 3]),
        exact_layers=rng.choice([[], [1], [1, 2], [0, 4]]),
        tail_tokens=rng.choice([0, 3, 32]),
        pages_max=rng.choice([8, 12, 40]),
        select_queries_max=rng.choice([1, 4, 8]),
        replacement=rng.choice(["fifo", "lru", "unused"]),
        **kept,
        **rng.choice(BACK_ENDS if not kept else BACK_ENDS[:4]),
    )
    live(made, rng, seed)


@pytest.mark.parametrize("score", ["mass", "max_mass"])
@pytest.mark.parametrize("heads", ["all", "each"])
@pytest.mark.parametrize("seed", range(lives(2, 6)))
def test_random_operations_by_mass(tmp_path, seed, score, heads):
    rng = random.Random(seed)
    made = options(
        tmp_path,
        score=score,
        heads=heads,
        group_tokens=rng.choice([1, 3, 4, 16]),
        groups_max=rng.choice([1, 3, 8]),
        tail_tokens=rng.choice([0, 3, 32]),
        sink_tokens=rng.choice([0, 4, 6]),
        select_queries_max=rng.choice([1, 4, 8]),
        **rng.choice(BACK_ENDS),
    )
    live(made, rng, seed)


@pytest.mark.parametrize(
    ("rows", "score"), [("low_rank", "mass"), ("low_rank", "sum"), ("box", "max"), ("mean", "sum")]
)
@pytest.mark.parametrize("heads", ["all", "each"])
@pytest.mark.parametrize("seed", range(3))
def test_random_operations_where_few_groups_may_be_new(tmp_path, seed, heads, rows, score):
    rng = random.Random(seed)
    made = options(
        tmp_path,
        rows=rows,
        score=score,
        heads=heads,
        new_group_ratio=rng.choice([0.01, 0.3, 0.7]),
        group_tokens=rng.choice([1, 3, 4]),
        groups_max=rng.choice([2, 5, 9]),
        select_queries_max=rng.choice([1, 4]),
        look_ahead=rng.choice(["off", "trust", "verify"]),
        **rng.choice(BACK_ENDS[:4]),
    )
    live(made, rng, seed)


@pytest.mark.parametrize("heads", ["all", "each"])
@pytest.mark.parametrize("seed", range(3))
def test_random_operations_with_the_newest_alone(tmp_path, seed, heads):
    rng = random.Random(seed)
    made = options(tmp_path, rows="none", heads=heads, keeper="newest", groups_max=1)
    twins = live(made, rng, seed)
    assert twins.sessions[0].counters()["bytes_read"] >= 0


def live(made: Options, rng: random.Random, seed: int, pads_later: bool = False) -> Twins:
    """Chunks, crops and other batches, in both sessions; tokens become padding before some."""
    made.pages_max = max(made.groups_max, made.select_queries_max) + rng.choice([0, 2, 20])
    twins = Twins(made, seed)
    batch = rng.choice([1, 2, 3])
    valid = torch.ones(batch, 60, dtype=torch.bool)
    valid[0, : rng.randrange(30)] = False
    twins.forward(batch, 60, valid=valid)
    for _ in range(25):
        kind = rng.random()
        positions = twins.sessions[1].positions(0)
        if pads_later and rng.random() < 0.3:
            twins.pad_later(rng)
        if kind < 0.6:
            twins.forward(batch, rng.randint(1, 4), look_ahead=rng.random() < 0.8)
        elif kind < 0.7:
            twins.forward(batch, rng.randint(5, 50))
        elif kind < 0.85:
            twins.all("crop", rng.randint(max(32, positions - 40), positions))
        else:
            indices = [rng.randrange(batch) for _ in range(rng.randint(1, 3))]
            twins.all("select_sequences", indices)
            batch = len(indices)
        for layer in range(LAYERS):
            mine, theirs = (session.attends_all(layer) for session in twins.sessions)
            assert mine == theirs
    mine, theirs = (s.read_back(1, 0, twins.sessions[1].positions(1)) for s in twins.sessions)
    torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
    return twins


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_reads_back_every_bit(tmp_path, dtype):
    session = native(options(tmp_path, dtype=dtype, group_tokens=8))
    keys, values = torch.randn(2, 2, KV_HEADS, 100, HEAD_DIM).to(dtype)
    session.append(0, keys[:, :, :90], values[:, :, :90])
    session.append(0, keys[:, :, 90:], values[:, :, 90:])
    assert torch.equal(session.read_back(0, 3, 98)[0], keys[:, :, 3:98])
    assert torch.equal(session.read_back(0, 0, 100)[1], values)


def test_budget_is_checked_before_anything_is_written(tmp_path):
    need = _C.memory_need(options_of(tmp_path), 1, 400)["total"]
    session = native(options(tmp_path, kv_memory_bytes=need))
    for layer in range(LAYERS):
        session.set_projection(layer, *projection(layer))
    keys = torch.randn(1, KV_HEADS, 400, HEAD_DIM)
    session.append(0, keys, keys)
    session.append(1, keys, keys)
    assert session.ledger()["total"] <= need
    with pytest.raises(BudgetError, match="kv_memory_bytes must"):
        for _ in range(1000):
            session.append(0, keys, keys)
    positions = session.positions(0)
    torch.testing.assert_close(session.read_back(0, positions - 400, positions)[0], keys)
    assert session.ledger()["peak"] <= need


def options_of(directory):
    target = _C.CacheOptions()
    for name, value in vars(options(directory, kv_memory_bytes=4 << 20)).items():
        setattr(target, name, value)
    return target


def test_errors_have_their_classes(tmp_path):
    with pytest.raises(StorageError, match="missing"):
        native(options(tmp_path / "missing"))
    with pytest.raises(ValueError, match="storage.io_backend: must be one of"):
        native(options(tmp_path, reader="carrier pigeon"))
    session = native(options(tmp_path))
    keys = torch.randn(1, KV_HEADS, 10, HEAD_DIM)
    with pytest.raises(ValueError, match="keys must be"):
        session.append(0, keys[:, :1], keys[:, :1])
    with pytest.raises(ValueError, match="dtype"):
        session.append(0, keys.half(), keys.half())
    session.append(0, keys, keys)
    with pytest.raises(ValueError, match="batch must stay 1"):
        session.append(0, keys.expand(2, -1, -1, -1), keys.expand(2, -1, -1, -1))
    session.close()
    session.close()
    with pytest.raises(ClosedError):
        session.append(0, keys, keys)


def test_nothing_is_left_in_the_folder(tmp_path):
    session = native(options(tmp_path))
    keys = torch.randn(1, KV_HEADS, 100, HEAD_DIM)
    session.append(0, keys, keys)
    assert list(tmp_path.iterdir()) == []
    session.close()
    assert list(tmp_path.iterdir()) == []
