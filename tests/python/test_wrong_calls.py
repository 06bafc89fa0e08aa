"""Calls that would read or write where nothing is, and numbers that are none: refused, or NaN."""

from __future__ import annotations

import math
import os

import pytest
import torch
from attention_case import make_case

from kvswap_torch import _C, ops
from kvswap_torch.native import cache_options
from kvswap_torch.projection import from_chunk

KEYS = torch.ones(2, 2, 5, 8)


@pytest.fixture(params=_C.simd_levels())
def level(request):
    """Every instruction set that this machine has."""
    assert _C.use_simd_level(request.param)
    yield request.param
    assert _C.use_simd_level(os.environ.get("KVSWAP_SIMD", _C.simd_levels()[-1]))


def attended(**changes):
    query, *rest, scale = make_case()
    return ops.paged_attention(query, *rest, changes.get("scale", scale), changes.get("softcap", 0))


def observed(**changes):
    return ops.observe_keys(
        KEYS, KEYS, changes.get("scale", 1.0), softcap=changes.get("softcap", 0)
    )


def massed(**changes):
    query, *rest, scale = make_case()
    sums = torch.zeros(query.shape[:3])
    return ops.attention_mass(
        query, *rest, sums, changes.get("scale", scale), changes.get("softcap", 0)
    )


@pytest.mark.parametrize("call", [attended, observed, massed])
@pytest.mark.parametrize("scale", [0.0, -1.0, math.nan, math.inf])
def test_scores_are_scaled_by_what_keeps_their_order(call, scale):
    with pytest.raises(ValueError, match=r"scale must be finite and above 0, got"):
        call(scale=scale)
    if scale != 0.0:
        with pytest.raises(ValueError, match=r"softcap must be finite and at least 0, got"):
            call(softcap=scale)


def test_a_table_has_a_row():
    pages, table = torch.ones(4, 1, 2, 4, 8), torch.zeros(2, 0, 3, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"paged_gather: rows of table must be 1\.\."):
        ops.paged_gather(pages, table)


def test_a_group_has_a_token():
    with pytest.raises(ValueError, match=r"unpack_records: group_tokens must be 1\.\.64, got 0"):
        ops.unpack_records(torch.zeros(1, 1, 1, 2, 0, 8), 0)


def test_projections_are_found_in_some_text():
    with pytest.raises(ValueError, match="keys must be of a batch"):
        from_chunk("svd_keys", torch.zeros(0, 2, 5, 8), None, 4)


def test_a_predictor_has_heads_and_takes_what_is_where_it_is():
    predictor = torch.classes.kvswap_torch.QueryPredictor
    with pytest.raises(ValueError, match="of at least 1 head"):
        predictor(torch.ones(4, 4), None, None, 1e-6, 0, 1, False)
    half = predictor(torch.ones(8, 4, dtype=torch.bfloat16), None, None, 1e-6, 2, 1, False)
    hidden = torch.empty(1, 1, 4, dtype=torch.bfloat16, device="meta")
    with pytest.raises(RuntimeError, match=r"[Dd]evice"):
        half.predict(hidden, torch.ones(1, 1, 4), torch.ones(1, 1, 4))


@pytest.mark.parametrize(("batch", "tokens"), [(2, 200), (8, 1000), (64, 400)])
def test_a_mask_of_other_sequences_is_refused(tmp_path, batch, tokens):
    shape = {"layers": 1, "query_heads": 4, "kv_heads": 2, "head_dim": 32}
    settings = {"dtype": torch.float32, "groups_max": 2, "pages_max": 8}
    cache = _C.TensorCache(cache_options(**shape, directory=str(tmp_path), **settings))
    valid = torch.ones(batch, tokens, dtype=torch.bool)
    valid[:, 0] = False
    query, keys = torch.ones(1, 4, tokens, 32), torch.ones(1, 2, tokens, 32)
    cache.begin_pass("prefill", valid)
    with pytest.raises(ValueError, match=f"of the {batch} sequences .* mask has, got 1"):
        cache.extend(0, query, keys, keys, 0.2)
    whole = [each.expand(batch, -1, -1, -1) for each in (query, keys, keys)]
    assert cache.extend(0, *whole, 0.2).isfinite().all()


def test_groups_beyond_all_numbers_are_left_out(tmp_path):
    shape = {"layers": 1, "query_heads": 4, "kv_heads": 2, "head_dim": 32}
    settings = {"dtype": torch.float32, "groups_max": 2, "pages_max": 8}
    cache = _C.TensorCache(cache_options(**shape, directory=str(tmp_path), **settings))
    cache.begin_pass("prefill")
    query, keys = torch.randn(1, 4, 200, 32), torch.randn(1, 2, 200, 32)
    cache.extend(0, query, keys, keys, 0.2)
    cache.override_selection(0, [[2**32 + 1, -(2**40), 3]])
    cache.begin_pass("decode")
    cache.extend(0, query[:, :, :1], keys[:, :, :1], keys[:, :, :1], 0.2)
    assert cache.last_selection(0) == [[3]]


def test_rows_with_a_number_that_is_none_keep_the_others(level):
    rows = torch.ones(2, 64)
    rows[0, 0], rows[0, 16] = 1000.0, math.nan
    quantized, scales = ops.fp8_quantize(rows)
    back = ops.fp8_dequantize(quantized, scales, torch.float32)
    assert scales[0] == pytest.approx(1000 / 448)
    assert back[0, 0] == 1000.0 and back[0, 16].isnan() and back[0, 1] == pytest.approx(1, rel=0.1)
    assert back[1].equal(rows[1])


@pytest.mark.parametrize("number", [9e-43, 1e-40, 1e-38, 3e-38])
def test_rows_of_tiny_numbers_stay_numbers(level, number):
    quantized, scales = ops.fp8_quantize(torch.full((1, 40), number))
    assert ops.fp8_dequantize(quantized, scales, torch.float32).isfinite().all()


def test_a_key_that_is_none_makes_masses_that_are_none(level):
    keys = torch.randn(1, 1, 40, 64)
    keys[0, 0, 3, 5] = math.nan
    mean, square = ops.observe_keys(torch.randn(1, 2, 8, 64), keys, 0.1)
    assert mean.isnan().all() and square.isnan().all()
