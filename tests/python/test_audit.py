"""How much attention selection missed: the estimate against the truth."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from kvswap_torch.chunks import pass_of
from tests.python.test_session import HEAD_DIM, HEADS, KV_HEADS, native, options, projection

SCALE = 0.125


class Watched:
    """A session, and beside it the shares that its steps truly missed: {layer: [share]}."""

    def __init__(self, made, seed: int = 0):
        self.options, self.session = made, native(made)
        self.generator = torch.Generator().manual_seed(seed)
        self.missed: dict[int, list[torch.Tensor]] = {}
        self.keys: dict[int, torch.Tensor] = {}
        self.valid = torch.ones(0, 0, dtype=torch.bool)
        for layer in range(made.layers if made.ranks else 0):
            self.session.set_projection(layer, *projection(layer))

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator)

    def forward(self, batch: int, tokens: int, valid: torch.Tensor | None = None) -> torch.Tensor:
        valid = torch.ones(batch, tokens, dtype=torch.bool) if valid is None else valid
        kind = pass_of(tokens, self.options.select_queries_max)
        self.session.begin_pass(kind, valid)
        self.valid = torch.cat([self.valid.reshape(batch, -1), valid], 1)
        for layer in range(self.options.layers):
            keys, values = (self.random(batch, KV_HEADS, tokens, HEAD_DIM) for _ in range(2))
            query = self.random(batch, HEADS, tokens, HEAD_DIM)
            old = self.keys.get(layer, keys[:, :, :0])
            self.keys[layer] = torch.cat([old, keys], 2)
            self.session.append(layer, keys, values)
            output = self.session.attend(layer, query, SCALE)
            if kind == "decode":
                self.missed.setdefault(layer, []).append(self.truly_missed(layer, query))
        return output

    def truly_missed(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        """[batch]: the mean over heads and queries of 1 - attention that reaches what was read."""
        keys = self.keys[layer].repeat_interleave(HEADS // KV_HEADS, 1)
        size, tokens = self.options.group_tokens, query.shape[2]
        positions = torch.arange(keys.shape[2])
        seen = positions <= torch.arange(positions.numel() - tokens, positions.numel())[:, None]
        seen = (seen & self.valid[:, None])[:, None]
        weights = (query @ keys.mT * SCALE).masked_fill(~seen, -torch.inf).softmax(-1)
        first = self.valid.int().argmax(1)
        sealed = (positions.numel() - tokens - self.options.tail_tokens) // size * size
        read = torch.zeros(len(query), HEADS, positions.numel(), dtype=torch.bool)
        chosen = self.session.last_selection(layer)
        apart = len(chosen) // len(query)
        for sequence in range(len(query)):
            sinks = range(first[sequence] // size, (first[sequence] + 3) // size + 1)
            for part in range(apart):
                groups = set(chosen[sequence * apart + part]) | set(sinks)
                heads = slice(part * HEADS // apart, (part + 1) * HEADS // apart)
                of_groups = torch.isin(positions // size, torch.tensor(sorted(groups)))
                read[sequence, heads] = of_groups | (positions >= sealed)
        return (weights * ~read[:, :, None]).sum(-1).mean((1, 2))


@pytest.mark.parametrize(
    ("rows", "heads", "records"),
    [
        ("low_rank", "all", "model"),
        ("low_rank", "each", "model"),
        ("box", "all", "model"),
        ("box", "each", "model"),
        ("low_rank", "all", "fp8"),
        ("low_rank", "each", "fp8"),
        ("low_rank", "all", "int4"),
        ("low_rank", "each", "int4"),
    ],
)
def test_all_groups_looked_at_give_the_true_share(tmp_path, rows, heads, records):
    near = {"model": 1e-5, "fp8": 0.01, "int4": 0.05}[records]  # keys are rounded
    size = 4 if records == "model" else 16  # a record of one head fills half a sector
    changes = {"group_tokens": size, "records": records, "groups_max": 5 if size == 4 else 3}
    made = options(tmp_path, rows=rows, heads=heads, audit_every=1, audit_groups=100, **changes)
    watched = Watched(made)
    valid = torch.ones(2, 150, dtype=torch.bool)
    valid[0, :37] = False
    watched.forward(2, 150, valid)
    for tokens in (1, 1, 3, 1, 2, 1, 1):
        watched.forward(2, tokens)
    counters = watched.session.counters()
    assert counters["audits"] == 7 * made.layers
    for layer, shares in watched.missed.items():
        # Sequences take turns; layers begin at other turns.
        turns = [(layer // 2 + step + 1) % 2 for step in range(len(shares))]
        looked = torch.stack([share[turn] for share, turn in zip(shares, turns, strict=True)])
        assert counters[f"missed_mass_{layer}"] == pytest.approx(looked.mean().item(), abs=near)
    mean = sum(counters[f"missed_mass_{layer}"] for layer in watched.missed) / made.layers
    assert counters["missed_mass"] == pytest.approx(mean)
    assert 0.1 < mean < 0.9


def test_a_few_groups_looked_at_give_an_interval_that_holds_the_true_share(tmp_path):
    watched = Watched(options(tmp_path, audit_every=2, audit_groups=4), seed=3)
    watched.forward(1, 200)
    for _ in range(120):
        watched.forward(1, 1)
    counters = watched.session.counters()
    truth = torch.stack([torch.stack(shares).mean() for shares in watched.missed.values()]).mean()
    assert counters["audits"] == 60 * 2
    errors = [counters[f"missed_mass_error_{layer}"] for layer in watched.missed]
    assert 0 < counters["missed_mass_error"] < 0.03
    assert counters["missed_mass_error"] == pytest.approx(math.hypot(*errors) / len(errors))
    # Twice the interval: this is one draw, and the same on every machine.
    assert abs(counters["missed_mass"] - truth) < 2 * counters["missed_mass_error"]


def test_answers_stay_and_layers_take_turns(tmp_path):
    plain = Watched(options(tmp_path), seed=5)
    looked = Watched(options(tmp_path, audit_every=10), seed=5)
    for tokens in (150, *[1] * 20):
        assert torch.equal(plain.forward(1, tokens), looked.forward(1, tokens))
    assert "audits" not in plain.session.counters()
    assert looked.session.counters()["audits"] == 2 * 2
    ledgers = [watched.session.ledger() for watched in (plain, looked)]
    assert ledgers[0]["staging"] < ledgers[1]["staging"]


def test_nothing_is_looked_at_while_all_fits(tmp_path):
    watched = Watched(options(tmp_path, audit_every=1, groups_max=100, pages_max=100))
    watched.forward(1, 100)
    watched.forward(1, 1)
    assert watched.session.counters()["audits"] == 0
    assert "missed_mass" not in watched.session.counters()


def test_a_device_refuses_it(tmp_path):
    with pytest.raises(ValueError, match="audit must be left out on a device"):
        native(options(tmp_path, audit_every=1, device="host"))
    with pytest.raises(ValueError, match="its max_missed_mass too"):
        native(options(tmp_path, missed_mass_max=0.1, device="host"))


@pytest.mark.parametrize("looks", [{"audit_every": 8}, {"missed_mass_max": 0.1}])
def test_layers_that_select_nothing_refuse_it(tmp_path, looks):
    field = "interval" if "audit_every" in looks else "max_missed_mass"
    told = f"audit.{field}: must be left out where summary.kind is none"
    with pytest.raises(ValueError, match=told):
        native(options(tmp_path, rows="none", **looks))
    made = options(tmp_path, rows="box", **looks)
    with pytest.raises(ValueError, match="audit must be left out where selection.dense_layers has"):
        native(replace(made, exact_layers=list(range(made.layers))))
    native(replace(made, exact_layers=[0]))


def after_steps(made, steps: int, tokens: int = 160) -> Watched:
    watched = Watched(made, seed=7)
    watched.forward(1, tokens)
    for _ in range(steps):
        watched.forward(1, 1)
    return watched


def test_layers_that_miss_too_much_take_more_groups_and_those_that_miss_little_fewer(tmp_path):
    changes = {"audit_every": 1, "audit_groups": 100, "pages_max": 40}
    few = after_steps(options(tmp_path, groups_max=4, missed_mass_max=0.4, **changes), 60)
    many = after_steps(options(tmp_path, groups_max=24, missed_mass_max=0.9, **changes), 20)
    for layer, missed in few.missed.items():
        assert missed[0] > 0.5  # before anything was found out
        assert torch.stack(missed[-20:]).mean() < 0.45
        assert 12 <= few.session.counters()[f"groups_now_{layer}"] < 40
        assert len(few.session.last_selection(layer)[0]) > 8
        assert 6 <= many.session.counters()[f"groups_now_{layer}"] <= 16
        assert torch.stack(many.missed[layer][-5:]).mean() < 0.9
    assert few.session.counters()["missed_mass_excess"] == 0


def test_what_the_pages_cannot_hold_is_said_once_with_its_size(tmp_path, capfd):
    made = options(tmp_path, audit_every=1, groups_max=4, pages_max=6, missed_mass_max=0.05)
    watched = after_steps(made, 20)
    counters = watched.session.counters()
    assert counters["groups_now_0"] == counters["groups_now_1"] == 6
    assert counters["missed_mass_excess"] > 0.3
    said = [line for line in capfd.readouterr().err.splitlines() if "max_missed_mass" in line]
    assert len(said) == 1
    assert "with all its 6 pages, where audit.max_missed_mass allows 5.0 %" in said[0]


def test_with_a_limit_and_no_interval_layers_look_every_32_steps(tmp_path):
    watched = after_steps(options(tmp_path, missed_mass_max=0.5), 64)
    assert watched.session.counters()["audits"] == 2 * watched.options.layers
    assert "groups_now_0" not in after_steps(options(tmp_path), 2).session.counters()
