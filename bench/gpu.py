"""Each op on a GPU against the device's own copy bandwidth; ``python -m bench.gpu``.

The ratio is bytes that the op must move, per second, by what a plain copy of as many moves: 1 is as
fast as a copy. An op is timed with CUDA events around one call through torch.ops, with the second
cache emptied before, so the small launches of the torch layer are in it; kernel_ratio is of the
time that a profile gives our own kernels alone. `predicted` is what a reading of the machine code
expected before anything had run. Transfers of records from the host's memory are beside a copy from
there instead: in one piece, and record by record or head by head as a loop of copies would. What
`--seconds` leaves no time for is named.
Decoding is measured by bench/gpu_decode.py.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from kvswap_torch import ops

MIB = 2**20
# The ratio to copy speed that was expected, from registers, occupancy and loads in flight on sm_90.
PREDICTED = {
    "paged_attention": {"float32": "0.5-0.7", "d256": "0.7", "": "0.75-0.9"},
    "attention_mass": {"": "0.1"},
    "low_rank_score": {"int8": "0.3", "": "0.6-0.8"},
    "select_groups": {"int8": "0.3", "": "0.6-0.8"},
    "top_k_groups": {"": "0.3-0.6"},
    "project_keys": {"": "0.15"},
    # To a pinned copy of 55 GB/s. In one piece: the host gathers 64 MiB first, at some 20 GB/s.
    # One by one: each copy is 8 us of the host's, for 16 KiB, or 2 KiB of a head; a head of NHD is
    # eight rows, which the host gathers for each copy. None has run on a device.
    "transfer_records": {"": "0.2-0.4"},
    "transfer": {"NHD": "0.002-0.005", "head by head": "0.004-0.008", "": "0.03-0.06"},
}
PREDICTED_OTHERWISE = "0.8-0.95"
Call = Callable[[], object]


def seconds_of(call: Call, flush: torch.Tensor, repeats: int) -> float:
    """The median time of one call."""
    for _ in range(3):
        call()
    times = []
    for _ in range(repeats):
        flush.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times)


def kernel_seconds(call: Call, flush: torch.Tensor) -> float:
    """Of our own kernels in one call, by torch's profiler."""
    with profile(activities=[ProfilerActivity.CUDA]) as told:
        flush.zero_()
        call()
        torch.cuda.synchronize()
    ours = [event for event in told.key_averages() if "kvswap::" in event.key]
    return 1e-6 * sum(event.self_device_time_total for event in ours)


def bytes_of(*tensors: torch.Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def random(*shape: int, dtype: torch.dtype = torch.bfloat16, device: str = "cuda") -> torch.Tensor:
    return torch.randn(shape, device=device, dtype=dtype)


def select_cases(size: int, device: str = "cuda") -> dict[str, tuple[Call, int]]:
    """Score, ReduceMax, TopK and their fusion: groups of 4."""
    cases: dict[str, tuple[Call, int]] = {}
    for name, width, rank in (("bf16", 2, 64), ("bf16", 2, 32), ("int8", 1, 64)):
        blocks = size // (rank * 16 * width)
        scale = None
        if name == "int8":
            summary = torch.randint(-127, 128, (1, blocks, rank, 16), device=device).char()
            scale = torch.rand(1, blocks, 16, device=device)
        else:
            summary = random(1, blocks, rank, 16, device=device)
        query = random(1, 1, rank, dtype=torch.float32, device=device)
        moved = bytes_of(summary)
        cases[f"low_rank_score {name} r{rank}"] = (
            lambda s=summary, q=query, c=scale: ops.low_rank_score(s, q, c),
            moved + blocks * 64,
        )
        cases[f"select_groups {name} r{rank}, k 400"] = (
            lambda s=summary, q=query, c=scale: ops.select_groups(s, q[:, 0], 4, 400, c),
            moved,
        )
    scores = random(16, size // 64, dtype=torch.float32, device=device)
    cases["group_max 4"] = (lambda: ops.group_max(scores, 4), bytes_of(scores) * 5 // 4)
    cases["top_k_groups, 16 rows, k 400"] = (
        lambda: ops.top_k_groups(scores, 400),
        bytes_of(scores),
    )
    return cases


def record_cases(size: int, device: str = "cuda") -> dict[str, tuple[Call, int]]:
    """What moves records: 8 KV heads, head_dim 128, groups of 4; and fp8, the merge, K_lr."""
    tokens = size // (2 * 8 * 128 * 2)
    nhd = [random(1, tokens, 8, 128, device=device).transpose(1, 2) for _ in range(2)]
    hnd = [random(1, 8, tokens, 128, device=device) for _ in range(2)]
    records = ops.pack_records(*hnd, 4)
    table = torch.randperm(tokens // 4, device=device).int()[None, None]
    quantized, scales = ops.fp8_quantize(hnd[0])
    sums = random(1, 8, tokens, dtype=torch.float32, device=device)
    projection = random(8 * 128, 64, dtype=torch.float32, device=device)
    moved = bytes_of(*hnd)
    return {
        "pack_records from NHD": (lambda: ops.pack_records(*nhd, 4), 2 * moved),
        "pack_records from HND": (lambda: ops.pack_records(*hnd, 4), 2 * moved),
        "unpack_records to NHD": (lambda: ops.unpack_records(records, tokens, "nhd"), 2 * moved),
        "paged_gather": (lambda: ops.paged_gather(records[0], table), 2 * moved),
        "fp8_quantize": (
            lambda: ops.fp8_quantize(hnd[0]),
            bytes_of(hnd[0], quantized, scales),
        ),
        "fp8_dequantize": (
            lambda: ops.fp8_dequantize(quantized, scales, torch.bfloat16),
            bytes_of(hnd[0], quantized, scales),
        ),
        # The op leaves its inputs alone, so it copies one side first: 2 more of it.
        "merge_attention": (
            lambda: ops.merge_attention(hnd[0], sums, hnd[1], sums),
            bytes_of(hnd[0]) * 5,
        ),
        "project_keys, rank 64": (lambda: ops.project_keys(nhd[0], projection), moved // 2),
    }


def attention_cases(size: int, device: str = "cuda") -> dict[str, tuple[Call, int]]:
    """One query a sequence over all pages."""
    cases: dict[str, tuple[Call, int]] = {}
    for batch, ratio, head_dim, dtype in (
        (1, 4, 128, torch.bfloat16),
        (1, 8, 128, torch.float16),
        (1, 1, 64, torch.bfloat16),
        (1, 4, 96, torch.bfloat16),
        (1, 4, 256, torch.bfloat16),
        (64, 4, 128, torch.bfloat16),
        (1, 4, 128, torch.float32),
    ):
        width = torch.finfo(dtype).bits // 8
        pages = size // (batch * 8 * 2 * 4 * head_dim * width)
        pool = random(batch * pages, 8, 2, 4, head_dim, dtype=dtype, device=device)
        table = torch.randperm(batch * pages, device=device).int().view(batch, 1, pages)
        masks = torch.full(table.shape, 15, device=device)
        positions = (torch.arange(pages, device=device) * 4).int().expand(table.shape).contiguous()
        at = torch.full((batch,), 4 * pages, device=device, dtype=torch.int32)
        query = random(batch, 8 * ratio, 1, head_dim, dtype=dtype, device=device)
        given = (query, pool, table, masks, positions, at, head_dim**-0.5)
        name = f"paged_attention b{batch} gqa{ratio} d{head_dim} {str(dtype)[6:]}"
        cases[name] = (lambda a=given: ops.paged_attention(*a), bytes_of(pool))
        massed = (*given[:6], ops.paged_attention(*given)[1], given[6])
        mass = name.replace("paged_attention", "attention_mass")
        cases[mass] = (lambda a=massed: ops.attention_mass(*a), bytes_of(pool) // 2)
    return cases


def transfer_cases(size: int, device: str = "cuda") -> dict[str, tuple[Call, int]]:
    """From the host's memory to the device's, at most 64 MiB; records as of `record_cases`.

    In one piece by our op, and as a loop of copies of one record, or of one head of a record: with
    HND records a head is one run of bytes, with NHD it is a row for each token.
    """
    count = max(1, min(size, 64 * MIB) // (8 * 2 * 4 * 128 * 2))
    pinned = device != "cpu"
    source = torch.randn(count, 8, 2, 4, 128).bfloat16()
    nhd = source.permute(0, 2, 3, 1, 4).contiguous()  # [count, 2, tokens, kv_heads, head_dim]
    if pinned:
        source, nhd = source.pin_memory(), nhd.pin_memory()
    target = torch.zeros_like(source, device=device)
    slots = torch.randperm(count).int()
    table, here = slots[None], torch.arange(count, dtype=torch.int32)[None]
    order = slots.tolist()
    fewer = max(1, count // 8)  # as many copies as there are records: an eighth of the bytes

    def in_one_piece() -> torch.Tensor:
        ops.transfer_records(source, target, table, here)
        return target

    def record_by_record() -> torch.Tensor:
        for i, slot in enumerate(order):
            target[i].copy_(source[slot], non_blocking=True)
        return target

    def head_by_head(pool: torch.Tensor, is_nhd: bool) -> torch.Tensor:
        for i, slot in enumerate(order[:fewer]):
            for head in range(8):
                given = pool[slot, :, :, head] if is_nhd else pool[slot, head]
                target[i, head].copy_(given, non_blocking=True)
        return target[:fewer]

    moved, of_fewer = bytes_of(source), bytes_of(source[:fewer])
    return {
        "transfer_records, in one piece": (in_one_piece, moved),
        "transfer, record by record": (record_by_record, moved),
        "transfer, head by head of HND": (lambda: head_by_head(source, False), of_fewer),
        "transfer, head by head of NHD": (lambda: head_by_head(nhd, True), of_fewer),
    }  # fmt: skip


def host_bandwidth(size: int, flush: torch.Tensor, repeats: int) -> float:
    """Bytes per second of one copy from pinned memory to the device."""
    source = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(size, dtype=torch.uint8, device="cuda")
    call = lambda: target.copy_(source, non_blocking=True)  # noqa: E731
    return size / seconds_of(call, flush, repeats)


def copy_bandwidth(size: int, flush: torch.Tensor, repeats: int) -> float:
    """Bytes read and written per second by a copy that moves `size` bytes in all."""
    source = torch.empty(size // 2, device="cuda", dtype=torch.uint8)
    target = torch.empty_like(source)
    return size / seconds_of(lambda: target.copy_(source), flush, repeats)


def predicted(name: str) -> str:
    """What was expected of the op of this row; the first key that the name contains counts."""
    expected = PREDICTED.get(name.replace(",", "").split()[0], {"": PREDICTED_OTHERWISE})
    return next(value for key, value in expected.items() if key in name)


def row_of(
    name: str, size: int, moved: int, seconds: float, in_kernels: float, copy: float
) -> dict[str, Any]:
    return {
        "op": name,
        "input_mib": size,
        "microseconds": round(seconds * 1e6, 1),
        "gb_per_s": round(moved / seconds / 1e9, 1),
        "copy_gb_per_s": round(copy / 1e9, 1),
        "ratio": round(moved / seconds / copy, 3),
        "predicted": predicted(name),
        "kernel_ratio": round(moved / in_kernels / copy, 3) if in_kernels else None,
    }


def ceilings(flush: torch.Tensor, repeats: int) -> dict[str, float]:
    """The machine's best: copies in GB/s, the host's microseconds a launch."""
    here = torch.empty(256 * MIB, dtype=torch.uint8, device="cuda")
    pinned = torch.empty(256 * MIB, dtype=torch.uint8, pin_memory=True)
    to_device = seconds_of(lambda: here.copy_(pinned, non_blocking=True), flush, repeats)
    to_host = seconds_of(lambda: pinned.copy_(here, non_blocking=True), flush, repeats)
    one = torch.zeros(1, device="cuda")
    launches = 1000
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(launches):
        one.add_(1)
    torch.cuda.synchronize()
    launch = (time.perf_counter() - began) / launches
    found = {
        "device_copy_gb_per_s": copy_bandwidth(512 * MIB, flush, repeats) / 1e9,
        "host_to_device_gb_per_s": len(pinned) / to_device / 1e9,
        "device_to_host_gb_per_s": len(pinned) / to_host / 1e9,
        "torch_launch_us": launch * 1e6,
    }
    return {name: round(value, 2) for name, value in found.items()}


def measure(sizes: list[int], repeats: int, seconds: float, path: Path | None) -> None:
    """Prints a line a row; `path` holds what there is after each, so that a kill loses little."""
    began = time.perf_counter()
    flush = torch.empty(512 * MIB, device="cuda", dtype=torch.uint8)
    results: dict[str, Any] = {"ceilings": ceilings(flush, repeats), "rows": [], "left_out": []}
    print(*results["ceilings"].items(), flush=True)
    for size in sizes:
        for make in (attention_cases, select_cases, record_cases, transfer_cases):
            if time.perf_counter() - began > seconds:
                results["left_out"].append(f"{size} MiB, {make.__name__}: time")
                continue
            for name, (call, moved) in make(size * MIB).items():
                if time.perf_counter() - began > seconds:
                    results["left_out"].append(f"{size} MiB, {name}: time")
                    continue
                took = seconds_of(call, flush, repeats)
                in_kernels = kernel_seconds(call, flush)
                bandwidth = host_bandwidth if make is transfer_cases else copy_bandwidth
                copy = bandwidth(moved, flush, repeats)
                row = row_of(name, size, moved, took, in_kernels, copy)
                results["rows"].append(row)
                print(f"{size:5} MiB  {name:42} {row['gb_per_s']:8} GB/s  ratio {row['ratio']},"
                      f" of the kernels {row['kernel_ratio']}", flush=True)  # fmt: skip
                if path:
                    path.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
            torch.cuda.empty_cache()
    for each in results["left_out"]:
        print(f"left out: {each}", flush=True)
    if path:
        path.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[64, 512], help="MiB of input")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=120, help="no row begins after so long")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    args = parser.parse_args()
    measure(args.sizes, args.repeats, args.seconds, args.json)


if __name__ == "__main__":
    main()
