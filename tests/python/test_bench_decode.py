"""Recorded choices are replayed by a cache of the same groups, and by no other."""

from __future__ import annotations

import json

import pytest
import typer

from bench.decode import Setting, read_trace
from bench.record_trace import overlap, with_groups
from kvswap_torch import SwapConfig


def test_choices_of_other_groups_are_refused(tmp_path):
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"group_tokens": 4, "steps": [[[1, 2]]]}))
    assert read_trace(path, 4)["steps"] == [[[1, 2]]]
    with pytest.raises(typer.BadParameter, match="groups of 4 tokens, --group-tokens is 8: give 4"):
        read_trace(path, 8)


@pytest.mark.parametrize("group_tokens", [0, 4, 8, 16])
def test_groups_of_another_size_select_as_many_tokens(group_tokens):
    config = SwapConfig(group_tokens=4, groups_max=96, pages_max=160)
    changed = with_groups(config, group_tokens)
    assert changed.group_tokens == (group_tokens or 4)
    assert changed.group_tokens * changed.groups_max == 4 * 96
    assert changed.group_tokens * changed.pages_max == 4 * 160


def test_a_share_of_the_memory_gives_what_it_leaves_to_pages():
    setting = Setting("tiny", 2, 1024, 2, 8, 32, 50, None, memory="1/4", replacement="lru")
    assert setting.budget_bytes == 2 * setting.shape.kv_bytes(2, 1024) // 8
    assert setting.config.pages_max == 1024 // 8
    assert setting.config.replacement == "lru"


def test_overlap_is_of_a_step_and_the_one_before():
    assert overlap([[[1, 2]], [[2, 3]], [[2, 3]]]) == 0.75
