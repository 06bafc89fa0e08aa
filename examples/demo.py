"""``make demo``: a real document with facts hidden in it, answered from a KV cache on disk.

The reference model reads one of its documents, then answers questions in turns, once with the KV
cache on disk and once with all of it in memory. The exit status is 1 when an answer from disk is
wrong where the full cache had it right.

`build/demo.json` has these keys:

- ``document_tokens``, ``questions`` (each with ``question``, ``truth``, ``depth`` of its fact in
  the document from 0 to 1, ``on_disk``, ``in_memory``),
- ``kv_bytes_full``, ``kv_bytes_on_disk``, ``kv_bytes_in_memory`` (its peak), ``memory_share`` (of
  the full cache),
- ``tokens_per_second_on_disk``, ``tokens_per_second_in_memory``, ``bytes_read_per_token``,
  ``hit_rate`` of the reuse buffer, ``waited_share`` of the time that reads took,
- ``run``: all that ``kvswap_torch generate --json`` writes.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer

from kvswap_torch import format_bytes
from kvswap_torch.cli.generate import GenerateOptions, run
from kvswap_torch.cli.report import Result
from tools.reference_model.documents import SOURCES, load_source, make_document
from tools.reference_model.tasks import Question, extract_answer

MODEL = Path(__file__).resolve().parent / "reference_model"
BUILD = Path("build")
TEMPLATE = "{document}\nQuestion: {question}\nAnswer:"


def main(
    source: Annotated[str, typer.Option(help=f"one of {', '.join(SOURCES)}")] = SOURCES[0],
    tokens: Annotated[int, typer.Option(help="length of the document")] = 26_000,
    seed: Annotated[int, typer.Option(help="another seed hides other facts")] = 1,
    model: Annotated[Path, typer.Option(help="folder of the reference model")] = MODEL,
    path: Annotated[Path, typer.Option(help="folder on the disk to use")] = BUILD,
    kv_memory: Annotated[
        str, typer.Option(help="most memory for the KV cache; empty: what the config needs")
    ] = "14MiB",
    device: Annotated[str, typer.Option(help="where the model runs: cpu or cuda")] = "cpu",
    out: Annotated[Path, typer.Option(help="results as JSON")] = BUILD / "demo.json",
) -> None:
    console = Console()
    BUILD.mkdir(exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(model)
    text, questions = make_document(
        load_source(source),
        seed,
        tokens,
        lambda part: len(tokenizer(part, add_special_tokens=False)["input_ids"]),
    )
    document = BUILD / "demo_document.txt"
    # The template brings the line end that separates document and question.
    document.write_text(text.removesuffix("\n"), encoding="utf-8")
    console.print(
        f"{source}.txt with {len(questions)} facts to ask for and their distractors laid in: "
        f"{document}"
    )
    result = run(
        GenerateOptions(
            model=str(model),
            document=document,
            questions=tuple(question.text for question in questions),
            config=model / "kvswap.json",
            kv_memory=kv_memory or None,
            path=path,
            device=device,
            compare=True,
            max_new_tokens=40,
            prompt_template=TEMPLATE,
        ),
        console,
    )
    summary = summarise(result, questions)
    out.write_text(json.dumps(summary, indent=2, default=str) + "\n", encoding="utf-8")
    console.print(answers_table(summary))
    console.print(numbers_table(summary))
    console.print(f"[dim]{out} has all of it[/dim]")
    sys.exit(1 if lost(summary) else 0)


def summarise(result: Result, questions: list[Question]) -> dict[str, Any]:
    """The demo's JSON; see the module's documentation for its keys."""
    stats, memory = result.disk.stats, result.memory
    reading = stats["wait_seconds"] + stats["hidden_seconds"]
    return {
        "document_tokens": result.document_tokens,
        "questions": [
            {
                "question": question.text,
                "truth": question.answer,
                "depth": round(question.depth, 3),
                "on_disk": extract_answer(ours.answer),
                "in_memory": extract_answer(theirs.answer),
            }
            for question, ours, theirs in zip(
                questions, result.disk.turns, memory.turns, strict=True
            )
        ],
        "kv_bytes_full": stats["kv_bytes_full"],
        "kv_bytes_on_disk": stats["kv_bytes_on_disk"],
        "kv_bytes_in_memory": stats["resident_bytes_peak"],
        "memory_share": stats["resident_bytes_peak"] / stats["kv_bytes_full"],
        "tokens_per_second_on_disk": result.disk.tokens_per_second,
        "tokens_per_second_in_memory": memory.tokens_per_second,
        "bytes_read_per_token": stats["bytes_read_per_token"],
        "hit_rate": stats["hit_rate"],
        "waited_share": stats["wait_seconds"] / reading if reading else 0.0,
        "run": dataclasses.asdict(result),
    }


def lost(summary: dict[str, Any]) -> list[dict[str, Any]]:
    """Questions that the full cache answers and the disk does not."""
    return [
        asked
        for asked in summary["questions"]
        if asked["in_memory"] == asked["truth"] != asked["on_disk"]
    ]


def answers_table(summary: dict[str, Any]) -> Table:
    table = Table(title="answers", title_justify="left")
    for column in ("question", "depth", "in the document", "cache on disk", "full cache"):
        table.add_column(column)
    for asked in summary["questions"]:
        row = [asked["question"], f"{asked['depth']:.0%}", asked["truth"]]
        for answer in (asked["on_disk"], asked["in_memory"]):
            colour = "green" if answer == asked["truth"] else "red"
            row.append(f"[{colour}]{answer}[/{colour}]")
        table.add_row(*row)
    return table


def numbers_table(summary: dict[str, Any]) -> Table:
    def speed(value: float | None) -> str:
        return "-" if value is None else f"{value:.1f}"

    hit_rate = summary["hit_rate"]
    table = Table(title="what it took", title_justify="left", show_header=False)
    for name, value in (
        ("context", f"{summary['document_tokens']:,} tokens"),
        ("KV, full cache", format_bytes(summary["kv_bytes_full"])),
        ("KV on disk", format_bytes(summary["kv_bytes_on_disk"])),
        (
            "KV in memory",
            f"{format_bytes(summary['kv_bytes_in_memory'])}, "
            f"1/{1 / summary['memory_share']:.1f} of the full cache",
        ),
        ("tokens per second, cache on disk", speed(summary["tokens_per_second_on_disk"])),
        ("tokens per second, full cache", speed(summary["tokens_per_second_in_memory"])),
        ("read per token", format_bytes(int(summary["bytes_read_per_token"]))),
        ("hit rate of the reuse buffer", "-" if hit_rate is None else f"{hit_rate:.0%}"),
        ("of reading, waited for", f"{summary['waited_share']:.0%}"),
    ):
        table.add_row(name, value)
    return table


if __name__ == "__main__":
    typer.run(main)
