"""Decoding on a GPU: KV on disk against KV in its memory and in the host's.

    python -m bench.gpu_decode --out gpu_decode

Fills caches with random keys and values and decodes with a randomly initialised model, over
contexts and batches of an 8B model's layers and of one smaller shape. A step ends when the device
is done, and medians are reported. `inplace` is the strongest peer: a cache of fixed size in the
device's memory, written in place and attended by a flash kernel without a mask. `offloaded` is
transformers' own for what does not fit: all of it in the host's memory, a layer copied to the
device at a time. Random choices are our worst case, nothing is selected twice; `kvswap-text`
selects, and predicts, what SmolLM2 did in a text. What does not fit in memory or in `--seconds` is
named under "skipped"; `--memory-gib 16` leaves out what a card of so much could not hold, which at
batch 32 are all peers but `offloaded`. Rows say what bench/gpu_predicted.py expected of them.
`--device cpu --tiny` shows in seconds that the script works.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import Cache, DynamicLayer

from bench import machine
from bench.gpu_predicted import predicted
from bench.shapes import SHAPES, Shape, make_model
from kvswap_torch import KVSwapCache, SwapConfig
from kvswap_torch.cache_argument import cache_argument

FILL_BYTES = 64 << 20  # of keys, at once
SELECTED_TOKENS = 400
ROOM_TOKENS = 256  # decoded at most
DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Case:
    """One row's setting."""

    shape_name: str
    shape: Shape
    context: int
    batch: int

    @property
    def kv_bytes(self) -> int:
        return self.shape.kv_bytes(self.batch, self.context)


# Settings of ours by name: tokens attended per step, and how records are stored.
OURS = {
    "kvswap": {},
    "kvswap-k400": {"selection.top_k_groups": 400, "memory.pages_per_layer": 600},
    "kvswap-fp8": {"storage.kv_dtype": "fp8_e4m3"},
    "kvswap-int4": {"storage.kv_dtype": "int4"},
    "kvswap-text": {"prefetch.mode": "verify", "memory.pages_per_layer": 400},
    "kvswap-text-k400": {
        "prefetch.mode": "verify",
        "selection.top_k_groups": 400,
        "memory.pages_per_layer": 1600,
    },
}
# These select, step by step, what SmolLM2 selected in a text (bench/recorded.py).
OF_A_TEXT = ("kvswap-text", "kvswap-text-k400")
CONTENDERS = (*OURS, "inplace", "dynamic", "offloaded")


class InPlaceLayer(DynamicLayer):
    """Keys and values of a layer in tensors of a fixed size, written in place."""

    def __init__(self, tokens_max: int):
        super().__init__()
        self.tokens_max = tokens_max
        self.length = 0
        self.buffers: tuple[torch.Tensor, ...] = ()

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        """Both of [batch, kv_heads, tokens, head_dim]; returns views of all so far."""
        if not self.buffers:
            self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True
            batch, kv_heads, _, head_dim = key_states.shape
            size = (batch, kv_heads, self.tokens_max, head_dim)
            self.buffers = tuple(key_states.new_empty(size) for _ in range(2))
        end = self.length + key_states.shape[2]
        for buffer, new in zip(self.buffers, (key_states, value_states), strict=True):
            buffer[:, :, self.length : end] = new
        self.length = end
        self.keys, self.values = (buffer[:, :, :end] for buffer in self.buffers)
        return self.keys, self.values


def cases(tiny: bool) -> list[Case]:
    if tiny:
        shape = Shape(2, 64, 4, 2, 64, 128)
        return [
            Case("tiny", shape, context, batch) for context in (4096, 16384) for batch in (1, 2)
        ]
    small, large = replace(SHAPES["1b"], layers=4), SHAPES["8b-layers"]
    grid = [Case("8b-layers", large, 32768, batch) for batch in (8, 1)]
    grid += [Case("8b-layers", large, 131072, 1)]
    grid += [Case("8b-layers", large, 32768, batch) for batch in (16, 4, 32)]
    for context in (32768, 16384, 8192):
        grid += [Case("1b", small, context, batch) for batch in (1, 4, 8, 16)]
    return grid


def pieces(case: Case, device: torch.device) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """A layer's keys and values, some tokens at a time; the same for every layer."""
    shape = case.shape
    token_bytes = case.batch * shape.kv_heads * shape.head_dim * DTYPE.itemsize
    tokens_max = max(64, FILL_BYTES // token_bytes)
    generator = torch.Generator(device).manual_seed(case.context)
    for begin in range(0, case.context, tokens_max):
        tokens = min(tokens_max, case.context - begin)
        size = (case.batch, shape.kv_heads, tokens, shape.head_dim)
        keys = torch.randn(size, generator=generator, device=device, dtype=DTYPE)
        yield keys, keys.flip(-1)


def config_of(name: str) -> SwapConfig:
    settings = {
        "selection.group_tokens": 4,
        "selection.score": "logit_sum",
        "summary.rank": 16,  # doubled by a cache that has no projection file
        "selection.top_k_groups": SELECTED_TOKENS // 4,
        "memory.pages_per_layer": 150,
        "selection.max_step_tokens": 1,
        "prefetch.mode": "trust",
    }
    return SwapConfig().with_settings(settings | OURS[name])


def open_kvswap(name: str, model: Any, case: Case, path: Path, device: torch.device) -> KVSwapCache:
    cache = KVSwapCache(
        model,
        path=path,
        config=config_of(name),
        max_context=case.context + ROOM_TOKENS,
        max_batch=case.batch,
    )
    width = case.shape.kv_heads * case.shape.head_dim
    generator = torch.Generator().manual_seed(1)
    basis = torch.linalg.qr(torch.randn(width, cache.driver.ranks[0], generator=generator))[0]
    for layer in range(case.shape.layers):
        cache.driver.session.set_projection(layer, basis, basis)
        for keys, values in pieces(case, device):
            cache.driver.session.append(layer, keys, values)
    return cache


def open_cache(name: str, model: Any, case: Case, path: Path, device: torch.device) -> Any:
    if name in OURS:
        return open_kvswap(name, model, case, path, device)
    if name == "inplace":
        rows = case.context + ROOM_TOKENS
        cache = Cache(layers=[InPlaceLayer(rows) for _ in range(case.shape.layers)])
    elif name == "offloaded":
        cache = DynamicCache(config=model.config, offloading=True)
    else:
        cache = DynamicCache(config=model.config)
    for layer in range(case.shape.layers):
        given = pieces(case, device)
        if name == "offloaded":  # takes nothing more for a layer that it has put away
            given = [tuple(torch.cat(side, 2) for side in zip(*given, strict=True))]
        for keys, values in given:
            cache.update(keys, values, layer)
    return cache


def recorded_choices(name: str, case: Case) -> Any:
    """What a model selected in a text, for a row that selects so; ValueError: it is too short."""
    if name not in OF_A_TEXT:
        return None
    from bench.recorded import Recorded

    selection = config_of(name).selection
    groups = case.context // selection.group_tokens
    return Recorded.load("smollm2").scaled(case.shape.layers, groups, selection.top_k_groups)


def finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@torch.inference_mode()
def decode(
    model: Any,
    cache: Any,
    case: Case,
    device: torch.device,
    steps: int,
    begin: int | None = None,
    before_step: Callable[[int], None] = lambda step: None,
) -> list[float]:
    """Seconds of each step, until the device is done; the first token's position is `begin`."""
    ids = torch.full((case.batch, 1), 7, device=device)
    begin = case.context if begin is None else begin
    seconds = []
    for step in range(steps):
        positions = torch.full_like(ids, begin + step)
        before_step(begin + step - case.context)
        finish(device)
        began = time.perf_counter()
        output = model(
            input_ids=ids, **cache_argument(model, cache), position_ids=positions, use_cache=True
        )
        ids = output.logits[:, -1:].argmax(-1)
        finish(device)
        seconds.append(time.perf_counter() - began)
    return seconds


def measure(
    name: str, model: Any, case: Case, path: Path, device: torch.device, steps: int
) -> dict[str, Any]:
    """One row: medians of one contender in one case."""
    recorded = recorded_choices(name, case)
    began = time.perf_counter()
    cache = open_cache(name, model, case, path, device)
    try:
        finish(device)
        filled = time.perf_counter()
        # Each of its steps copies the whole cache: few are enough, more than few are minutes.
        steps, warm_up = (4, 1) if name == "offloaded" else (steps, steps // 4)
        chooses = [recorded.follow(cache.driver.session, case.batch)] if recorded else []
        decode(model, cache, case, device, warm_up, None, *chooses)
        before = cache.stats() if name in OURS else None
        begin = case.context + warm_up
        seconds = decode(model, cache, case, device, steps - warm_up, begin, *chooses)
        account = {} if before is None else _account(before, cache.stats(), len(seconds))
    finally:
        if hasattr(cache, "close"):
            cache.close()
    row: dict[str, Any] = {
        "shape": case.shape_name,
        "layers": case.shape.layers,
        "context": case.context,
        "batch": case.batch,
        "cache": name,
        "ms_median": round(1e3 * statistics.median(seconds), 3),
        "ms_min": round(1e3 * min(seconds), 3),
        "ms_max": round(1e3 * max(seconds), 3),
        "steps": len(seconds),
        "fill_seconds": round(filled - began, 2),
        "kv_bytes_full": case.kv_bytes,
    }
    if expected := predicted(case.shape_name, case.context, case.batch, name):
        row["predicted"] = expected
    return row | ({"stats": account} if account else {})


def _account(before: Any, stats: Any, steps: int) -> dict[str, Any]:
    """What the measured steps did: the difference of two stats()."""
    counters = {name: value - before.counters[name] for name, value in stats.counters.items()}
    clocks = ("select", "plan", "wait", "hidden", "attend", "append", "write_blocked",
              "device_wait", "choice_wait")  # fmt: skip
    return {
        "resident_bytes": stats.resident_bytes,
        "device_bytes": stats.device_bytes,
        "pinned_bytes": stats.pinned_bytes,
        "hit_rate": round(1 - counters["groups_loaded"] / max(1, counters["groups_attended"]), 3),
        "copy_bytes_per_second": round(stats.copy_bytes_per_second),
        "copied_bytes_per_step": round(counters["copied_bytes"] / steps),
        "read_bytes_per_step": round(counters["bytes_read"] / steps),
        "read_calls_per_step": round(counters["read_calls"] / steps),
        "ms_per_step": {name: round(1e3 * counters[f"{name}_seconds"] / steps, 3)
                        for name in clocks},
    }  # fmt: skip


def room_on(device: torch.device, memory_gib: float | None) -> float:
    """Bytes that a cache may take: what is free, or less if a smaller card is asked for."""
    limit = float("inf") if memory_gib is None else memory_gib * 2**30
    free = float("inf") if device.type == "cpu" else torch.cuda.mem_get_info(device)[0]
    return min(free, limit)


def fits(name: str, case: Case, room: float) -> bool:
    """Whether a cache that is whole in memory, twice while it grows, leaves room for the model."""
    if name in OURS or name == "offloaded":
        return True
    return (1.3 if name == "inplace" else 2.5) * case.kv_bytes < room


def parse() -> argparse.Namespace:
    # Not typer: a machine with a GPU may lack it.
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1, cpu")
    parser.add_argument("--tiny", action="store_true", help="a small model and short contexts")
    parser.add_argument("--steps", type=int, default=24, help="tokens to decode with each cache")
    parser.add_argument("--seconds", type=float, default=220, help="no row begins after so long")
    parser.add_argument("--memory-gib", type=float, help="count no more of the device's memory")
    parser.add_argument(
        "--path", type=Path, default=Path("."), help="folder on the disk to measure"
    )
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, default=CONTENDERS)
    parser.add_argument("--out", default="", help="name under bench/results; empty: none")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    return parser.parse_args()


def main() -> None:
    args, began = parse(), time.perf_counter()
    device = torch.device(args.device)
    # cuDNN makes a plan for every length, 10 ms a layer: the peers attend by torch's flash kernel.
    torch.backends.cuda.enable_cudnn_sdp(False)
    rows: list[dict[str, Any]] = []
    skipped: list[dict[str, Any]] = []
    results = {
        "machine": machine.describe(args.path),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "rows": rows,
        "skipped": skipped,
    }
    models: dict[str, Any] = {}
    for case in cases(args.tiny):
        for name in args.only:
            setting = {"shape": case.shape_name, "context": case.context, "batch": case.batch,
                       "cache": name}  # fmt: skip
            gc.collect()
            if time.perf_counter() - began > args.seconds:
                skipped.append(setting | {"why": "time"})
            elif not fits(name, case, room_on(device, args.memory_gib)):
                skipped.append(setting | {"why": "memory"})
            else:
                if case.shape_name not in models:
                    models.clear()
                    with device:  # random weights take it a moment, and the host a minute
                        models[case.shape_name] = make_model(case.shape, 131072)
                model = models[case.shape_name]
                try:
                    rows.append(measure(name, model, case, args.path, device, args.steps))
                except Exception as error:
                    # The other rows are worth having, and this one's reason.
                    skipped.append(setting | {"why": f"{type(error).__name__}: {error}"})
                else:
                    print(*setting.values(), rows[-1]["ms_median"], "ms", flush=True)
            results["seconds"] = round(time.perf_counter() - began, 1)
            if args.json:  # after each row: a kill loses little
                args.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    for each in skipped:
        print("left out:", *each.values(), flush=True)
    if args.out:
        print(f"wrote {machine.write(args.out, results).name}")


if __name__ == "__main__":
    main()
