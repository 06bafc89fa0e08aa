"""The ops over records: their way between pools of pages, and their forms of eight and four bits.

Conventions are those of `kvswap_torch.ops`, which has them too.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvswap_torch.op_library import compiled as _ops


def transfer_records(
    source: Tensor, target: Tensor, source_slots: Tensor, target_slots: Tensor
) -> None:
    """Batched HND transfer: many records, or single heads of them, from one pool into another.

    A head's K and V stand side by side in a record, so that each head's choice is one copy (PRKV
    section 4.2). Between the host's memory and a device's all of them go in one piece.

    Parameters
    ----------
    source
        ``[slots, kv_heads, 2, group_tokens, head_dim]`` of any dtype.
    target
        The same but for the slots, contiguous: it is written in place. With a row of slots for
        each KV head, pages of either side may hold single heads (``kv_heads`` of 1).
    source_slots, target_slots
        ``[1 or kv_heads, count]`` int32 on the CPU; what is -1 in either is left out. No row of
        `target_slots` names a slot twice; if pages hold single heads, all rows together do not.
    """
    _ops.transfer_records(source, target, source_slots, target_slots)


def encode_records(records: Tensor) -> tuple[Tensor, Tensor]:
    """Rounds records to e4m3 as the cache does with ``storage.kv_dtype="fp8_e4m3"``.

    One power of two for the K of a KV head of a record, and one for its V: decoding is exact, and
    encoding again changes nothing. `fp8_quantize` has a scale for each row instead.

    Parameters
    ----------
    records
        ``[..., kv_heads, 2, group_tokens, head_dim]``, fp32, bf16 or fp16, on the CPU.

    Returns
    -------
    encoded
        The same shape, ``float8_e4m3fn``. What is not finite becomes NaN.
    exponents
        ``[..., kv_heads, 2]`` int8: an element is its e4m3 value times 2 to the exponent.
    """
    return _ops.encode_records(records)


def decode_records(encoded: Tensor, exponents: Tensor, dtype: torch.dtype) -> Tensor:
    """The way back from :func:`encode_records`.

    Parameters
    ----------
    encoded
        ``[..., kv_heads, 2, group_tokens, head_dim]`` ``float8_e4m3fn`` on the CPU.
    exponents
        ``[..., kv_heads, 2]`` int8, -117..119, for fp16 -15..7.
    dtype
        fp32, bf16 or fp16.

    Returns
    -------
    Tensor
        The same shape, of ``dtype``.
    """
    return _ops.decode_records(encoded, exponents, dtype)


def encode_int4_records(records: Tensor) -> Tensor:
    """Rounds records to four bits an element, as a file has them with ``storage.kv_dtype="int4"``.

    Rows are rotated by a Hadamard matrix (QuaRot) in blocks of 64, 32 or 16 elements, the largest
    that divides `head_dim`; each block has levels of 4 bits and a scale of 8. K is coded as the
    mean of the record's rows and each row's difference to it: KIVI's range for each channel, in a
    record that needs no other one. Coding again what was decoded may round again.

    Parameters
    ----------
    records
        ``[..., kv_heads, 2, group_tokens, head_dim]``, fp32, bf16 or fp16, on the CPU; `head_dim`
        a multiple of 16.

    Returns
    -------
    Tensor
        ``[..., kv_heads, (2 * group_tokens + 1) * row_bytes]`` uint8: the mean of K, K, V. A row is
        a byte of scale for each block, then `head_dim` / 2 bytes. A block with what is not finite
        becomes NaN.
    """
    return _ops.encode_int4_records(records)


def decode_int4_records(
    encoded: Tensor, group_tokens: int, head_dim: int, dtype: torch.dtype
) -> Tensor:
    """The way back from :func:`encode_int4_records`.

    Parameters
    ----------
    encoded
        ``[..., kv_heads, bytes]`` uint8 on the CPU, as they were encoded.
    group_tokens, head_dim
        Of the records.
    dtype
        fp32, bf16 or fp16.

    Returns
    -------
    Tensor
        ``[..., kv_heads, 2, group_tokens, head_dim]`` of ``dtype``.
    """
    return _ops.decode_int4_records(encoded, group_tokens, head_dim, dtype)
