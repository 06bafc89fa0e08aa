"""Tables 5 and 6: reading a prompt, asking about what is read, and the tuner."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bench.pages.caption import LEVELS, NOT_MEASURED, caption, head, line
from kvswap_torch import format_bytes

Result = dict[str, Any]
LOWER = "Lower is better"
OURS = "kvswap 1/13"


def prefill_rows(results: list[Result]) -> Iterator[str]:
    what = "Seconds to read a prompt in chunks, defaults, 1/13 of the full cache's memory."
    yield caption(what, results, LOWER)
    columns = ("model, precision", "kernels", "tokens, chunk", "DynamicCache", "StaticCache")
    yield from head([*columns, "kvswap", "kvswap's time over DynamicCache's, of pairs"])
    for result in results:
        model = result["model"] if result["layers"] == 0 else f"{result['model']} (4 layers)"
        place = [f"{model}, {result.get('dtype', 'bfloat16')}", LEVELS[result["machine"]["simd"]]]
        for chunk, rows in result["chunks"].items():
            seconds = [_seconds(rows, name) for name in ("DynamicCache", "StaticCache", OURS)]
            ratio = f"{rows[OURS]['ratio_of_pairs']:.2f}"
            yield line([*place, f"{result['tokens']:,}, {int(chunk):,}", *seconds, ratio])
            place = ["", ""]


def _seconds(rows: Result, name: str) -> str:
    return f"{rows[name]['seconds']:.1f}" if name in rows else NOT_MEASURED


def turns_rows(results: list[Result]) -> Iterator[str]:
    what = (
        "Seconds to the first token of a second question (64 tokens) about a document that was"
        " read, published settings, and memory held."
    )
    yield caption(what, results, LOWER)
    columns = ("model, tokens", "document read again", "DynamicCache that holds it")
    yield from head([*columns, "kvswap that holds it", "KV memory of kvswap"])
    for result in results:
        turn = result["second_turn_seconds"]
        names = ("recomputed", "DynamicCache", "kvswap")
        memory = f"{format_bytes(result['kv_memory_bytes'])}, {result['memory_share']:.1%}"
        place = f"{result['shape']} ({result['layers']} layers), {result['tokens']:,}"
        yield line([place, *(f"{turn[name]:.3f}" for name in names), memory])


def tuner_rows(results: list[Result]) -> Iterator[str]:
    what = (
        "The tuner's predicted step times beside measured ones, and the step of the setting it"
        " chose beside the fastest measured setting that finds as much: reference model, 1/13."
    )
    yield caption(what, results, "Errors and times: lower is better")
    columns = ("disk", "tokens, batch", "seconds to tune", "settings measured")
    columns += ("error of predictions, median", "nine in ten below")
    yield from head([*columns, "chosen setting, ms per step", "fastest setting, ms per step"])
    for result in results:
        took = result["tune_seconds"]
        yield line(
            [
                result["device"],
                f"{result['context']:,}, {result['batch']}",
                NOT_MEASURED if took is None else f"{took:.0f}",
                str(result["settings_measured"]),
                f"{result['error_median']:.1%}",
                f"{result['error_p90']:.1%}",
                f"{result['tuned']['ms']:.1f}",
                f"{result['best']['ms']:.1f}",
            ]
        )


def reader_rows(results: list[Result]) -> Iterator[str]:
    what = "Direct random reads beside fio on the same file, 64 in flight, medians of 15 pairs."
    yield caption(what, results, "Higher is better")
    yield from head(
        ("bytes of a read", "our reader, MB/s", "fio, MB/s", "ours over fio's, of pairs")
    )
    for result in results:
        for stream in result["streams"]:
            rates = [f"{stream[f'{who}_mb_per_second']:.0f}" for who in ("ours", "fio")]
            yield line([f"{stream['block_bytes']:,}", *rates, f"{stream['ratio_of_pairs']:.2f}"])
