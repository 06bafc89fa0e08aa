"""What turns of kept tokens cost: seconds of all, and of the longest step beside the median one.

    python -m bench.kept_turns --shape 1b --layers 4 --context 32768 --out kept_turns_1b_32k

Caches of random keys and values, as `bench.side_by_side` fills them, decode through several
intervals under presets whose tokens are chosen anew while decoding, a token of each in turn: by
what was attended (prkv) and by all that is on disk (snapkv+, whose turns are spread over an
interval). Of each the prompt's turn is left out.
"""

from __future__ import annotations

import statistics
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from bench import machine
from bench.contenders import ROOM_TOKENS, open_preset
from bench.shapes import SHAPES, make_model

COUNTED = ("turns", "turn_seconds", "turn_bytes_read", "bytes_read")


def told(steps: list[dict[str, float]]) -> dict[str, Any]:
    """Of an interval or more."""
    seconds = [step["seconds"] for step in steps]
    turning = sum(step["turn_seconds"] for step in steps)
    return {
        "steps": len(steps),
        "ms": round(1e3 * statistics.median(seconds), 2),
        "ms_of_98_in_100": round(1e3 * statistics.quantiles(seconds, n=50)[-1], 2),
        "ms_longest": round(1e3 * max(seconds), 2),
        "turns": int(sum(step["turns"] for step in steps)),
        "turns_of_a_step": int(max(step["turns"] for step in steps)),
        "turn_ms": round(1e3 * turning / max(1, sum(step["turns"] for step in steps)), 3),
        "share_of_time": round(turning / sum(seconds), 5),
        "turn_bytes_read": int(sum(step["turn_bytes_read"] for step in steps)),
        "bytes_read": round(sum(step["bytes_read"] for step in steps) / len(steps)),
        "bytes_read_longest": int(max(step["bytes_read"] for step in steps)),
    }


def main(
    shape_name: Annotated[str, typer.Option("--shape", help="1b, small or 8b-layers")] = "1b",
    layers: Annotated[int, typer.Option(help="cut the model to so many layers; 0: all")] = 4,
    context: Annotated[int, typer.Option(help="tokens in the cache")] = 32768,
    batch: Annotated[int, typer.Option(help="sequences")] = 1,
    presets: Annotated[str, typer.Option(help="names")] = "prkv,snapkv+",
    steps: Annotated[int, typer.Option(help="tokens decoded and measured")] = 256,
    threads: Annotated[int, typer.Option(help="of torch")] = 1,
    path: Annotated[Path | None, typer.Option(help="folder on the disk to measure")] = None,
    out: Annotated[str, typer.Option(help="name under bench/results; empty: none")] = "",
) -> None:
    """Turns of presets that choose anew while decoding."""
    torch.set_num_threads(threads)
    shape = SHAPES[shape_name]
    shape = replace(shape, layers=layers) if layers else shape
    model = make_model(shape, context + ROOM_TOKENS)
    names = presets.split(",")
    with tempfile.TemporaryDirectory(dir=path) as folder:
        opened = [
            open_preset(name, model, shape, batch, context, Path(folder), None) for name in names
        ]
        counted: dict[str, list[dict[str, float]]] = {name: [] for name in names}
        for step in range(steps + 1):
            for name, each in zip(names, opened, strict=True):
                before = dict(each.cache.driver.session.counters())
                each.step()
                after = each.cache.driver.session.counters()
                grown = {key: after[key] - before[key] for key in COUNTED}
                if step > 0:  # the first has the prompt's turn
                    counted[name].append(grown | {"seconds": each.seconds[-1]})
        for each in opened:
            each.close()
    rows = {name: told(of_preset) for name, of_preset in counted.items()}
    for name, row in rows.items():
        print(name, row)
    if out:
        results = {"machine": machine.describe(path or "."), "shape": shape_name, "layers": layers}
        results |= {"context": context, "batch": batch, "threads": threads, "presets": rows}
        print(f"wrote {machine.write(out, results)}")


if __name__ == "__main__":
    typer.run(main)
