"""``kvswap fit``: whether a model, its cache and a context fit, before the model is loaded."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.table import Table

from kvswap_torch.cli.load import load_config
from kvswap_torch.cli.targets import check_directory
from kvswap_torch.errors import ConfigError
from kvswap_torch.few_bits import check_format
from kvswap_torch.memory_size import format_bytes, parse_bytes
from kvswap_torch.process_memory import process_memory

if TYPE_CHECKING:
    from kvswap_torch.hf.fit import Asked, Fit, Place

HELP = """\
Will it fit? What a model, its cache and a context take, from the model's config alone.

  kvswap fit --model DIR --context 128K

Adds up weights, what a forward pass over a chunk of the prompt holds, the KV cache's own count, \
and what interpreter and libraries take. Compares that with the memory that this process may have \
(RAM, or a lower limit of its cgroup) and with the disk. If it does not fit, one line says what to \
change. Nothing is loaded.

[bold]For another machine:[/bold] say what it has.

  ... --memory 16GiB --disk 200GiB
"""

_TOKENS = re.compile(r"(\d{1,12})([kKmM]?)")
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20}
TOKENS_MAX = 2**31 - 1
ASSUMED_SPEED = 2e9  # bytes per second: an NVMe disk's
FITS, FITS_NOT = "it fits", "it does not fit"


def main(
    model: Annotated[str, typer.Option(help="Folder of a Hugging Face model.", metavar="DIR")],
    context: Annotated[
        str, typer.Option(help="Tokens of a sequence, prompt and answer.", metavar="128K")
    ],
    batch: Annotated[int, typer.Option(min=1, help="Sequences at once.", metavar="N")] = 1,
    weights: Annotated[
        Literal["bf16", "int8", "int4"] | None,
        typer.Option(help="Format of the weights; else as they were saved.", show_default=False),
    ] = None,
    kv_memory: Annotated[
        str | None,
        typer.Option(help="Most memory the KV cache may take; else its own choice.", metavar="X"),
    ] = None,
    path: Annotated[
        Path, typer.Option(help="Folder on the disk that would hold the KV cache.", metavar="DIR")
    ] = Path("."),
    config: Annotated[
        Path | None, typer.Option(help="What the tuner wrote.", metavar="config.json")
    ] = None,
    preset: Annotated[
        str | None, typer.Option(help="A published system, in the config's place.")
    ] = None,
    prefill_chunk: Annotated[
        int, typer.Option(min=64, help="Tokens of a prompt per forward pass.", metavar="N")
    ] = 4096,
    texts_per_day: Annotated[
        int, typer.Option(min=0, help="New texts a day, for the disk's wear.", metavar="N")
    ] = 10,
    memory: Annotated[
        str | None, typer.Option(help="Memory of another machine.", metavar="16GiB")
    ] = None,
    disk: Annotated[
        str | None, typer.Option(help="Free space on another machine.", metavar="200GiB")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """See `HELP`."""
    from kvswap_torch.hf.fit import advice, estimate

    check_format(weights)
    check_directory("--path", path)
    asked = asked_of(
        model,
        tokens_of(context),
        batch=batch,
        weights=weights,
        kv_memory_bytes=None if kv_memory is None else parse_bytes(kv_memory, "--kv-memory"),
        path=path,
        settings=config,
        preset=preset,
        chunk=prefill_chunk,
    )
    place, what = _place(path, memory, disk)
    fit = estimate(asked, place.fixed_bytes)
    told = facts(fit, place, what, texts_per_day) | {"advice": advice(fit, place)}
    told["weights_on_disk"] = _on_disk(fit, place, model if memory is None is disk else None)
    if as_json:
        print(json.dumps({"model": model, **told}, indent=2))
    else:
        _show(told, Console(soft_wrap=True, highlight=False))


def tokens_of(text: str) -> int:
    """``128K`` is 131,072."""
    match = _TOKENS.fullmatch(text.strip())
    count = int(match[1]) * _UNITS[match[2].lower()] if match else 0
    if not 1 <= count <= TOKENS_MAX:
        raise ConfigError(
            f"--context: must be a number of tokens such as 32768 or 128K, got {text!r}"
        )
    return count


def asked_of(model: str, context: int, dtype: str = "auto", **rest: Any) -> Asked:
    """What is to be run, of a model's folder; its weights are not read."""
    from kvswap_torch.half_linear import has_products
    from kvswap_torch.hf.fit import Asked
    from kvswap_torch.hf.unloaded import computed_dtype, stored_bytes
    from kvswap_torch.hf.weights_memory import stored_as

    config = load_config(model)
    is_quantised = getattr(config, "quantization_config", None) is not None
    kind = computed_dtype(model, config, dtype, rest.get("weights"))
    return Asked(
        config=config,
        dtype=kind,
        context=context,
        stored_bytes=stored_bytes(model) if is_quantised else None,
        is_wide=not has_products(kind),
        stored=stored_as(model, config),
        **rest,
    )


def _place(path: Path, memory: str | None, disk: str | None) -> tuple[Place, dict[str, Any]]:
    """What there is, and how it is known."""
    from kvswap_torch.hf.fit import Place
    from kvswap_torch.machine_memory import memory_limit

    limit = memory_limit()
    most, what = limit.limit_bytes, limit.what
    if memory is not None:
        most, what = parse_bytes(memory, "--memory"), "--memory"
    free = shutil.disk_usage(path).free if disk is None else parse_bytes(disk, "--disk")
    fixed = process_memory().rss  # of this process, which has loaded what the other commands do
    available = None if memory is not None else limit.available_bytes + fixed
    return Place(most, free, fixed), {"what": what, "available": available}


def _on_disk(fit: Fit, place: Place, folder: str | None) -> dict[str, Any] | None:
    """What ``--weights-memory`` would cost; the disk's speed is measured where the model is."""
    from kvswap_torch.hf.fit import STEP, weights_on_disk
    from kvswap_torch.hf.weights_reader import read_speed

    plan = weights_on_disk(fit, place)
    if plan is None:
        return None
    measured = None if folder is None else read_speed(folder)
    speed = measured or ASSUMED_SPEED
    return {
        "weights_memory_bytes": -(-plan.memory_bytes // STEP) * STEP,
        "read_bytes_per_token": plan.read_bytes,
        "seconds_per_token": plan.read_bytes / speed,
        "disk_bytes_per_second": speed,
        "disk_speed_is": "assumed" if measured is None else "measured",
    }


def facts(fit: Fit, place: Place, what: dict[str, Any], texts_per_day: int) -> dict[str, Any]:
    """What ``--json`` prints."""
    asked, cache = fit.asked, fit.cache
    return {
        "context": asked.context,
        "batch": asked.batch,
        "weights": asked.weights or str(asked.dtype).removeprefix("torch."),
        "fits": fit.fits(place),
        "memory_bytes": {
            "interpreter_and_libraries": fit.fixed,
            "weights": fit.weights,
            "activations": fit.activations.bytes,
            "kv_cache": cache.memory_bytes,
            "total": fit.memory_bytes,
        },
        "activations_are_estimated": fit.activations.is_estimate,
        "kv_cache_bytes": cache.uses,
        "kv_memory_least_bytes": cache.least,
        "full_kv_bytes": cache.full_bytes,
        "memory_limit_bytes": place.memory_bytes,
        "memory_limit": what["what"],
        "memory_available_bytes": what["available"],
        "disk_bytes": cache.disk_bytes,
        "disk_bytes_per_token": fit.disk_bytes_per_token,
        "disk_free_bytes": place.disk_bytes,
        "texts_per_day": texts_per_day,
        "written_per_day_bytes": texts_per_day * cache.disk_bytes,
    }


def _show(told: dict[str, Any], console: Console) -> None:
    memory = told["memory_bytes"]
    full = format_bytes(told["full_kv_bytes"])
    estimated = ", an estimate" if told["activations_are_estimated"] else ""
    rows = {
        "interpreter and libraries": format_bytes(memory["interpreter_and_libraries"]),
        f"weights ({told['weights']})": format_bytes(memory["weights"]),
        "activations of a chunk": format_bytes(memory["activations"]) + estimated,
        "KV cache": f"{format_bytes(memory['kv_cache'])}; all of it in memory: {full}",
        "memory in all": format_bytes(memory["total"]),
        "memory there is": f"{format_bytes(told['memory_limit_bytes'])}, {told['memory_limit']}",
        "disk": f"{format_bytes(told['disk_bytes'])}, "
        f"{format_bytes(told['disk_bytes_per_token'])} a token",
        "disk free": format_bytes(told["disk_free_bytes"]),
        "written a day": f"{format_bytes(told['written_per_day_bytes'])} with "
        f"{told['texts_per_day']} new texts of this length",
    }
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in rows.items():
        table.add_row(name, value)
    console.print(f"{told['context']:,} tokens x {told['batch']}")
    console.print(table)
    console.print(FITS if told["fits"] else f"{FITS_NOT}: {told['advice']}")
    if (on_disk := told["weights_on_disk"]) is not None:
        console.print(_told_on_disk(on_disk))
    available = told["memory_available_bytes"]
    if told["fits"] and available is not None and memory["total"] > available:
        console.print(f"not now: other processes leave {format_bytes(available)}")


def _told_on_disk(told: dict[str, Any]) -> str:
    return (
        f"with --weights-memory {told['weights_memory_bytes'] >> 20}MiB it fits, and each token "
        f"reads {format_bytes(told['read_bytes_per_token'])} of weights from disk: "
        f"{told['seconds_per_token']:.2f} s at {told['disk_bytes_per_second'] / 1e9:.2f} GB/s, "
        f"{told['disk_speed_is']}"
    )
