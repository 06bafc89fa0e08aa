"""How a run is reported: closing line, comparison table, JSON."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape as escaped
from rich.table import Table

from kvswap_torch.errors import ConfigError, StorageError
from kvswap_torch.memory_size import format_bytes

if TYPE_CHECKING:
    from kvswap_torch.cli.agreement import Agreement
    from kvswap_torch.cli.conversation import Turn

__all__ = [
    "STDOUT",
    "Result",
    "Run",
    "closing_line",
    "comparison",
    "error_line",
    "escaped",
    "plain_stats",
    "print_error",
    "print_interrupted",
    "write_json",
]


STDOUT = Path("-")


def error_line(error: BaseException) -> str:
    """What the user can mend, as a console prints it: one line, whatever it was worded as."""
    text = re.sub(r"\s*\n\s*", " ", _words(error).strip())
    return f"[bold red]error:[/bold red] {escaped(text or type(error).__name__)}"


def _words(error: BaseException) -> str:
    """Without the number and the second path that Python puts around our own sentence."""
    if isinstance(error, StorageError) and error.strerror:
        named = error.filename is None or str(error.filename) in error.strerror
        return error.strerror if named else f"{error.strerror}: {error.filename!r}"
    return str(error)


def print_error(error: BaseException) -> None:
    """Prints `error_line` to stderr."""
    Console(stderr=True, soft_wrap=True, highlight=False).print(error_line(error))


def print_interrupted() -> None:
    """Prints to stderr that Ctrl-C was heard."""
    print("interrupted", file=sys.stderr)


@dataclass
class Run:
    """One pass over document and questions with one cache; `stats` is the cache's own account."""

    prefill_tokens: int
    prefill_seconds: float
    turns: list[Turn]
    stats: dict[str, Any] = field(default_factory=dict)

    @property
    def tokens_per_second(self) -> float | None:
        """Over all turns, each answer's first token left out."""
        timed = [turn for turn in self.turns if turn.tokens_per_second]
        seconds = sum((turn.answer_tokens - 1) / turn.tokens_per_second for turn in timed)
        return sum(turn.answer_tokens - 1 for turn in timed) / seconds if seconds else None


@dataclass
class Result:
    """All of a command's outcome; `memory`, `agreements` are None without ``--compare``."""

    model: str
    document: str
    document_tokens: int
    disk: Run
    memory: Run | None = None
    agreements: list[Agreement] | None = None

    @property
    def answers_equal(self) -> bool | None:
        """Whether both caches gave the same tokens; None without a comparison."""
        if self.memory is None:
            return None
        ours = [turn.answer_ids for turn in self.disk.turns]
        return ours == [turn.answer_ids for turn in self.memory.turns]


def plain_stats(stats: Any) -> dict[str, Any]:
    """A cache's statistics as a plain dict, whether they came as a mapping or as an object."""
    if isinstance(stats, Mapping):
        return dict(stats)
    if hasattr(stats, "as_dict"):
        return dict(stats.as_dict())
    if dataclasses.is_dataclass(stats) and not isinstance(stats, type):
        return dataclasses.asdict(stats)
    return dict(vars(stats))


def tensor_bytes(cache: Any) -> int:
    """Bytes of keys and values in a Hugging Face cache that holds tensors."""
    tensors = (getattr(layer, name, None) for layer in cache.layers for name in ("keys", "values"))
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)


def closing_line(run: Run) -> str:
    """One line of statistics; what a cache does not report is left out."""
    parts = [f"prefill {run.prefill_tokens / max(run.prefill_seconds, 1e-9):,.0f} tokens/s"]
    if run.prefill_tokens == 0:
        parts = [f"opened in {run.prefill_seconds:.2f} s, nothing was read"]
    if run.tokens_per_second is not None:
        parts.append(f"answers {run.tokens_per_second:.1f} tokens/s")
    parts += [f"{label} {value}" for label, value in _facts(run)]
    return "[dim]" + escaped(" · ".join(parts)) + "[/dim]"


def comparison(result: Result) -> Table:
    """Answers, speeds and bytes of both caches side by side."""
    disk, memory = result.disk, result.memory
    title = f"{result.document_tokens:,} tokens of document"
    table = Table("", "on disk", "full, in memory", title=title, title_justify="left")
    for index, (ours, theirs) in enumerate(zip(disk.turns, memory.turns, strict=True)):
        table.add_row(
            f"> {escaped(ours.question)}",
            escaped(ours.answer.strip()),
            escaped(theirs.answer.strip()),
        )
        table.add_row(*_agreement(result.agreements[index]))
    table.add_section()
    for label, value in (
        ("prefill", lambda run: f"{run.prefill_seconds:.2f} s"),
        ("first token", lambda run: f"{_mean(t.first_token_seconds for t in run.turns):.2f} s"),
        ("tokens/s", lambda run: _or_dash(run.tokens_per_second, "{:.1f}")),
    ):
        table.add_row(label, value(disk), value(memory))
    facts, others = dict(_facts(disk)), dict(_facts(memory))
    for label in facts | others:
        table.add_row(label, facts.get(label, ""), others.get(label, ""))
    same = "[green]yes[/green]" if result.answers_equal else "[yellow]no[/yellow]"
    table.add_row("same tokens", same, "")
    return table


def _agreement(found: Agreement) -> tuple[str, str, str]:
    """The first token that differs, and how likely each cache finds the full cache's answer."""
    if found.first_difference is None:
        where, tokens = "  no token differs", ("", "")
    else:
        where = f"  token {found.first_difference + 1} differs"
        tokens = tuple(
            "(ended)" if token is None else escaped(repr(token))
            for token in (found.on_disk, found.in_memory)
        )
    cells = (
        f"{token} full's answer: {_or_dash(score, '{:.2f}')} nats".strip()
        for token, score in zip(
            tokens, (found.log_likelihood_on_disk, found.log_likelihood_in_memory), strict=True
        )
    )
    return where, *cells


def _facts(run: Run) -> list[tuple[str, str]]:
    """The cache's own account, for a reader."""
    stats, facts = run.stats, []

    def tell(label: str, key: str, show: Any) -> None:
        if isinstance(stats.get(key), int | float):
            facts.append((label, show(stats[key])))

    tell("KV full", "kv_bytes_full", format_bytes)
    tell("KV on disk", "kv_bytes_on_disk", format_bytes)
    tell("KV in memory", "resident_bytes", format_bytes)
    tell("read per token", "bytes_read_per_token", format_bytes)
    tell("hit rate", "hit_rate", "{:.0%}".format)
    missed, error = stats.get("missed_mass"), stats.get("missed_mass_error")
    if missed is not None and error is not None:
        facts.append(("attention missed", f"about {missed:.1%} (± {error:.1%})"))
    if excess := stats.get("missed_mass_excess"):
        facts.append(
            ("above audit.max_missed_mass", f"{excess:.1%} in the worst layer: more memory helps")
        )
    waited, hidden = stats.get("wait_seconds"), stats.get("hidden_seconds")
    if isinstance(waited, int | float) and isinstance(hidden, int | float) and waited + hidden > 0:
        facts.append(("of reading waited for", f"{waited / (waited + hidden):.0%}"))
    tell("weights read", "weights_bytes_read", format_bytes)
    tell("waited for weights", "weights_wait_seconds", "{:.1f} s".format)
    for label, key in (("reader", "reader"), ("I/O", "io_mode"), ("fell back", "fallbacks")):
        if stats.get(key):
            facts.append((label, str(stats[key])))
    return facts


def write_json(result: Result, path: Path) -> None:
    """Writes the result to a file or, for `STDOUT`, to stdout, with these keys.

    ``model``, ``document``, ``document_tokens``, ``answers_equal`` (null without a comparison);
    ``agreements`` (null without one), each with ``first_difference`` (tokens before it, null when
    none differs), ``on_disk`` and ``in_memory`` (that token), ``log_likelihood_on_disk`` and
    ``log_likelihood_in_memory`` (nats, of the full cache's answer);
    ``disk`` and ``memory`` (null without one), each with ``prefill_tokens`` (0 with ``--open``),
    ``prefill_seconds`` (with ``--open`` those that opening took),
    ``tokens_per_second`` (answers, first tokens left out), ``turns`` (each with ``question``,
    ``answer``, ``question_tokens``, ``answer_tokens``, ``first_token_seconds``,
    ``tokens_per_second``, ``answer_ids``) and ``stats`` (see `KVSwapCache.stats`).
    """
    fields = dataclasses.asdict(result) | {"answers_equal": result.answers_equal}
    for name, run in (("disk", result.disk), ("memory", result.memory)):
        if run is not None:
            fields[name]["tokens_per_second"] = run.tokens_per_second
    text = json.dumps(fields, indent=2, default=str) + "\n"
    try:
        if path == STDOUT:
            sys.stdout.write(text)
        else:
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--json: {path} must be writable: {error}") from error


def _mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return sum(numbers) / len(numbers)


def _or_dash(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)
