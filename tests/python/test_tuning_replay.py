"""The reuse buffer, replayed: loads what the engine loads."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvswap_torch.tuning.traffic import POLICIES, ReuseBuffer
from tests.python.tiny_models import has_native

pytestmark = pytest.mark.skipif(not has_native(), reason="kvswap_torch._C is not built")
steps = st.lists(st.sets(st.integers(0, 30), max_size=6), min_size=1, max_size=30)


def loads_of(buffer: ReuseBuffer, groups) -> list[int]:
    return buffer.plan(np.array(sorted(groups), dtype=np.int64)).tolist()


@given(steps, st.sampled_from(POLICIES), st.integers(6, 12))
def test_every_group_of_a_step_is_there_or_loaded(choices, policy, capacity):
    buffer = ReuseBuffer(capacity, policy)
    for groups in choices:
        absent = [group for group in sorted(groups) if group not in buffer]
        assert loads_of(buffer, groups) == absent
        assert loads_of(buffer, groups) == []


@given(steps, st.sampled_from(POLICIES))
def test_a_buffer_for_everything_loads_each_group_once(choices, policy):
    buffer = ReuseBuffer(31, policy)
    loads = sum(len(loads_of(buffer, groups)) for groups in choices)
    assert loads == len(set().union(*choices))


def test_who_leaves():
    kept = {}
    for policy in POLICIES:
        buffer = ReuseBuffer(3, policy)
        for groups in ({1, 2}, {1, 3}, {4}):
            loads_of(buffer, groups)
        kept[policy] = {group for group in range(5) if group in buffer}
    # 1 is the oldest load, 2 the least recently used, and 1 stands in the first page.
    assert kept == {"fifo": {2, 3, 4}, "lru": {1, 3, 4}, "unused": {2, 3, 4}}


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match="policy must be one of"):
        ReuseBuffer(2, "random")
    with pytest.raises(ValueError, match="capacity must be positive, got 0"):
        ReuseBuffer(0, "lru")
    with pytest.raises(ValueError, match="at least the 3 groups of a step, got 2"):
        loads_of(ReuseBuffer(2, "lru"), [1, 2, 3])


@pytest.mark.parametrize("policy", POLICIES)
def test_loads_are_the_engines(policy, tmp_path):
    from kvswap_torch.hf.session import open_session

    session = open_session(
        {
            "layers": 1,
            "query_heads": 1,
            "kv_heads": 1,
            "head_dim": 64,
            "directory": str(tmp_path),
            "ranks": [2],
            "group_tokens": 2,
            "groups_max": 4,
            "pages_max": 9,
            "sink_tokens": 0,
            "tail_tokens": 4,
            "replacement": policy,
            "select_queries_max": 1,
        }
    )
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(1, 1, 80, 64, generator=generator)
    projection = torch.eye(64)[:, :2].contiguous()
    session.set_projection(0, projection, projection)
    session.append(0, keys, keys)
    session.attend(0, keys, 1.0)
    buffer, token = ReuseBuffer(9, policy), keys[:, :, :1].contiguous()
    before = session.counters()["groups_loaded"]
    session.begin_pass("decode")
    for _ in range(25):
        chosen = torch.randperm(14, generator=generator)[:4].sort().values.tolist()
        session.override_selection(0, [chosen])
        session.append(0, token, token)
        session.attend(0, token, 1.0)
        after = session.counters()["groups_loaded"]
        assert after - before == len(loads_of(buffer, chosen))
        before = after
    session.close()
