"""``kvswap chat``: a conversation in a terminal over a saved document."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console

from kvswap_torch.cli.conversation import CannotGoBackError
from kvswap_torch.cli.reading import until_it_writes
from kvswap_torch.cli.report import error_line
from kvswap_torch.cli.saved import writer
from kvswap_torch.errors import ConfigError, KVSwapError

if TYPE_CHECKING:
    from kvswap_torch.cli.conversation import Conversation

HELP = """\
Ask about the document; each question sees those before it.
/ask QUESTION  ask the document alone, all turns forgotten
/back          forget the last turn
/stats         what the cache has read and what it takes
/quit          end, as Ctrl-D does; {ctrl_c}"""
CTRL_C = {
    False: "Ctrl-C ends an answer, and at the prompt the chat",
    True: "Ctrl-C has no effect: SIGINT was ignored when this command began",
}


class Chat:
    """A conversation, and where each of its turns began."""

    def __init__(self, conversation: Conversation, max_new_tokens: int, console: Console) -> None:
        self._conversation = conversation
        self._max_new_tokens = max_new_tokens
        self._console = console
        self._begins = [len(conversation.ids)]  # of each turn, and of the next

    def run(self) -> None:
        """Answers lines until there are no more."""
        if sys.stdin is None:
            raise ConfigError("chat: stdin must be open, since questions are read from it")
        self._help()
        # What is no UTF-8 arrives as text that the question's own check refuses.
        if hasattr(sys.stdin, "reconfigure"):
            sys.stdin.reconfigure(errors="surrogateescape")
        while True:
            try:
                line = self._console.input("\n[bold]> [/bold]").strip()
            except EOFError:
                return
            if line == "/quit":
                return
            self.answer(line)

    def answer(self, line: str) -> None:
        """One line: a question or a command."""
        match line.split(maxsplit=1):
            case []:
                return
            case ["/ask", question]:
                if self._go_back(0):
                    self._ask(question)
            case ["/back"]:
                self._go_back(max(0, len(self._begins) - 2))
            case ["/stats"]:
                self._console.print(str(self._conversation.cache.stats()), markup=False)
            case [word, *_] if word.startswith("/"):
                self._help()
            case _:
                self._ask(line)

    def _ask(self, question: str) -> None:
        try:
            with (
                _interrupted() as is_interrupted,
                until_it_writes(
                    self._conversation.model, self._console, writer(self._console)
                ) as write,
            ):
                self._conversation.ask(question, self._max_new_tokens, write, is_interrupted)
            self._begins.append(len(self._conversation.ids))
        except KeyboardInterrupt:
            self._take_back(question)
        except KVSwapError as error:
            self._take_back(question)
            self._complain(error)
        self._console.print()

    def _go_back(self, turns: int) -> bool:
        """Only the first `turns` turns stay; all of them, and False, where that cannot be."""
        try:
            self._conversation.go_back(self._begins[turns], turns)
        except CannotGoBackError as error:
            self._complain(error)
            return False
        del self._begins[turns + 1 :]
        return True

    def _help(self) -> None:
        text = HELP.format(ctrl_c=CTRL_C[_is_ignored()])
        self._console.print(text, markup=False, highlight=False)

    def _complain(self, error: KVSwapError) -> None:
        self._console.print(error_line(error), soft_wrap=True, highlight=False)

    def _take_back(self, question: str) -> None:
        """Of a turn that did not end nothing stays, or all that was read where nothing can go."""
        if not self._go_back(len(self._begins) - 1):
            self._conversation.accept(question)
            self._begins.append(len(self._conversation.ids))


@contextmanager
def _interrupted() -> Iterator[Callable[[], bool]]:
    """Tells whether Ctrl-C was pressed; a second one raises KeyboardInterrupt at once.

    Between two passes all layers have read the same; within one, those that cannot go back may be
    ahead of the others for good. If SIGINT is ignored (`nohup`, `&` in a script), it stays so.
    """
    if _is_ignored():
        yield lambda: False
        return
    heard = False

    def hear(number: int, frame: Any) -> None:
        nonlocal heard
        if heard:
            raise KeyboardInterrupt
        heard = True

    before = signal.signal(signal.SIGINT, hear)
    try:
        yield lambda: heard
    finally:
        signal.signal(signal.SIGINT, before)


def _is_ignored() -> bool:
    return signal.getsignal(signal.SIGINT) is signal.SIG_IGN
