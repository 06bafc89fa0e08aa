"""``make demo``: a real document with facts hidden in it, answered from a KV cache on disk.

A model reads a document, then answers questions in turns, once with the KV cache on disk and once
with all of it in memory. The exit status is 1 when an answer from disk is wrong where the full
cache had it right. The model is the reference model, or with ``--model smollm2`` a small one that
others trained (``make real-model``), asked through its chat template, without a config.

`build/demo.json` has these keys:

- ``document_tokens``, ``questions`` (each with ``question``, ``truth``, ``depth`` of its fact in
  the document from 0 to 1, ``on_disk``, ``in_memory``, and of both whether they are ``right``),
- ``kv_bytes_full``, ``kv_bytes_on_disk``, ``kv_bytes_in_memory`` (its peak), ``memory_share`` (of
  the full cache),
- ``tokens_per_second_on_disk``, ``tokens_per_second_in_memory``, ``bytes_read_per_token``,
  ``hit_rate`` of the reuse buffer, ``waited_share`` of the time that reads took,
- ``read_seconds`` of the first run, ``open_seconds`` and ``first_token_seconds`` of another process
  that goes on from what the first one saved, and whether its first answer ``is_same``,
- ``run``: all that ``kvswap_torch generate --json`` writes.
"""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from transformers import AutoTokenizer

from kvswap_torch import format_bytes
from kvswap_torch.cli.generate import GenerateOptions, run
from kvswap_torch.cli.report import Result
from kvswap_torch.cli.saved import remove
from kvswap_torch.errors import ConfigError
from tools.real_model.facts import numbered_document
from tools.real_model.make import MODEL as REAL_MODEL
from tools.reference_model.documents import SOURCES, load_source, make_document
from tools.reference_model.tasks import Question, extract_answer

MODEL = Path(__file__).resolve().parent / "reference_model"
BUILD = Path("build")
TEMPLATE = "{document}\nQuestion: {question}\nAnswer:"
REAL = "smollm2"


@dataclass(frozen=True)
class Subject:
    """A model, and how the demo asks it.

    Parameters
    ----------
    tokens
        Length of the document.
    kv_memory
        Most memory for the KV cache.
    template
        As ``kvswap_torch generate --prompt-template`` has it.
    """

    folder: Path
    config: Path | None
    tokens: int
    kv_memory: str
    template: str
    max_new_tokens: int


def subject_of(model: str) -> Subject:
    """The reference model's folder, or ``smollm2``.

    Raises
    ------
    ConfigError
        When the real model was not made, or its folder has lost its chat template.
    """
    if model != REAL:
        folder = Path(model)
        return Subject(folder, folder / "kvswap.json", 26_000, "14MiB", TEMPLATE, 40)
    if not REAL_MODEL.is_dir():
        raise ConfigError(f"--model: {REAL_MODEL} must be there and is not; run: make real-model")
    if AutoTokenizer.from_pretrained(REAL_MODEL).chat_template is None:
        raise ConfigError(
            f"--model: {REAL_MODEL} must have a chat template and has none; delete the folder and "
            "run: make real-model"
        )
    # An eighth of what the full cache takes of 7,000 tokens.
    return Subject(REAL_MODEL, None, 7_000, "20MiB", "auto", 24)


def main(
    source: Annotated[str, typer.Option(help=f"one of {', '.join(SOURCES)}")] = SOURCES[0],
    tokens: Annotated[int, typer.Option(help="of the document; 0: as fits the model")] = 0,
    seed: Annotated[int, typer.Option(help="another seed hides other facts")] = 1,
    model: Annotated[str, typer.Option(help=f"{REAL}, or the reference model's folder")] = str(
        MODEL
    ),
    path: Annotated[Path, typer.Option(help="folder on the disk to use")] = BUILD,
    kv_memory: Annotated[
        str | None, typer.Option(help="most memory for the KV cache; empty: what the config needs")
    ] = None,
    device: Annotated[str, typer.Option(help="where the model runs: cpu or cuda")] = "cpu",
    out: Annotated[Path, typer.Option(help="results as JSON")] = BUILD / "demo.json",
) -> None:
    console = Console()
    BUILD.mkdir(exist_ok=True)
    try:
        subject = subject_of(model)
    except ConfigError as error:
        console.print(str(error), style="red", markup=False)
        sys.exit(1)
    if kv_memory is None:
        kv_memory = subject.kv_memory
    text, questions = write_document(subject, source, seed, tokens or subject.tokens)
    document = BUILD / "demo_document.txt"
    # The template brings the line end that separates document and question.
    document.write_text(text.removesuffix("\n"), encoding="utf-8")
    console.print(
        f"{source}.txt with {len(questions)} facts to ask for and their distractors laid in: "
        f"{document}"
    )
    saved = BUILD / "demo.kvswap"
    if saved.exists():
        remove(saved)
    options = GenerateOptions(
        model=str(subject.folder),
        document=document,
        questions=tuple(question.text for question in questions),
        save=saved,
        config=subject.config,
        kv_memory=kv_memory or None,
        path=path,
        device=device,
        compare=True,
        max_new_tokens=subject.max_new_tokens,
        prompt_template=subject.template,
    )
    result = run(options, console)
    console.rule("another process, which reads nothing again")
    summary = summarise(result, questions) | second_run(options, result)
    out.write_text(json.dumps(summary, indent=2, default=str) + "\n", encoding="utf-8")
    console.print(answers_table(summary))
    console.print(numbers_table(summary))
    console.print(f"[dim]{out} has all of it[/dim]")
    sys.exit(1 if lost(summary) else 0)


def second_run(options: GenerateOptions, first: Result) -> dict[str, Any]:
    """The first question asked by another process, of what the first run has saved."""
    told = BUILD / "demo_second_run.json"
    command = [sys.executable, "-m", "kvswap_torch", "generate", "--model", options.model,
               "--open", options.save, "--question", options.questions[0], "--json", told,
               "--path", options.path, "--device", options.device,
               "--max-new-tokens", options.max_new_tokens,
               "--prompt-template", options.prompt_template]  # fmt: skip
    if options.kv_memory is not None:
        command += ["--kv-memory", options.kv_memory]
    subprocess.run([str(word) for word in command], check=True)
    run = json.loads(told.read_text())["disk"]
    turn = run["turns"][0]
    return {
        "read_seconds": first.disk.prefill_seconds,
        "open_seconds": run["prefill_seconds"],
        "first_token_seconds": turn["first_token_seconds"],
        "is_same": turn["answer_ids"] == first.disk.turns[0].answer_ids,
    }


def write_document(
    subject: Subject, source: str, seed: int, tokens: int
) -> tuple[str, list[Question]]:
    """A real document with facts laid in that this model can be asked for."""
    tokenizer = AutoTokenizer.from_pretrained(subject.folder)

    def count(part: str) -> int:
        return len(tokenizer(part, add_special_tokens=False)["input_ids"])

    if subject.folder == REAL_MODEL:
        return numbered_document(source, seed, tokens, count)
    return make_document(load_source(source), seed, tokens, count)


def is_right(answer: str, truth: str) -> bool:
    """The answer itself, or a sentence that has it as a word."""
    return answer == truth or truth in re.findall(r"\w+", answer)


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
                "right": [
                    is_right(extract_answer(turn.answer), question.answer)
                    for turn in (ours, theirs)
                ],
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
    return [asked for asked in summary["questions"] if asked["right"] == [False, True]]


def answers_table(summary: dict[str, Any]) -> Table:
    table = Table(title="answers", title_justify="left")
    for column in ("question", "depth", "in the document", "cache on disk", "full cache"):
        table.add_column(column)
    for asked in summary["questions"]:
        row = [asked["question"], f"{asked['depth']:.0%}", asked["truth"]]
        for answer, right in zip(
            (asked["on_disk"], asked["in_memory"]), asked["right"], strict=True
        ):
            colour = "green" if right else "red"
            row.append(f"[{colour}]{escape(answer)}[/{colour}]")
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
        ("document read", f"{summary['read_seconds']:.1f} s"),
        (
            "another process: opened, first token",
            f"{summary['open_seconds']:.2f} s, {summary['first_token_seconds']:.2f} s, "
            + ("the same answer" if summary["is_same"] else "another answer"),
        ),
        ("hit rate of the reuse buffer", "-" if hit_rate is None else f"{hit_rate:.0%}"),
        ("of reading, waited for", f"{summary['waited_share']:.0%}"),
    ):
        table.add_row(name, value)
    return table


if __name__ == "__main__":
    typer.run(main)
