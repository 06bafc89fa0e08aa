"""What each op must compute, in a few lines of plain torch: the meaning, not the speed."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

NEVER = float("-inf")


def flat_rows(summary: Tensor, token_scale: Tensor | None = None) -> Tensor:
    """[batch, blocks, rank, 16] -> [batch, blocks * 16, rank] in fp32."""
    rows = summary.float().transpose(2, 3).flatten(1, 2)
    return rows if token_scale is None else rows * token_scale.flatten(1)[..., None]


def low_rank_score(summary: Tensor, query: Tensor, token_scale: Tensor | None = None) -> Tensor:
    return query @ flat_rows(summary, token_scale).transpose(1, 2)


def group_max(scores: Tensor, group_tokens: int) -> Tensor:
    missing = -scores.shape[1] % group_tokens
    clean = torch.where(scores.isnan(), torch.inf, scores)
    padded = torch.nn.functional.pad(clean, (0, missing), value=NEVER)
    return padded.unflatten(1, (-1, group_tokens)).amax(-1)


def group_mass(
    summary: Tensor,
    query: Tensor,
    group_tokens: int,
    join: str = "sum",
    token_scale: Tensor | None = None,
) -> Tensor:
    if summary.dtype == torch.int8:
        scale = query.abs().amax(-1, keepdim=True) / 127
        query = (query / scale).round() * scale
    shares = low_rank_score(summary, query, token_scale).softmax(-1)
    missing = -shares.shape[2] % group_tokens
    padded = torch.nn.functional.pad(shares, (0, missing))
    groups = padded.unflatten(2, (-1, group_tokens)).sum(-1)
    return groups.sum(1) if join == "sum" else groups.amax(1)


def top_k_groups(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    indices = torch.full((scores.shape[0], k), -1, dtype=torch.int32)
    counts = torch.zeros(scores.shape[0], dtype=torch.int32)
    for i, row in enumerate(scores):
        best = torch.argsort(row, descending=True, stable=True)
        best = best[row[best] > NEVER][:k].sort().values
        indices[i, : len(best)] = best
        counts[i] = len(best)
    return indices, counts


def select_groups(
    summary: Tensor,
    query: Tensor,
    group_tokens: int,
    k: int,
    token_scale: Tensor | None = None,
    first_tokens: Tensor | None = None,
    last_tokens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    scores = low_rank_score(summary, query[:, None], token_scale)[:, 0]
    for i, row in enumerate(scores):
        row[: 0 if first_tokens is None else first_tokens[i]] = NEVER
        row[len(row) if last_tokens is None else last_tokens[i] :] = NEVER
    return top_k_groups(group_max(scores, group_tokens), k)


def project_keys(keys: Tensor, projection: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    rows = keys.float().transpose(1, 2).flatten(2) @ projection
    rows = torch.nn.functional.pad(rows, (0, 0, 0, -rows.shape[1] % 16))
    scale = rows.abs().amax(-1) / 127 if dtype == torch.int8 else torch.empty(0)
    if dtype == torch.int8:
        rows = (rows / scale[..., None]).nan_to_num(0).round()
        scale = scale.unflatten(1, (-1, 16))
    return rows.unflatten(1, (-1, 16)).transpose(2, 3).to(dtype), scale


def linear_rows(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    total = rows.double() @ weight.double().T
    return (total if bias is None else total + bias.double()).to(rows.dtype)


def paged_gather(pages: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    kv_heads = max(pages.shape[1], table.shape[1])
    taken = pages[table.clamp(min=0).long()] * (table >= 0)[..., None, None, None, None]
    heads = [taken[:, h % table.shape[1], :, h % pages.shape[1]] for h in range(kv_heads)]
    keys, values = torch.stack(heads, 1).unbind(3)
    return keys.flatten(2, 3), values.flatten(2, 3)


def pack_records(keys: Tensor, values: Tensor, group_tokens: int) -> Tensor:
    both = torch.stack([keys, values], 2)
    padded = torch.nn.functional.pad(both, (0, 0, 0, -keys.shape[2] % group_tokens))
    return padded.unflatten(3, (-1, group_tokens)).movedim(3, 1)


def unpack_records(records: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    keys, values = records.movedim(1, 3).flatten(3, 4)[..., :tokens, :].unbind(2)
    return keys, values


def fp8_quantize(source: Tensor) -> tuple[Tensor, Tensor]:
    scales = source.float().abs().amax(-1) / 448
    scales = torch.where(scales > 0, scales, 1.0)
    return (source.float() / scales[..., None]).to(torch.float8_e4m3fn), scales


def fp8_dequantize(quantized: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    return (quantized.float() * scales[..., None]).to(dtype)


def float8_rounded(side: Tensor) -> Tensor:
    """What ``records="fp8"`` leaves of one side of a record, ``[..., group_tokens, head_dim]``."""
    values = side.float()
    largest = values.abs().where(values.isfinite(), 0.0).amax((-2, -1), keepdim=True)
    mantissa, exponent = torch.frexp(largest)
    exponent = exponent - 9 + (mantissa > 0.875).int()  # 448 is 0.875 * 2^9
    low, high = (-15, 7) if side.dtype == torch.float16 else (-117, 119)
    power = torch.ldexp(torch.ones_like(largest), exponent.clamp(low, high))
    scaled = (values / power).clamp(-448, 448).where(values.isfinite(), torch.nan)
    return (scaled.to(torch.float8_e4m3fn).float() * power).to(side.dtype)


def rounded_records(records: str, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """What records leave of their keys and values, each ``[..., group_tokens, head_dim]``."""
    if records == "fp8":
        return float8_rounded(keys), float8_rounded(values)
    if records == "model":
        return keys, values
    return int4_rounded(keys, 0), int4_rounded(values, 1)


def int4_rounded(rows: Tensor, side: int) -> Tensor:
    """As K (side 0) or as V of a record: neither depends on the other."""
    encoded = encode_int4_records(torch.stack([rows, rows], -3))
    return decode_int4_records(encoded, *rows.shape[-2:], rows.dtype)[..., side, :, :]


def encode_records(records: Tensor) -> tuple[Tensor, Tensor]:
    values = records.float()
    largest = values.abs().where(values.isfinite(), 0.0).amax((-2, -1))
    mantissa, exponent = torch.frexp(largest)
    low, high = (-15, 7) if records.dtype == torch.float16 else (-117, 119)
    exponent = (exponent - 9 + (mantissa > 0.875).int()).where(largest > 0, low).clamp(low, high)
    powers = torch.ldexp(torch.ones_like(largest), exponent)
    scaled = (values / powers[..., None, None]).clamp(-448, 448)
    scaled = scaled.where(values.isfinite(), torch.nan)
    return scaled.to(torch.float8_e4m3fn), exponent.to(torch.int8)


def decode_records(encoded: Tensor, exponents: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.ldexp(encoded.float(), exponents[..., None, None]).to(dtype)


def int4_block(head_dim: int) -> int:
    return next((size for size in (64, 32) if head_dim % size == 0), 16)


def rotated(rows: Tensor) -> Tensor:
    """``[..., head_dim]`` in fp32, each block times its Hadamard matrix; its own inverse."""
    block = int4_block(rows.shape[-1])
    blocks = rows.unflatten(-1, (-1, block))

    def summed(blocks: Tensor, halves: tuple[int, ...]) -> Tensor:
        for half in halves:
            pairs = blocks.unflatten(-1, (-1, 2, half))
            low, high = pairs[..., 0, :], pairs[..., 1, :]
            blocks = torch.stack([low + high, low - high], -2).flatten(-3)
        return blocks

    blocks = summed(blocks, tuple(2**i for i in range(block.bit_length() - 1)))
    return (blocks * torch.tensor(block**-0.5, dtype=torch.float32)).flatten(-2)


def int4_scale(code: Tensor) -> Tensor:
    bits = (code.to(torch.int32) + (107 * 8 - 1)) << 20
    scale = bits.view(torch.float32).where(code > 0, 0.0)
    return scale.where(code < 255, torch.nan)


def int4_row(rows: Tensor) -> tuple[Tensor, Tensor]:
    """``[..., head_dim]`` that are rotated: their bytes, and what these stand for."""
    block = int4_block(rows.shape[-1])
    blocks = rows.unflatten(-1, (-1, block))
    largest = blocks.abs().amax(-1)
    is_finite = blocks.isfinite().all(-1)
    bits = (largest.where(is_finite, 1.0) / 7.5).view(torch.int32)
    code = (((bits + (1 << 20) - 1) >> 20) - (107 * 8 - 1)).clamp(1, 254)
    code = code.where(largest > 0, 0).where(is_finite, 255)
    step = int4_scale(code)[..., None]
    inverse = (1.0 / step).where(step > 0, 0.0)
    levels = (blocks * inverse + 8.0).nan_to_num(0.0).clamp(0, 15).int()
    low, high = levels.chunk(2, -1)
    pairs = (low | high << 4).flatten(-2)
    return torch.cat([code, pairs], -1).to(torch.uint8), ((levels - 7.5) * step).flatten(-2)


def encode_int4_records(records: Tensor) -> Tensor:
    keys, values = rotated(records.float()).unbind(-3)
    is_finite = keys.isfinite().all(-1)
    total = torch.zeros_like(keys[..., 0, :])
    for token in range(keys.shape[-2]):
        total = total + keys[..., token, :].where(is_finite[..., token, None], 0.0)
    counted = is_finite.sum(-1, keepdim=True).clamp_min(1)
    mean, stands_for = int4_row(total * (1.0 / counted))
    apart = int4_row(keys - stands_for[..., None, :])[0]
    return torch.cat([mean[..., None, :], apart, int4_row(values)[0]], -2).flatten(-2)


def decode_int4_records(
    encoded: Tensor, group_tokens: int, head_dim: int, dtype: torch.dtype
) -> Tensor:
    block = int4_block(head_dim)
    rows = encoded.unflatten(-1, (2 * group_tokens + 1, -1))
    codes, pairs = rows.split([head_dim // block, head_dim // 2], -1)
    pairs = pairs.unflatten(-1, (-1, block // 2)).int()
    levels = torch.cat([pairs & 15, pairs >> 4], -1)
    found = ((levels - 7.5) * int4_scale(codes)[..., None]).flatten(-2)
    keys = found[..., 1 : group_tokens + 1, :] + found[..., :1, :]
    return rotated(torch.stack([keys, found[..., group_tokens + 1 :, :]], -3)).to(dtype)


def transfer_records(source: Tensor, target: Tensor, read: Tensor, written: Tensor) -> None:
    for row in range(len(read)):
        for i, j in zip(read[row].tolist(), written[row].tolist(), strict=True):
            if i < 0 or j < 0:
                continue
            if len(read) == 1:
                target[j] = source[i]
            else:
                target[j, row % target.shape[1]] = source[i, row % source.shape[1]]


def read_records(path: str, record_bytes: int, first_byte: int, records: Tensor) -> Tensor:
    whole = torch.from_numpy(np.fromfile(path, np.uint8))[first_byte:]
    return whole[: len(whole) // record_bytes * record_bytes].view(-1, record_bytes)[records]


def paged_attention(
    query: Tensor,
    pages: Tensor,
    table: Tensor,
    masks: Tensor,
    positions: Tensor,
    query_positions: Tensor,
    scale: float,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    keys, values = (side.double() for side in paged_gather(pages, table))
    slots = torch.arange(pages.shape[3])
    valid = (masks[..., None] >> slots & 1).bool() & (table >= 0)[..., None]
    seen_from = (positions[..., None] + slots).flatten(2)[:, :, None]
    at = query_positions[:, None, None, None] + torch.arange(query.shape[2])[:, None]
    visible = (valid.flatten(2)[:, :, None] & (seen_from <= at)).expand(-1, keys.shape[1], -1, -1)
    ratio = query.shape[1] // keys.shape[1]
    keys, values, visible = (x.repeat_interleave(ratio, 1) for x in (keys, values, visible))
    scores = query.double() @ keys.mT * scale
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    scores = scores.masked_fill(~visible, NEVER)
    if sinks is not None:
        position = sinks.double()[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, position], -1)
        values = torch.nn.functional.pad(values, (0, 0, 0, 1))
    output = torch.nan_to_num(scores.softmax(-1)) @ values
    return output.transpose(1, 2).to(query.dtype), scores.logsumexp(-1).float()


def attention_mass(
    query: Tensor,
    pages: Tensor,
    table: Tensor,
    masks: Tensor,
    positions: Tensor,
    query_positions: Tensor,
    log_sum_exp: Tensor,
    scale: float,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    keys, _ = (side.double() for side in paged_gather(pages, table))
    slots = torch.arange(pages.shape[3])
    valid = (masks[..., None] >> slots & 1).bool() & (table >= 0)[..., None]
    seen_from = (positions[..., None] + slots).flatten(2)[:, :, None]
    at = query_positions[:, None, None, None] + torch.arange(query.shape[2])[:, None]
    visible = (valid.flatten(2)[:, :, None] & (seen_from <= at)).expand(-1, keys.shape[1], -1, -1)
    return _mass(query, keys, visible, log_sum_exp, scale, softcap)


def observe_keys(
    query: Tensor,
    keys: Tensor,
    scale: float,
    valid: Tensor | None = None,
    log_sum_exp: Tensor | None = None,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    tokens, queries = keys.shape[2], query.shape[2]
    visible = torch.ones(queries, tokens, dtype=torch.bool).tril(tokens - queries)
    visible = visible.expand(len(keys), keys.shape[1], -1, -1)
    if valid is not None:
        visible = visible & valid[:, None, None]
    return _mass(query, keys.double(), visible, log_sum_exp, scale, softcap)


def _mass(query, keys, visible, log_sum_exp, scale, softcap) -> tuple[Tensor, Tensor]:
    """visible: [batch, kv_heads, queries, slots]."""
    apart = query.double().unflatten(1, (keys.shape[1], -1))  # [batch, kv_heads, ratio, queries, d]
    scores = apart @ keys[:, :, None].mT * scale
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    scores = scores.masked_fill(~visible[:, :, None], NEVER)
    if log_sum_exp is None:
        sums = scores.logsumexp(-1)
    else:
        sums = log_sum_exp.double().unflatten(1, (keys.shape[1], -1))
    weights = torch.nan_to_num((scores - sums[..., None]).exp(), posinf=0.0)
    weights = weights.masked_fill((sums == NEVER)[..., None], 0.0).flatten(2, 3)
    return weights.mean(2).float(), weights.square().mean(2).float()


def merge_attention(
    output: Tensor, log_sum_exp: Tensor, other_output: Tensor, other_log_sum_exp: Tensor
) -> tuple[Tensor, Tensor]:
    total = torch.logaddexp(log_sum_exp, other_log_sum_exp)
    weight = torch.nan_to_num((log_sum_exp - total).exp())[..., None]
    other_weight = torch.nan_to_num((other_log_sum_exp - total).exp())[..., None]
    return (weight * output.float() + other_weight * other_output.float()).to(output.dtype), total
