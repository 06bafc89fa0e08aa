"""A progress bar over the layers of a long forward pass, on request."""

from __future__ import annotations

import time
from typing import Any

LINE_SECONDS = 10.0


class PrefillBar:
    """Shows how far a prefill is, inside a ``generate()`` that shows nothing itself.

    Without a terminal it is a line on it every ten seconds.

    States: idle -> shown by `layer` of a pass's first layer -> idle by `end`, in any case.
    Thread rules: as the cache's.

    Parameters
    ----------
    layers
        Of the model.
    queries_max
        Longer passes are prefills; shorter ones are never shown.
    console
        A rich console; None: the terminal's.
    """

    def __init__(self, layers: int, queries_max: int, console: Any = None):
        self._layers = layers
        self._queries_max = queries_max
        self._console = console
        self._bar: Any = None
        self._task: Any = None
        self._piece = 0  # of the pass that is shown
        self._pieces = 1
        self._began = self._said = 0.0

    def layer(self, index: int, tokens: int, whole: int = 0) -> None:
        """Layer `index` of a pass over `tokens` new positions of each sequence begins.

        whole: tokens of all the pieces that the pass is one of.
        """
        whole = max(tokens, whole)
        if whole <= self._queries_max:
            return
        if self._bar is None:
            self._pieces = -(-whole // tokens)
            self._piece = 0
            self._show(whole)
        elif index == 0:
            self._piece += 1
        done = self._piece * self._layers + index
        self._bar.update(self._task, completed=done)
        if not self._is_seen():
            self._say(done)

    def end(self) -> None:
        """The pass has ended, whole or not."""
        if self._bar is not None:
            bar, self._bar = self._bar, None
            if bar.live.is_started:
                bar.stop()

    def _show(self, tokens: int) -> None:
        # Loaded when asked for: importing the cache needs no terminal.
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("layer {task.completed} of {task.total}"),
            TimeRemainingColumn(),
        )
        self._bar = Progress(*columns, console=self._console, transient=True)
        total = self._layers * self._pieces
        self._task = self._bar.add_task(f"prefill, {tokens:,} tokens", total=total)
        self._began = self._said = time.monotonic()
        if self._is_seen():
            self._bar.start()

    def _is_seen(self) -> bool:
        console = self._bar.console
        return bool(console.is_terminal or console.is_jupyter)

    def _say(self, done: int) -> None:
        now = time.monotonic()
        if now - self._said < LINE_SECONDS:
            return
        self._said = now
        task = self._bar.tasks[0]
        self._bar.console.print(
            f"{task.description}: layer {done} of {task.total}, {now - self._began:.0f} s so far",
            highlight=False,
        )
