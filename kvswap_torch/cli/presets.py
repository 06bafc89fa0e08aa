"""``kvswap presets``: the published systems that this engine can be."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvswap_torch.cli.load import load_config
from kvswap_torch.config import SwapConfig
from kvswap_torch.config.nested import difference
from kvswap_torch.errors import ConfigError
from kvswap_torch.memory_size import format_bytes
from kvswap_torch.preset import find, presets
from kvswap_torch.preset.definition import Preset, Shape
from kvswap_torch.preset.papers import links

HEADS = 32  # of the model that memory is counted for, unless one is named
BATCH = 1
CONTEXT = 32768


def main(
    name: Annotated[str | None, typer.Argument(help="All about one of them.")] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Count memory for this model, not a Llama of 8B.", metavar="DIR"),
    ] = None,
    context: Annotated[
        int, typer.Option(min=1, help="Tokens that memory is counted for.")
    ] = CONTEXT,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Published systems as settings of this engine: which there are, or all about one."""
    console = Console()
    if name is None and (model is not None or context != CONTEXT):
        raise ConfigError("--model, --context: must be left out without a preset's name")
    if name is None:
        told = [{"name": p.name, "paper": p.paper, "take": p.take} for p in presets()]
        print(json.dumps(told, indent=2)) if as_json else console.print(_table(told))
        return
    facts = about(find(name), model, context)
    print(json.dumps(facts, indent=2)) if as_json else _show(facts, console)


def about(preset: Preset, model: str | None = None, context: int = CONTEXT) -> dict[str, Any]:
    """What there is to say of a preset, as JSON has it; settings are those not at their default."""
    shape, heads = (Shape(), HEADS) if model is None else _shape_of(model)
    config = SwapConfig.preset(preset.name, preset.shown(shape), shape=shape)
    settings = difference(SwapConfig(), config)
    return {
        "name": preset.name,
        "paper": preset.paper,
        "links": links(preset),
        "take": preset.take,
        "leave": preset.leave,
        "settings": settings,
        "calibrate": preset.calibrate or "nothing",
        "smaller": preset.smaller_settings(shape),
        "differences": list(preset.differences),
        "context": context,
        "memory": memory_of(config, shape, heads, context),
    }


def memory_of(config: SwapConfig, shape: Shape, heads: int, context: int) -> dict[str, int]:
    """Bytes of one sequence, calibrated, by what needs most; and of its keys and values."""
    import torch

    from kvswap_torch import _C
    from kvswap_torch.sizing import ModelShape, effective_ranks, native_options

    widths = (shape.kv_heads, shape.head_dim, shape.element_bytes, shape.sides, shape.value_dim)
    model = ModelShape(shape.layers, heads, *widths)
    options = native_options(
        config,
        model,
        dtype=torch.float32 if shape.element_bytes == 4 else torch.bfloat16,
        ranks=list(effective_ranks(config, model, calibrated=True)),
    )
    need = _C.memory_need(options, BATCH, context, shape.alignment_bytes)
    return {
        "summary": need["summary"] + need["projections"],
        "pages": need["pages"],
        "kept": need["kept"],
        "total": need["total"],
        "full_kv": model.kv_bytes(context),
    }


def _shape_of(model: str) -> tuple[Shape, int]:
    text = load_config(model).get_text_config()
    heads = getattr(text, "num_attention_heads", None)
    if not heads:
        raise ConfigError(f"--model: must have attention heads, got {model!r}, which names none")
    kinds = getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers
    latent = getattr(text, "kv_lora_rank", None)
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    shape = Shape(
        layers=kinds.count("full_attention"),
        kv_heads=1 if latent else getattr(text, "num_key_value_heads", None) or heads,
        head_dim=latent + text.qk_rope_head_dim if latent else head_dim,
        element_bytes=4 if str(text.dtype) == "torch.float32" else 2,
        sides=1 if latent else 2,
        value_dim=0 if latent else min(head_dim, getattr(text, "v_head_dim", None) or 0),
    )
    return shape, heads


def _table(told: list[dict[str, str]]) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in ("preset", "from", "take it"):
        table.add_column(column)
    for preset in told:
        table.add_row(preset["name"], preset["paper"], escape(preset["take"]))
    return table


def words_of(settings: dict[str, Any]) -> str:
    """``summary.rank=4, selection.group_tokens=8``."""
    return ", ".join(f"{path}={value}" for path, value in settings.items())


def _show(facts: dict[str, Any], console: Console) -> None:
    memory, full = facts["memory"], facts["memory"]["full_kv"]
    shares = ", ".join(
        f"{use} {format_bytes(memory[use])} ({memory[use] / full:.3f})"
        for use in ("summary", "pages", "kept", "total")
    )
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_row("from", " ".join([facts["paper"], *facts["links"].values()]))
    table.add_row("take it", escape(facts["take"]))
    table.add_row("leave it", escape(facts["leave"]))
    table.add_row("settings", escape(words_of(facts["settings"])))
    for step in facts["smaller"]:
        table.add_row("smaller", escape(words_of(step)))
    table.add_row("calibrate", escape(facts["calibrate"]))
    for told in facts["differences"]:
        table.add_row("differs", escape(told))
    told = f"of {format_bytes(full)} at {facts['context']:,} tokens: {shares}"
    table.add_row("memory", escape(told))
    console.rule(facts["name"])
    console.print(table)
