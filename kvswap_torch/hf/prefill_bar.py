"""A progress bar over the layers of a long forward pass, on request."""

from __future__ import annotations

from typing import Any


class PrefillBar:
    """Shows how far a prefill is, inside a ``generate()`` that shows nothing itself.

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

    def layer(self, index: int, tokens: int) -> None:
        """Layer `index` of a pass over `tokens` new positions of each sequence begins."""
        if tokens <= self._queries_max:
            return
        if self._bar is None:
            self._show(tokens)
        self._bar.update(self._task, completed=index)

    def end(self) -> None:
        """The pass has ended, whole or not."""
        if self._bar is not None:
            bar, self._bar = self._bar, None
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
        self._task = self._bar.add_task(f"prefill, {tokens:,} tokens", total=self._layers)
        self._bar.start()
