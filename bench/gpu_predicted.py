"""What decoding on a GPU was expected to take, written before a run: bench/gpu_decode.py's rows.

A number is a step of ours by a step of the peer, with records in memory (tmpfs): 2 is twice as
long. The bases are the steps that docs/gpu.md has of an H100 (26 November 2026), where a step of
ours is some 4 ms of the host's work above the peer's at batch 1; two thirds of those for batches of
8 and more, since sessions have threads of their own (bench/notes/2026-11-gpu-host.md: 21.6 and
13.7 ms); for a text's choices that note's steps on an H200. The batch of 32 never ran: it is twice
the batch of 16's step, by 16 GiB read over PCIe at 55 GB/s, 312 ms.
"""

from __future__ import annotations

# (tokens, batch) of shape 8b-layers: the peer, and a range for each of ours.
PREDICTED: dict[tuple[int, int], tuple[str, dict[str, str]]] = {
    (32768, 1): ("inplace", {
        "kvswap": "2-2.5", "kvswap-k400": "2.8-3.5", "kvswap-fp8": "2-3.1",
        "kvswap-int4": "2-3.1", "kvswap-text": "1.6-2.1", "kvswap-text-k400": "1.8-3"}),
    (32768, 4): ("inplace", {
        "kvswap": "2-2.7", "kvswap-k400": "4-5.5", "kvswap-fp8": "1.8-2.5",
        "kvswap-int4": "1.8-2.5", "kvswap-text": "1.7-2.4", "kvswap-text-k400": "2.5-5"}),
    (32768, 8): ("inplace", {
        "kvswap": "3-4", "kvswap-k400": "8-13", "kvswap-fp8": "2.7-4.1",
        "kvswap-int4": "2.5-4.1", "kvswap-text": "1.6-2.9", "kvswap-text-k400": "3-6"}),
    (32768, 16): ("inplace", {
        "kvswap": "3.2-4.9", "kvswap-k400": "8.5-13", "kvswap-fp8": "2.2-3.4",
        "kvswap-int4": "2.2-3.4", "kvswap-text": "1.8-3.5", "kvswap-text-k400": "4-8"}),
    (32768, 32): ("offloaded", {
        "kvswap": "0.1-0.16", "kvswap-k400": "0.27-0.41", "kvswap-fp8": "0.07-0.11",
        "kvswap-int4": "0.06-0.11", "kvswap-text": "0.04-0.1", "kvswap-text-k400": "0.1-0.3"}),
    (131072, 1): ("inplace", {
        "kvswap": "1.8-2.2", "kvswap-k400": "2.5-3.1", "kvswap-fp8": "1.5-1.9",
        "kvswap-int4": "1.5-1.9", "kvswap-text": "1.4-2", "kvswap-text-k400": "1.6-2.8"}),
}  # fmt: skip


def predicted(shape_name: str, context: int, batch: int, cache: str) -> dict[str, str] | None:
    """Of that row: the peer and the range; None where nothing was expected of it."""
    if shape_name != "8b-layers" or (context, batch) not in PREDICTED:
        return None
    peer, ranges = PREDICTED[context, batch]
    return {"peer": peer, "ratio": ranges[cache]} if cache in ranges else None
