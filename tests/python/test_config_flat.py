"""Names of version 1, which a `SwapConfig` takes and has for one release."""

from __future__ import annotations

import dataclasses
import warnings

import pytest

from kvswap_torch import ConfigError, Solution, SwapConfig, presets
from kvswap_torch.config import ARKV, H2O, Clusters, CompressKV, Memory, Selection, SnapKV, Summary
from kvswap_torch.config.engine import flat_settings
from kvswap_torch.config.v1 import PATHS
from kvswap_torch.preset.definition import Shape


def test_keyword_arguments_become_blocks() -> None:
    config = SwapConfig(groups_max=7, pages_max=9, rank=[8, 4], keeper="arkv", keep_slack=0.5)
    assert config == SwapConfig(
        summary=Summary(rank=(8, 4)),
        selection=Selection(top_k_groups=7),
        memory=Memory(9),
        retention=ARKV(low_watermark=0.5),
    )
    # Of a setting that both name the old name decides, as it does in dataclasses.replace.
    assert dataclasses.replace(config, groups_max=8).selection.top_k_groups == 8
    assert dataclasses.replace(config, keeper="observed", keep_slack=0.75).retention == SnapKV()
    assert dataclasses.replace(config, keeper="none", keep_slack=0.75).retention is None
    clusters = SwapConfig(grouping="clusters", rows="centroid", cluster_tokens=8)
    assert clusters.clusters == Clusters(target_tokens=8)
    divided = SwapConfig(rows="none", keeper="observed", keep_heads=[0, 4])
    assert divided.retention == CompressKV(scoring_heads=(0, 4))


def test_attributes_have_version_1s_words() -> None:
    for config in (
        SwapConfig(),
        SwapConfig(rows="box", score="max", heads="each", replacement="unused", keeper="heavy"),
        SwapConfig(rows="none", keeper="observed", keep_heads=[0, 4]),
        SwapConfig(grouping="clusters", rows="centroid", look_ahead=True, audit_every=3),
    ):
        engines = flat_settings(config)
        assert {name: getattr(config, name) for name in PATHS} == {
            name: engines[name] for name in PATHS
        }
    with pytest.raises(AttributeError, match="no attribute 'groups'"):
        _ = SwapConfig().groups
    with pytest.raises(AttributeError, match="no attribute 'exclude_from_summary'"):
        _ = SwapConfig().exclude_from_summary  # younger than version 1, so no name of it


def test_another_summary_has_its_own_score_unless_one_is_named() -> None:
    assert SwapConfig(rows="box").selection.score == "logit_sum"
    assert SwapConfig(rows="low_rank").selection.score == SwapConfig().selection.score
    assert SwapConfig().score == "mass" and SwapConfig(rows="box").score == "sum"
    assert SwapConfig(score="sum").selection.score == "logit_sum"
    assert SwapConfig(score="mass").selection.score == "mass_sum"
    assert SwapConfig(rows="box", score="max").selection.score == "logit_max"


def test_a_table_becomes_solutions() -> None:
    rows = [Solution(1, 8192, {"rank": 8, "keeper": "observed"}), Solution(1, 9, {"rows": "box"})]
    config = SwapConfig(table=rows)
    assert config.table == config.solutions
    assert dict(config.solutions[0].settings) == {
        "summary.rank": 8,
        "retention.policy": "snapkv",
    }
    first, second = config.solution_configs
    assert (first.summary.rank, first.retention) == (8, SnapKV())
    assert second == SwapConfig(summary=Summary(kind="min_max"))
    with pytest.raises(ConfigError, match="^solutions: batch 1, context 8: rank: must be"):
        SwapConfig(table=[Solution(1, 8, {"rank": 0})])
    with pytest.raises(ConfigError, match="must set only .*got storage.verify_checksums"):
        SwapConfig(table=[Solution(1, 8, {"checksum": False})])


def test_what_is_wrong_is_told_by_the_old_name() -> None:
    with pytest.raises(ConfigError, match="^pages_max: must be at least groups_max"):
        SwapConfig(pages_max=99)
    with pytest.raises(ConfigError, match="^keep_slack: must be left out where keeper is none"):
        SwapConfig(keep_slack=0.5)
    with pytest.raises(ConfigError, match="^look_ahead: must be true or false, got 1"):
        SwapConfig(look_ahead=1)
    with pytest.raises(TypeError, match="unexpected keyword argument 'groups'"):
        SwapConfig(groups=3)
    with pytest.raises(TypeError, match="multiple values for argument 'summary'"):
        SwapConfig(Summary(), summary=Summary())
    with pytest.raises(TypeError, match="positional argument"):
        SwapConfig(*[None] * 14)


def test_a_warning_names_the_new_path() -> None:
    with pytest.warns(DeprecationWarning, match="groups_max is selection.top_k_groups") as told:
        config = SwapConfig(groups_max=7)
    assert len(told) == 1 and told[0].filename == __file__
    with pytest.warns(DeprecationWarning, match="keeper is retention.policy"):
        assert config.keeper == "none"
    with pytest.warns(DeprecationWarning, match="rank is summary.rank"):
        SwapConfig(solutions=[Solution(1, 8, {"rank": 8})])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        SwapConfig(selection={"top_k_groups": 7}, solutions=[Solution(1, 8, {"summary.rank": 8})])


def test_a_preset_takes_them_too() -> None:
    assert SwapConfig.preset("quest", groups_max=500) == SwapConfig.preset(
        "quest", {"selection.top_k_groups": 500}
    )
    assert SwapConfig.preset("quest", groups_max=500).memory.pages_per_layer == 500


def test_a_setting_without_an_old_name_stays_where_others_change_by_theirs() -> None:
    """Of every preset; a policy that does not have it takes nothing of it."""
    for preset in presets():
        given = preset.shown(Shape())
        config = SwapConfig.preset(preset.name, given)
        sinks = config.selection.sink_tokens
        assert SwapConfig.preset(preset.name, given | {"sink_tokens": sinks}) == config
    prkv = SwapConfig.preset("prkv", keep_window=16, tail_tokens=16)
    assert prkv.retention.exclude_from_summary and prkv.retention.window_size == 16
    assert dataclasses.replace(prkv, keeper="heavy", keep_pool=5).retention == H2O(256, 16, 128)
