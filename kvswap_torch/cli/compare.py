"""``kvswap compare``: methods beside the full cache, on tasks or on questions of your own."""

from __future__ import annotations

import datetime
import json
import math
import time
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvswap_torch.cli.completion import preset_names
from kvswap_torch.cli.load import load_model, load_tokenizer
from kvswap_torch.cli.presets import words_of
from kvswap_torch.cli.prompt import make_prompt
from kvswap_torch.cli.reading import LINE_SECONDS
from kvswap_torch.cli.saved_app import Weights
from kvswap_torch.cli.targets import check_directory, check_file
from kvswap_torch.errors import ConfigError
from kvswap_torch.memory_size import format_bytes

TABLE_WIDTH = 160
JOURNAL, QUESTIONS = ".journal.jsonl", ".questions.jsonl"
TASK_NAMES = "needle, multi-key, multi-value, multi-query, variables, common-words, frequent-words"
HELP = """\
Compare methods on tasks, or on questions of your own: accuracy, loss, memory, bytes read and time.

--tasks writes documents of --tokens tokens, with facts laid into text that comes along, into \
OUT.questions.jsonl. --data is a file of your own with a JSON object on each line: document, \
question, answer. LongBench's and RULER's fields are known too. Each method reads a document once \
and is asked all its questions.

  kvswap compare --model DIR --tasks needle,variables --methods kvswap,quest,snapkv \
--budget tokens:1024,bytes:1/13

  kvswap compare --model DIR --data questions.jsonl --methods all

A method is a preset (kvswap presets; all: every one that needs no file) or module.Class of a \
plug-in, with settings after colons: quest:selection.group_tokens=32. A budget is tokens:N \
attended in a step, bytes:1/13 of the full cache, or bytes:64MiB; several give a curve.

It says what it costs before it begins (--dry-run: and ends), and goes on where it was stopped. \
The table, OUT.json and OUT.svg have all that was measured so far.
"""


def main(
    model: Annotated[str, typer.Option(help="Folder of a Hugging Face model.", metavar="DIR")],
    data: Annotated[
        Path | None, typer.Option(help="JSON lines; or --tasks.", metavar="FILE")
    ] = None,
    tasks: Annotated[str, typer.Option(help=f"all, or of {TASK_NAMES}.", metavar="NAMES")] = "",
    tokens: Annotated[int, typer.Option(min=64, help="Of a document of --tasks.")] = 4096,
    documents: Annotated[int, typer.Option(min=1, help="That --tasks writes.")] = 4,
    seed: Annotated[int, typer.Option(help="Of what --tasks draws.")] = 0,
    methods: Annotated[
        str,
        typer.Option(
            help="Presets and plug-ins, commas between; all.", autocompletion=preset_names
        ),
    ] = "kvswap",
    budget: Annotated[
        list[str] | None,
        typer.Option(help="tokens:N, bytes:1/13 or bytes:64MiB; commas between, or repeat."),
    ] = None,
    out: Annotated[
        Path, typer.Option(help="Results; the plot and a journal stand beside.", metavar="OUT.json")
    ] = Path("compare.json"),
    add: Annotated[
        list[Path] | None,
        typer.Option(help="Results of others, for the same table; repeat.", metavar="FILE"),
    ] = None,
    full: Annotated[
        bool, typer.Option("--full/--no-full", help="Also the full cache, in memory.")
    ] = True,
    accuracy: Annotated[
        Literal["contains", "exact"],
        typer.Option(help="An answer has the expected one in it, or is it token by token."),
    ] = "contains",
    questions: Annotated[
        Literal["steps", "chunk"],
        typer.Option(help="Read a question token by token under selection, or in one exact pass."),
    ] = "steps",
    max_new_tokens: Annotated[
        int, typer.Option(min=1, help="Longest answer, in tokens.", metavar="N")
    ] = 32,
    path: Annotated[
        Path, typer.Option(help="Folder on the disk for the caches.", metavar="DIR")
    ] = Path("."),
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        typer.Option(help="Of weights and KV; auto: as the model says."),
    ] = "auto",
    device: Annotated[str, typer.Option(help="Where the model is: cpu, cuda, cuda:1.")] = "cpu",
    weights: Weights = None,
    prompt_template: Annotated[
        str, typer.Option(help="auto, or a text with {document} and {question}.", metavar="TEXT")
    ] = "auto",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what it would cost, and end.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the results as JSON, too.")
    ] = False,
) -> None:
    # All that can be refused is refused before a model is loaded.
    from kvswap_torch.compare import results as files
    from kvswap_torch.compare.asking import Way
    from kvswap_torch.compare.comparison import Comparison
    from kvswap_torch.compare.machine import facts
    from kvswap_torch.compare.method import Budget, Method
    from kvswap_torch.compare.plot import draw

    console = Console(stderr=as_json)
    if console.width < TABLE_WIDTH and not console.is_terminal:
        console = Console(stderr=as_json, width=TABLE_WIDTH)
    chosen = Method.parse_all(methods)
    budgets = Budget.parse_all(budget or ["tokens:1024"])
    if out.suffix != ".json":
        raise ConfigError(f"--out: must end with .json, got {out}")
    plot = out.with_suffix(".svg")
    for target in (out, plot):
        check_file("--out", target)
    check_directory("--path", path)
    written = out.with_name(out.stem + QUESTIONS)
    source = _Source(data, tasks, tokens, documents, seed, written)
    others = [(files.read(file), str(file)) for file in add or ()]
    tokenizer = load_tokenizer(model)
    asked = source.questions(tokenizer)
    prompt = make_prompt(prompt_template, tokenizer)
    loaded = load_model(model, dtype, device, say=console.print, weights=weights)
    comparison = Comparison(
        loaded, tokenizer, prompt, asked, chosen, budgets, Way(accuracy, questions, max_new_tokens),
        path, out.with_name(out.stem + JOURNAL), is_beside_full=full,
    )  # fmt: skip
    cost = comparison.cost()
    for line in cost_lines(cost, path):
        console.print(line, highlight=False, soft_wrap=True)
    if dry_run:
        return
    comparison.run(_Progress(cost.left, console).say)
    results = comparison.results()
    results["machine"] = {"date": datetime.date.today().isoformat()} | facts(path)
    for more, where in others:
        files.added(results, more, where)
    files.summarised(results)
    files.write(out, results)
    plot.write_text(draw(results), encoding="utf-8")
    show(results, console)
    console.print(f"wrote {out} and {plot}", highlight=False)
    if as_json:
        print(json.dumps(results))


class _Source:
    """Where questions come from; refuses what it can before a tokenizer is there."""

    def __init__(
        self, data: Path | None, tasks: str, tokens: int, documents: int, seed: int, written: Path
    ):
        from kvswap_torch.compare.data import Questions
        from kvswap_torch.compare.tasks import parse_tasks
        from kvswap_torch.compare.writing import Asked

        if (data is None) == (not tasks):
            given = "neither" if data is None else "both"
            raise ConfigError(f"compare: must have either --data or --tasks, got {given}")
        self._read = None if data is None else Questions(data)
        self._asked, self._written = None, written
        if data is None:
            check_file("--out", written)
            self._asked = Asked(parse_tasks(tasks), tokens, documents, seed)

    def questions(self, tokenizer: Any) -> Any:
        """Those of the file, or of the tasks, which are written first."""
        from kvswap_torch.compare.data import Questions
        from kvswap_torch.compare.writing import write_questions

        if self._asked is not None:
            write_questions(self._written, self._asked, tokenizer)
            return Questions(self._written)
        return self._read


def cost_lines(cost: Any, path: Path) -> list[str]:
    """What a comparison takes, in words."""
    done = cost.runs - cost.left
    minutes = math.ceil(cost.seconds / 60)
    lines = [
        f"{_count(cost.questions, 'question')} about {_count(cost.documents, 'document')} of "
        f"{cost.tokens:,} tokens, the longest {cost.longest:,} with its answer",
        f"{_count(cost.runs, 'run')} (a document read once by a method), {done} done before; to "
        f"come: {cost.read_tokens:,} tokens read, at most {cost.steps:,} decoded: about "
        f"{_count(minutes, 'minute')}, and more for long documents",
        f"disk: {format_bytes(cost.disk_bytes)} at once in {path}; memory: the model's"
        + (
            f", and {format_bytes(cost.memory_bytes)} for the full cache (--no-full leaves it out)"
            if cost.memory_bytes
            else ", and the budget's"
        ),
    ]
    return lines if cost.left else [lines[0], f"all {_count(cost.runs, 'run')} done before"]


def smaller_settings(method: dict[str, Any]) -> dict[str, int]:
    """What a budget asked for of a preset, and in how many documents."""
    told: dict[str, int] = {}
    for run in method["runs"]:
        smaller = run.get("smaller")
        if isinstance(smaller, dict) and smaller:
            words = words_of(smaller)
            told[words] = told.get(words, 0) + 1
    return told


def show(results: dict[str, Any], console: Console) -> None:
    """The table; lines of methods that cannot do with a budget say why."""
    baseline = results["baseline"]
    table = Table(box=None, pad_edge=False)
    heads = ("method", "budget", "memory", "accuracy", f"to {baseline}", "loss",
             f"to {baseline}", "read/token", "ms/token")  # fmt: skip
    for number, head in enumerate(heads):
        table.add_column(head, justify="left" if number < 2 else "right", no_wrap=number < 2)
    for method in results["methods"]:
        told = method.get("summary")
        if told:
            table.add_row(escape(method["name"]), method["budget"] or "", *cells(told))
    console.print(table)
    show_tasks(results, console)
    for method in results["methods"]:
        for words, count in smaller_settings(method).items():
            of = f"{count} of {_count(len(method['runs']), 'document')}"
            what = f"{method['name']} at {method['budget']}, smaller in {of}: {words}"
            console.print(escape(what), highlight=False, soft_wrap=True)
    for method in results["methods"]:
        for document, why in sorted(method.get("impossible", {}).items())[:1]:
            what = f"{method['name']} at {method['budget']}, document {int(document) + 1}: {why}"
            console.print(escape(what), highlight=False, soft_wrap=True)
    documents = results["data"]["documents"]
    words = f"Intervals of 95 %, whole documents drawn again: {_count(documents, 'document')}"
    if documents == 1:
        words += ", so that there is nothing to draw from and they say nothing"
    console.print(f"{words}.", highlight=False, soft_wrap=True)


def show_tasks(results: dict[str, Any], console: Console) -> None:
    """Accuracy by task; nothing where questions have none."""
    from kvswap_torch.compare.statistics import interval

    summaries = [each for each in results["methods"] if each.get("summary", {}).get("tasks")]
    names = list(dict.fromkeys(task for each in summaries for task in each["summary"]["tasks"]))
    if not names:
        return
    table = Table(box=None, pad_edge=False)
    for number, head in enumerate(("method", "budget", *names)):
        is_name = number < 2
        table.add_column(escape(head), justify="left" if is_name else "right", no_wrap=is_name)
    for each in summaries:
        of = each["summary"]["tasks"]
        shown = (interval(of.get(name), ".2f") for name in names)
        table.add_row(escape(each["name"]), each["budget"] or "", *shown)
    console.print(table)


def cells(told: dict[str, Any]) -> list[str]:
    """A method's, from its summary."""
    from kvswap_torch.compare.statistics import interval

    memory, share = told["memory_bytes"], told["memory_share"]
    read, ms = told["bytes_read_per_token"], told["ms_per_token"]
    return [
        "-" if memory is None else f"{format_bytes(round(memory))} (1/{1 / share:.1f})",
        interval(told["accuracy"], ".2f"),
        interval(told["accuracy_difference"], "+.2f"),
        "-" if told["loss"] is None else f"{told['loss'][0]:.3f}",
        interval(told["loss_difference"], "+.3f"),
        "-" if read is None else format_bytes(round(read)),
        "-" if ms is None else f"{ms:.1f}",
    ]


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


class _Progress:
    """A line before a run, at most every ten seconds."""

    def __init__(self, runs: int, console: Console):
        self._runs, self._console = runs, console
        self._began = self._said = time.monotonic()

    def say(self, run: Any, done: int) -> None:
        now = time.monotonic()
        if done and now - self._said < LINE_SECONDS:
            return
        self._said = now
        left = "" if not done else (
            f", about {(now - self._began) / done * (self._runs - done):,.0f} s left")  # fmt: skip
        what = f"{run.name} {run.budget_text or ''}".rstrip()
        self._console.print(
            f"run {done + 1} of {self._runs}: document {run.document + 1}, {what}{left}",
            highlight=False, soft_wrap=True,
        )  # fmt: skip
