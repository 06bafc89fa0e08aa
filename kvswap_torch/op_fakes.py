"""Shapes and dtypes of the ops without their data, for ``torch.compile`` and ``torch.export``."""

from __future__ import annotations

import torch
from torch import Tensor

from kvswap_torch.int4_rows import int4_head_bytes

BLOCK = 16  # tokens side by side in a summary


def _blocks(tokens: int) -> int:
    return (tokens + BLOCK - 1) // BLOCK


def _choices(like: Tensor, batch: int, k: int) -> tuple[Tensor, Tensor]:
    indices = like.new_empty((batch, k), dtype=torch.int32)
    return indices, like.new_empty((batch,), dtype=torch.int32)


@torch.library.register_fake("kvswap_torch::low_rank_score")
def _low_rank_score(summary, query, token_scale=None):
    batch, blocks, _, block = summary.shape
    return query.new_empty((batch, query.shape[1], blocks * block))


@torch.library.register_fake("kvswap_torch::group_max")
def _group_max(scores, group_tokens):
    batch, tokens = scores.shape
    return scores.new_empty((batch, (tokens + group_tokens - 1) // group_tokens))


@torch.library.register_fake("kvswap_torch::group_mass")
def _group_mass(summary, query, group_tokens, join="sum", token_scale=None):
    batch, blocks, _, block = summary.shape
    return query.new_empty((batch, (blocks * block + group_tokens - 1) // group_tokens))


@torch.library.register_fake("kvswap_torch::top_k_groups")
def _top_k_groups(scores, k):
    return _choices(scores, scores.shape[0], k)


@torch.library.register_fake("kvswap_torch::select_groups")
def _select_groups(
    summary, query, group_tokens, k, token_scale=None, first_tokens=None, last_tokens=None
):
    return _choices(summary, summary.shape[0], k)


@torch.library.register_fake("kvswap_torch::project_keys")
def _project_keys(keys, projection, summary_dtype=None):
    batch, _, tokens, _ = keys.shape
    dtype = summary_dtype or keys.dtype
    blocks = _blocks(tokens)
    summary = keys.new_empty((batch, blocks, projection.shape[1], BLOCK), dtype=dtype)
    scales = (batch, blocks, BLOCK) if dtype == torch.int8 else (0,)
    return summary, keys.new_empty(scales, dtype=torch.float32)


@torch.library.register_fake("kvswap_torch::linear_rows")
def _linear_rows(input, weight, bias=None):
    return input.new_empty((*input.shape[:-1], weight.shape[0]))


@torch.library.register_fake("kvswap_torch::paged_gather")
def _paged_gather(pages, table):
    _, page_heads, _, group_tokens, head_dim = pages.shape
    batch, table_heads, count = table.shape
    kv_heads = page_heads if table_heads == 1 else table_heads
    shape = (batch, kv_heads, count * group_tokens, head_dim)
    return pages.new_empty(shape), pages.new_empty(shape)


@torch.library.register_fake("kvswap_torch::pack_records")
def _pack_records(keys, values, group_tokens):
    batch, kv_heads, tokens, head_dim = keys.shape
    groups = (tokens + group_tokens - 1) // group_tokens
    return keys.new_empty((batch, groups, kv_heads, 2, group_tokens, head_dim))


@torch.library.register_fake("kvswap_torch::unpack_records")
def _unpack_records(records, tokens, layout="hnd"):
    batch, _, kv_heads, _, _, head_dim = records.shape

    def side() -> Tensor:
        if layout == "hnd":
            return records.new_empty((batch, kv_heads, tokens, head_dim))
        return records.new_empty((batch, tokens, kv_heads, head_dim)).transpose(1, 2)

    return side(), side()


@torch.library.register_fake("kvswap_torch::transfer_records")
def _transfer_records(source, target, source_slots, target_slots):
    return None


@torch.library.register_fake("kvswap_torch::encode_records")
def _encode_records(records):
    encoded = records.new_empty(records.shape, dtype=torch.float8_e4m3fn)
    return encoded, records.new_empty(records.shape[:-2], dtype=torch.int8)


@torch.library.register_fake("kvswap_torch::decode_records")
def _decode_records(encoded, exponents, dtype):
    return encoded.new_empty(encoded.shape, dtype=dtype)


@torch.library.register_fake("kvswap_torch::encode_int4_records")
def _encode_int4_records(records):
    tokens, head_dim = records.shape[-2:]
    shape = (*records.shape[:-3], int4_head_bytes(tokens, head_dim))
    return records.new_empty(shape, dtype=torch.uint8)


@torch.library.register_fake("kvswap_torch::decode_int4_records")
def _decode_int4_records(encoded, group_tokens, head_dim, dtype):
    return encoded.new_empty((*encoded.shape[:-1], 2, group_tokens, head_dim), dtype=dtype)


@torch.library.register_fake("kvswap_torch::prefetch_open")
def _prefetch_open(path, record_bytes, first_byte=0, reader="auto", io="auto", depth=64):
    return torch.empty((4,), dtype=torch.int64)


@torch.library.register_fake("kvswap_torch::prefetch_submit")
def _prefetch_submit(handle, records):
    return handle.new_empty(())


@torch.library.register_fake("kvswap_torch::prefetch_wait")
def _prefetch_wait(handle, ticket, shape, dtype):
    return handle.new_empty(shape, dtype=dtype)


@torch.library.register_fake("kvswap_torch::prefetch_close")
def _prefetch_close(handle):
    return None


@torch.library.register_fake("kvswap_torch::fp8_quantize")
def _fp8_quantize(source):
    quantized = source.new_empty(source.shape, dtype=torch.float8_e4m3fn)
    return quantized, source.new_empty(source.shape[:-1], dtype=torch.float32)


@torch.library.register_fake("kvswap_torch::fp8_dequantize")
def _fp8_dequantize(quantized, scales, dtype):
    return quantized.new_empty(quantized.shape, dtype=dtype)


@torch.library.register_fake("kvswap_torch::paged_attention")
def _paged_attention(
    query, pages, table, masks, positions, query_positions, scale, softcap=0.0, sinks=None
):
    batch, heads, queries, head_dim = query.shape
    output = query.new_empty((batch, queries, heads, head_dim))
    return output, query.new_empty((batch, heads, queries), dtype=torch.float32)


@torch.library.register_fake("kvswap_torch::attention_mass")
def _attention_mass(
    query, pages, table, masks, positions, query_positions, log_sum_exp, scale, softcap=0.0
):
    _, page_heads, _, group_tokens, _ = pages.shape
    batch, table_heads, count = table.shape
    kv_heads = page_heads if table_heads == 1 else table_heads
    shape = (batch, kv_heads, count * group_tokens)
    return tuple(query.new_empty(shape, dtype=torch.float32) for _ in range(2))


@torch.library.register_fake("kvswap_torch::observe_keys")
def _observe_keys(query, keys, scale, valid=None, log_sum_exp=None, softcap=0.0):
    return tuple(keys.new_empty(keys.shape[:3], dtype=torch.float32) for _ in range(2))


@torch.library.register_fake("kvswap_torch::merge_attention")
def _merge_attention(output, log_sum_exp, other_output, other_log_sum_exp):
    return output.new_empty(output.shape), log_sum_exp.new_empty(log_sum_exp.shape)
