"""Which part of a model a process has, and what of a whole model's settings is its own."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from kvswap_torch import Solution, SwapConfig, UnsupportedModelError
from kvswap_torch.hf import placement
from kvswap_torch.hf.placement import Placement, local_config, local_projections
from kvswap_torch.hf.ranks import settings_alike

DISK = (1, 3, 5, 7)  # layers of eight that go to disk
SECOND_STAGE = Placement(world=2, stage=1, stages=2, first_layer=4, last_layer=8)


def split_model(monkeypatch, *, tensor: int = 1, pipeline: int = 1, experts: int = 1, layers=8):
    """What transformers leaves on a model that it has split; this is the first rank."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: tensor * pipeline * experts)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    each = layers // pipeline
    stage = SimpleNamespace(
        pp_rank=0,
        pp_size=pipeline,
        layer_range_for_rank=lambda rank, count: (rank * each, (rank + 1) * each),
    )
    config = SimpleNamespace(
        distributed_config=SimpleNamespace(
            tp_size=tensor, pp_size=pipeline, ep_size=experts, dp_size=1
        ),
        get_text_config=lambda decoder: SimpleNamespace(num_hidden_layers=layers),
    )
    return SimpleNamespace(
        config=config,
        tp_plan={"model.layers.*.self_attn.k_proj": "colwise"},
        _pp_stage=stage if pipeline > 1 else None,
        _mesh_manager=SimpleNamespace(
            get_mesh=lambda name: SimpleNamespace(get_local_rank=lambda: 0)
        ),
    )


def test_heads_are_split_and_counted(monkeypatch) -> None:
    model = split_model(monkeypatch, tensor=2)
    found = placement.placement_of(model, 8, 4, DISK)
    assert found.is_shared and found.local_heads() == (4, 2) and found.has_layer(7)
    model.tp_plan = {"model.layers.*.self_attn.qkv_proj": "colwise_gather_output"}
    assert placement.placement_of(model, 8, 4, DISK).local_heads() == (8, 4)


def test_heads_over_latents_are_split_and_latents_are_whole(monkeypatch) -> None:
    model = split_model(monkeypatch, tensor=2)
    model.tp_plan = {"model.layers.*.self_attn.kv_b_proj": "colwise"}
    found = placement.placement_of(model, 8, 1, DISK, latent=True)
    assert found.local_heads() == (4, 1) and not found.kv_split
    with pytest.raises(UnsupportedModelError, match="has 9 heads over latents, .* 2 processes"):
        placement.placement_of(model, 9, 1, DISK, latent=True)
    model.tp_plan = {"model.layers.*.mlp.gate_proj": "colwise"}  # attention stays whole
    assert placement.placement_of(model, 9, 1, DISK, latent=True).local_heads() == (9, 1)


@pytest.mark.parametrize(
    ("split", "heads", "words"),
    [
        ({"tensor": 3}, (9, 4), "9 heads and 4 key-value heads, which cannot be split evenly"),
        ({"experts": 2}, (8, 4), "splits experts over 2 processes"),
        ({"pipeline": 8}, (8, 4), "no full-attention layer among layers 0 to 0, which are stage 1"),
    ],
)
def test_what_cannot_be_shared_is_refused_with_numbers(monkeypatch, split, heads, words) -> None:
    with pytest.raises(UnsupportedModelError, match=words):
        placement.placement_of(split_model(monkeypatch, **split), *heads, DISK)


def test_a_stage_has_its_layers_ranks() -> None:
    row = Solution(1, 1024, {"summary.rank": (4, 5, 6, 7), "prefetch.skip_layers": (0, 3)})
    whole = SwapConfig(
        summary={"rank": (1, 2, 3, 4)}, prefetch={"skip_layers": (1, 2)}, solutions=(row,)
    )
    mine = local_config(whole, DISK, SECOND_STAGE)
    assert mine.ranks(2) == (3, 4) and mine.prefetch.skip_layers == (0,)
    settings = dict(mine.solutions[0].settings)
    assert settings == {"summary.rank": (6, 7), "prefetch.skip_layers": (1,)}
    assert local_config(whole, DISK, Placement()) is whole
    assert local_config(SwapConfig({"rank": 8}), DISK, SECOND_STAGE).summary.rank == 8


def test_a_rank_has_its_heads_rows_of_a_projection() -> None:
    torch.manual_seed(0)
    pairs = [(torch.randn(16, 12), torch.randn(16, 12)) for _ in DISK]
    second = Placement(world=2, head_rank=1, head_ranks=2, heads=4, kv_heads=2, kv_split=True)
    for whole, mine in zip(pairs, local_projections(pairs, DISK, second), strict=True):
        assert mine[0].shape == mine[1].shape == (8, 8)  # no more columns than its keys are wide
        expected = whole[0][8:] @ whole[1][8:].T
        assert torch.allclose(mine[0] @ mine[1].T, expected, atol=1e-4)
    narrow = [(key[:, :4], query[:, :4]) for key, query in pairs]
    key, _ = local_projections(narrow, DISK, second)[0]
    assert torch.equal(key, narrow[0][0][8:])
    assert len(local_projections(pairs, DISK, SECOND_STAGE)) == 2


def test_settings_of_ones_own_disk_may_differ() -> None:
    mine = SwapConfig()
    other = dataclasses.replace(mine, disk_quota_bytes=1 << 20, reader="sync")
    assert settings_alike(mine) == settings_alike(other)
    assert settings_alike(mine) != settings_alike(dataclasses.replace(mine, sink_tokens=8))
