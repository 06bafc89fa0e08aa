"""A reader who types a page's commands: `kvswap` in this process, a server and the rest beside."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from typer.testing import CliRunner

from kvswap_torch.cli.app import app
from tests.first_hour.pdf import book_pdf
from tests.first_hour.users import ANSWER, QUESTION, SHORT_CHARACTERS, book
from tests.packaging.run_docs import ROOT, scripts

MODEL = "examples/reference_model"
GGUF = "tiny.gguf"
FAST_DISK = "disk"
READY_SECONDS = 300
# What a page writes -> what this reader has; the longer ones first.
STANDS_FOR = {
    "curl ": "curl --fail --noproxy '*' ",  # an error of the server must be one here
    "--store DIR": "--store store",
    "--store /disk/kv": "--store store",
    "--model DIR": f"--model {MODEL}",
    "MODEL.Q8_0.gguf": GGUF,
    "MODEL.gguf": GGUF,
    "--name NAME": "--name reference",
    '"NAME"': '"reference_model"',
    "/fast/disk": FAST_DISK,
    "(a long document) Who tells it?": f"The secret of the amber falcon is {ANSWER}. {QUESTION}",
    "Who tells it?": QUESTION,
    "docs/methods.md": "docs/saved_caches.md",  # a shorter page
    "--methods all": "--methods all --dry-run",  # hours; the command after it is run in full
    "--max-context 32768 --max-batch 8": "--max-context 1024 --max-batch 1",
}


def prepare(folder: Path) -> None:
    """What the pages take for granted: a book, its question in files, this clone's folders."""
    book(folder, SHORT_CHARACTERS)
    text = (folder / "book.txt").read_text(encoding="utf-8")
    (folder / "notes.md").write_text(text, encoding="utf-8")
    (folder / "book.pdf").write_bytes(book_pdf(text))
    asked = {"document": text, "question": QUESTION, "answer": ANSWER}
    (folder / "x.jsonl").write_text(json.dumps(asked) + "\n", encoding="utf-8")
    asked = {"role": "user", "content": f"{text}\nQuestion: {QUESTION}\nAnswer:"}
    question = {"model": "reference", "stream": True, "messages": [asked]}
    (folder / "question.json").write_text(json.dumps(question), encoding="utf-8")
    for name in ("examples", "Makefile"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "docs").mkdir()
    for page in (ROOT / "docs").glob("*.md"):
        (folder / "docs" / page.name).symlink_to(page)
    (folder / "docs" / "a.txt").write_text("The keeper wrote this.\n", encoding="utf-8")
    for name in ("build", FAST_DISK, "bin", "store"):
        (folder / name).mkdir()
    scripts(folder / "bin")
    torchrun = "exec python -m torch.distributed.run"
    (folder / "bin" / "torchrun").write_text(f'#!/bin/sh\n{torchrun} "$@"\n', encoding="utf-8")
    (folder / "bin" / "torchrun").chmod(0o755)


class Reader:
    """Types commands in `folder`, which is the current one; `close` ends a server left running."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._server: subprocess.Popen[bytes] | None = None
        self._port = free_port()

    def type(self, command: str) -> str:
        """What the command said, both streams; an `AssertionError` where it did not end with 0."""
        for words, mine in (STANDS_FOR | {"localhost:8000": f"127.0.0.1:{self._port}"}).items():
            command = command.replace(words, mine)
        if command.startswith("kvswap serve"):
            return self._serve(command)
        before, _, last = command.rpartition(" | ")
        if not last.startswith("kvswap "):
            return self._shell(command, subprocess.STDOUT)
        given = self._shell(before, None) if before else ""
        done = CliRunner().invoke(app, shlex.split(last)[1:], given)
        assert done.exit_code == 0, f"{command}\n{done.output}\n{done.exception!r}"
        return done.output

    def close(self) -> None:
        """Ends a server as its terminal would, and that must be a good end."""
        if self._server is None:
            return
        self._server.send_signal(signal.SIGINT)
        try:
            status = self._server.wait(READY_SECONDS)
        finally:
            self._server.kill()
        assert status == 0, self._log()

    def _shell(self, command: str, errors: int | None) -> str:
        done = subprocess.run(
            ["bash", "-o", "pipefail", "-c", command], env=self._environment(), text=True,
            stdout=subprocess.PIPE, stderr=errors, check=False, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        assert done.returncode == 0, f"{command}\n{done.stdout}"
        return done.stdout

    def _serve(self, command: str) -> str:
        command = command.replace(" --port 8000", "") + f" --port {self._port}"
        words = [sys.executable, "-m", "kvswap_torch", *shlex.split(command)[1:]]
        with (self._folder / "server.log").open("wb") as log:
            self._server = subprocess.Popen(
                words, env=self._environment(), stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )
        end = time.monotonic() + READY_SECONDS
        while "a page to ask" not in self._log():
            assert self._server.poll() is None and time.monotonic() < end, self._log()
            time.sleep(0.2)
        return self._log()

    def _log(self) -> str:
        return (self._folder / "server.log").read_text(errors="replace")

    def _environment(self) -> dict[str, str]:
        path = f"{self._folder / 'bin'}:{os.environ['PATH']}"
        return os.environ | {"PATH": path, "PYTHONPATH": str(ROOT)}


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]
