"""``kvswap chat``: a conversation in a terminal over a saved document."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console

from kvswap_torch.cli.report import escaped
from kvswap_torch.cli.saved import writer
from kvswap_torch.errors import KVSwapError

if TYPE_CHECKING:
    from kvswap_torch.cli.conversation import Conversation

HELP = """\
Ask about the document; each question sees those before it.
/ask QUESTION  ask the document alone, all turns forgotten
/back          forget the last turn
/stats         what the cache has read and what it takes
/quit          end, as Ctrl-D does; Ctrl-C ends an answer"""


class Chat:
    """A conversation, and where each of its turns began."""

    def __init__(self, conversation: Conversation, max_new_tokens: int, console: Console) -> None:
        self._conversation = conversation
        self._max_new_tokens = max_new_tokens
        self._console = console
        self._begins = [len(conversation.ids)]  # of each turn, and of the next

    def run(self) -> None:
        """Answers lines until there are no more."""
        self._console.print(HELP, markup=False, highlight=False)
        while True:
            try:
                line = self._console.input("\n[bold]> [/bold]").strip()
            except (EOFError, KeyboardInterrupt):
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
                self._go_back(0)
                self._ask(question)
            case ["/back"]:
                self._go_back(max(0, len(self._begins) - 2))
            case ["/stats"]:
                self._console.print(str(self._conversation.cache.stats()), markup=False)
            case [word, *_] if word.startswith("/"):
                self._console.print(HELP, markup=False, highlight=False)
            case _:
                self._ask(line)

    def _ask(self, question: str) -> None:
        try:
            self._conversation.ask(question, self._max_new_tokens, writer(self._console))
            self._begins.append(len(self._conversation.ids))
        except KeyboardInterrupt:
            self._go_back(len(self._begins) - 1)
        except KVSwapError as error:
            self._go_back(len(self._begins) - 1)
            self._console.print(f"[bold red]error:[/bold red] {escaped(str(error))}")
        self._console.print()

    def _go_back(self, turns: int) -> None:
        """Only the first `turns` turns stay."""
        self._conversation.go_back(self._begins[turns], turns)
        del self._begins[turns + 1 :]
