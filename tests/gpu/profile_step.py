"""Three decoding steps under torch's profiler: which kernels run, and how long the device is idle.

    python -m tests.gpu.profile_step --out build/gpu/profile.txt

An 8B model's four layers at 32,768 tokens, batch 1 and 8, records in files on /dev/shm so that the
disk is no part of it.
"""

from __future__ import annotations

import argparse
import gc
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from bench.gpu_decode import Case, decode, open_cache
from bench.shapes import SHAPES, make_model

STEPS = 3


def busy_seconds(events: list) -> tuple[float, float]:
    """Seconds in which a kernel or copy ran, and from the first begin to the last end."""
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in events
        if event.device_type == torch.autograd.DeviceType.CUDA
    )
    if not spans:
        return 0.0, 0.0
    busy, end = 0.0, spans[0][0]
    for begin, finish in spans:
        busy += max(0.0, finish - max(begin, end))
        end = max(end, finish)
    return busy * 1e-6, (end - spans[0][0]) * 1e-6


def profile_one(name: str, case: Case, model: torch.nn.Module, path: Path) -> str:
    device = torch.device("cuda")
    cache = open_cache(name, model, case, path, device)
    decode(model, cache, case, device, 8)
    before = cache.stats() if hasattr(cache, "stats") else None
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        seconds = decode(model, cache, case, device, STEPS, case.context + 8)
    busy, span = busy_seconds(seen.events())
    averages = seen.key_averages()
    calls = {
        event.key: event.count // STEPS
        for event in averages
        if event.key.startswith(("cuda", "cu"))
    }
    lines = [
        f"== {name}, {case.context} tokens, batch {case.batch}, {case.shape.layers} layers",
        f"steps of {', '.join(f'{1e3 * each:.2f}' for each in seconds)} ms under the profiler",
        f"device busy {1e3 * busy / STEPS:.2f} of {1e3 * span / STEPS:.2f} ms a step",
        f"runtime calls a step: {sum(calls.values())} {calls}",
        averages.table(sort_by="self_device_time_total", row_limit=25, max_name_column_width=70),
        averages.table(sort_by="self_cpu_time_total", row_limit=15, max_name_column_width=70),
    ]
    if before is not None:
        lines.insert(1, f"hit rate {before.hit_rate}, counters {before.counters}")
    if hasattr(cache, "close"):
        cache.close()
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--path", type=Path, default=Path("/dev/shm"))
    args = parser.parse_args()
    torch.backends.cuda.enable_cudnn_sdp(False)  # as in bench/gpu_decode.py
    shape, told = SHAPES["8b-layers"], []
    with torch.device("cuda"):
        model = make_model(shape, 32768)
    for batch in (1, 8):
        for name in ("kvswap", "inplace"):
            told.append(profile_one(name, Case("8b-layers", shape, 32768, batch), model, args.path))
            print(told[-1][:1500], flush=True)
            args.out.write_text("\n\n".join(told) + "\n", encoding="utf-8")
            gc.collect()


if __name__ == "__main__":
    main()
