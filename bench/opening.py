"""A long document saved once, then opened by new processes: seconds of each step.

    python -m bench opening --tokens 32768

Opening is timed without and with the probe, in a process of its own each round, the model loaded
and the library imported before; the files may be in the page cache (`--cold` drops them from it).
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from bench import machine
from kvswap_torch import KVSwapCache
from kvswap_torch.cli.load import load_model
from tools.reference_model.place import MODEL


def save(model: Any, config: Path, tokens: int, path: Path, saved: Path) -> dict[str, Any]:
    """Reads random tokens in chunks and saves the cache."""
    ids = torch.randint(8, 256, (1, tokens), generator=torch.Generator().manual_seed(0))
    with KVSwapCache(model, path, config, max_context=tokens, max_batch=1) as cache:
        began = time.perf_counter()
        with torch.no_grad():
            for chunk in ids.split(4096, dim=1):
                model(input_ids=chunk, past_key_values=cache, logits_to_keep=1)
        read = time.perf_counter()
        cache.save(saved)
        ended = time.perf_counter()
    return {"read_seconds": read - began, "save_seconds": ended - read}


def open_once(model: Any, path: Path, saved: Path) -> dict[str, float]:
    """Opens three times: as the first cache of the process, without the probe, with it."""
    told = {}
    for name, probe in (("first_open", False), ("open", False), ("open_and_probe", True)):
        began, busy = time.perf_counter(), time.process_time()
        with KVSwapCache.open(model, saved, path=path, probe=probe) as cache:
            told[f"{name}_seconds"] = time.perf_counter() - began
            told[f"{name}_processor_seconds"] = time.process_time() - busy
            told[f"{name}_bytes_read"] = cache.stats().bytes_read
    return told


def drop_pages(saved: Path) -> None:
    """Takes the files out of the page cache."""
    for file in saved.iterdir():
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def main(
    tokens: Annotated[int, typer.Option(help="of the document")] = 32768,
    model: Annotated[Path, typer.Option(help="folder of a model and its kvswap.json")] = MODEL,
    rounds: Annotated[int, typer.Option(help="processes that open it")] = 5,
    cold: Annotated[bool, typer.Option("--cold", help="out of the page cache first")] = False,
    path: Annotated[Path, typer.Option(help="folder on the disk to use")] = Path("build"),
    opens: Annotated[Path | None, typer.Option(hidden=True)] = None,
    out: Annotated[str, typer.Option(help="name under bench/results; empty: none")] = "",
) -> None:
    loaded = load_model(str(model))
    if opens is not None:
        print(json.dumps(open_once(loaded, path, opens)))
        return
    saved = path / "opening.kvswap"
    shutil.rmtree(saved, ignore_errors=True)
    told = save(loaded, model / "kvswap.json", tokens, path, saved)
    command = [sys.executable, "-m", "bench.opening", "--opens", str(saved), "--path", str(path)]
    opened = []
    for _ in range(rounds):
        if cold:
            drop_pages(saved)
        done = subprocess.run([*command, "--model", str(model)], stdout=subprocess.PIPE, check=True)
        opened.append(json.loads(done.stdout))
    results = {
        "machine": machine.describe(path),
        "tokens": tokens,
        "cold": cold,
        "state_bytes": (saved / "state.safetensors").stat().st_size,
        "records_bytes": (saved / "records.bin").stat().st_size,
        **told,
        **{name: statistics.median(one[name] for one in opened) for name in opened[0]},
        "open_seconds_all": [one["open_seconds"] for one in opened],
    }
    shutil.rmtree(saved)
    Console().print(results)
    if out:
        machine.write(out, results)


if __name__ == "__main__":
    typer.run(main)
