"""Types the commands of a page in an empty folder, one after the other, as a reader would."""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.first_hour.machine import Host, Machine
from tests.packaging.run_docs import ROOT, blocks, commands

PAGES = ROOT / "docs" / "first-hour"
READY_SECONDS = 600


class WentWrongError(Exception):
    """A command failed, or said other than it should."""


@dataclass
class Step:
    """A command as it was typed, how long it took, and how long its programs computed.

    A server's share of the processor is counted where it ends.
    """

    typed: str
    seconds: float
    processor_seconds: float = 0.0


class Began:
    """The clock, and the processor time of this process's children, when a command was typed."""

    def __init__(self) -> None:
        self._clock = time.monotonic()
        self._processor = self._of_children()

    def seconds(self) -> float:
        return time.monotonic() - self._clock

    def processor_seconds(self) -> float:
        """Of those children that have ended since."""
        return self._of_children() - self._processor

    @staticmethod
    def _of_children() -> float:
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime


class Typist:
    """A reader of one page, in a folder of its own.

    Parameters
    ----------
    page
        Name of the page below docs/first-hour, without its ending.
    folder
        Empty; commands are typed there, or in the folder that a ``cd`` of the page leads to.
    instead
        What the reader types in the place of words that stand for something of theirs. Each must be
        on the page.
    machine
        Where the commands run.
    """

    def __init__(
        self, page: str, folder: Path, instead: dict[str, str], machine: Machine | None = None
    ):
        self.page = PAGES / f"{page}.md"
        self._folder = folder
        self._here = folder
        self._instead = instead
        self._machine = machine or Host()
        self.steps: list[Step] = []
        self._said: list[str] = []
        self._servers: list[subprocess.Popen[bytes]] = []
        text = self.page.read_text(encoding="utf-8")
        if missing := [word for word in instead if word not in text]:
            raise WentWrongError(f"{self.page.name}: must have {missing}, and has not")

    def unread(self) -> Iterator[str]:
        """The page's commands, in order, as this reader types them."""
        for block in blocks(self.page):
            for command in commands(block) if block.language == "text" else ():
                if not command.startswith(self._machine.left_out):
                    yield self._replaced(command)

    def block(self, language: str) -> str:
        """The page's one block of that language."""
        (found,) = (block.text for block in blocks(self.page) if block.language == language)
        return found

    def type(self, command: str) -> str:
        """What a command wrote, both streams.

        Raises
        ------
        WentWrongError
            It did not end with 0.
        """
        if moved := re.fullmatch(r"cd (\S+)", command):
            self._here = self._here / moved[1]
        print(f"$ {command}", flush=True)
        began = Began()
        done = subprocess.run(
            self._shell(command), env=self._machine.environment(), text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
        ) if not moved else subprocess.CompletedProcess(command, 0, "")  # fmt: skip
        self._note(command, began)
        if done.returncode:
            raise WentWrongError(f"{command}: ended with {done.returncode}\n{done.stdout}")
        self._said.append(done.stdout)
        return done.stdout

    def serve(self, command: str, until: str) -> None:
        """Types a command that goes on, in a terminal of its own; returns when it says `until`."""
        print(f"$ {command}", flush=True)
        began = Began()
        log = self._folder / "server.log"
        with log.open("wb") as out:
            server = subprocess.Popen(
                self._shell(command), env=self._machine.environment(), stdout=out,
                stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        self._servers.append(server)
        while until not in log.read_text(errors="replace"):
            if server.poll() is not None or began.seconds() > READY_SECONDS:
                raise WentWrongError(f"{command}: must say {until!r}\n{log.read_text()}")
            time.sleep(0.2)
        self._said.append(log.read_text(errors="replace"))
        self._note(command, began)

    def must_have_said_what_is_shown(self) -> None:
        """That each line of output on the page was said, whatever its numbers.

        Raises
        ------
        WentWrongError
        """
        said = {_shape(line) for text in self._said for line in text.splitlines()}
        for block in blocks(self.page):
            for line in block.text.splitlines() if block.language == "output" else ():
                if line.strip() and _shape(self._replaced(line)) not in said:
                    raise WentWrongError(f"{self.page.name}: shows {line!r}, which nothing said")

    def press_ctrl_c(self) -> None:
        """Ends what `serve` began, as its terminal would."""
        while self._servers:
            server = self._servers.pop()
            began = Began()
            if server.poll() is None:
                os.killpg(server.pid, signal.SIGINT)
            status = server.wait(READY_SECONDS)
            self._note("Ctrl-C", began)
            if status:
                raise WentWrongError(f"Ctrl-C: the server must end with 0, ended with {status}")

    def give_up(self) -> None:
        """Leaves no process behind, however the hour went."""
        for server in self._servers:
            if server.poll() is None:
                os.killpg(server.pid, signal.SIGKILL)
                server.wait()

    def _shell(self, command: str) -> list[str]:
        """An environment that a command before has activated stays so."""
        active = next((p for p in (self._here, self._folder) if (p / "env").is_dir()), None)
        before = f". {self._machine.inside(active)}/env/bin/activate; " if active else ""
        script = before + ("exec " if self._is_plain(command) else "") + command
        return self._machine.command(script, self._here)

    @staticmethod
    def _is_plain(command: str) -> bool:
        """One program, which then has the shell's place: a signal reaches it alone."""
        return command.startswith("kvswap serve")

    def _note(self, command: str, began: Began) -> None:
        self.steps.append(Step(command, began.seconds(), began.processor_seconds()))
        print(f"  {self.steps[-1].seconds:.1f} s", flush=True)

    def _replaced(self, text: str) -> str:
        for word, mine in self._instead.items():
            text = text.replace(word, mine)
        return text


def _shape(line: str) -> str:
    """A line without its numbers and widths."""
    return re.sub(r"\d[\d.,]*", "#", " ".join(line.split()))


def must_say(told: str, *wanted: str) -> None:
    """That a command's output has each of these.

    Raises
    ------
    WentWrongError
    """
    if missing := [words for words in wanted if words not in " ".join(told.split())]:
        raise WentWrongError(f"must say {missing}, says\n{told}")
