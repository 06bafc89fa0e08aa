"""How far long work is: a bar, or a line every ten seconds where there is no terminal."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from kvswap_torch.memory_size import format_bytes

if TYPE_CHECKING:
    from rich.console import Console

LINE_SECONDS = 10.0

Advance = Callable[[float], None]  # so many tokens more, parts of them too


@contextlib.contextmanager
def reading(tokens: int, console: Console, model: Any = None) -> Iterator[Advance]:
    """Shows how many of `tokens` are read while its body advances, and what `model` waits for."""
    weights = weights_told(model)
    if console.is_terminal or console.is_jupyter:
        with _bar(console) as bar:
            task = bar.add_task("prefill", total=tokens, weights="")
            yield lambda done: bar.update(task, advance=done, weights=weights())
    else:
        yield ReadingLines(tokens, console, told=weights).advance


def weights_told(model: Any) -> Callable[[], str]:
    """Says what weights were read from disk since; nothing where all are in memory."""
    reader = getattr(model, "weights_reader", None)
    if reader is None:
        return lambda: ""
    read, waited = reader.bytes_read, reader.wait_seconds

    def told() -> str:
        return (
            f"{format_bytes(reader.bytes_read - read)} of weights read, "
            f"{reader.wait_seconds - waited:,.0f} s waited for them"
        )

    return told


@contextlib.contextmanager
def waiting_for_weights(model: Any, console: Console) -> Iterator[None]:
    """Says while its body runs what weights were read; nothing where all are in memory."""
    if getattr(model, "weights_reader", None) is None:
        yield
        return
    with waiting(weights_told(model), console):
        yield


@contextlib.contextmanager
def until_it_writes(
    model: Any, console: Console, write: Callable[[str], None]
) -> Iterator[Callable[[str], None]]:
    """Yields `write`, before whose first call it is said what weights were read."""
    with contextlib.ExitStack() as shown:
        shown.enter_context(waiting_for_weights(model, console))

        def write_on(text: str) -> None:
            shown.close()
            write(text)

        yield write_on


@contextlib.contextmanager
def waiting(
    what: str | Callable[[], str], console: Console, every_seconds: float = LINE_SECONDS
) -> Iterator[None]:
    """Says that `what` goes on while its body, which cannot say how far it is, runs."""
    if console.is_terminal or console.is_jupyter:
        with console.status(what if isinstance(what, str) else _Told(what)):
            yield
        return
    ended = threading.Event()

    def say() -> None:
        began = time.monotonic()
        while not ended.wait(every_seconds):
            seconds = time.monotonic() - began
            now = what if isinstance(what, str) else what()
            console.print(f"{now}: {seconds:,.0f} s so far", highlight=False)

    thread = threading.Thread(target=say, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


class _Told:
    """A text that is asked for each time it is shown."""

    def __init__(self, told: Callable[[], str]):
        self._told = told

    def __rich__(self) -> str:
        return self._told()


class ReadingLines:
    """One line at most every ten seconds, none for what takes less."""

    def __init__(
        self,
        tokens: int,
        console: Console,
        clock: Callable[[], float] = time.monotonic,
        told: Callable[[], str] = str,
    ):
        self._tokens, self._console, self._clock, self._told = tokens, console, clock, told
        self._began = self._said = clock()
        self._done = 0.0

    def advance(self, tokens: float) -> None:
        self._done += tokens
        now = self._clock()
        if now - self._said < LINE_SECONDS or self._done <= 0:
            return
        self._said = now
        left = (now - self._began) * (self._tokens / self._done - 1)
        more = self._told()
        self._console.print(
            f"reading the document: {self._done:,.0f} of {self._tokens:,} tokens, "
            f"about {max(0.0, left):,.0f} s left{more and '; '}{more}",
            highlight=False,
        )


@contextlib.contextmanager
def counted_by_layers(model: Any, advance: Advance) -> Iterator[None]:
    """Each layer of a forward pass of the body advances by its share of the pass's tokens."""
    from kvswap_torch.hf.families import model_parts

    layers = model_parts(model).layers

    def count(module: Any, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        advance(hidden.shape[1] / len(layers))

    with contextlib.ExitStack() as hooks:
        for layer in layers:
            hooks.callback(layer.register_forward_hook(count, with_kwargs=True).remove)
        yield


def _bar(console: Console) -> Any:
    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeRemainingColumn,
    )

    return Progress(
        TextColumn("reading the document"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.completed:,.0f} of {task.total:,.0f} tokens"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[weights]}"),
        console=console,
    )
