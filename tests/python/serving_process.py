"""A server in a process of its own, for tests; imports are made once, each server is a fork.

``python -m tests.python.serving_process FOLDER`` serves the model in the folder once for each line
of its input, JSON of what differs from the defaults, and says how each one ended.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

ROOT = Path(__file__).resolve().parents[2]
TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'system' %}{{ raise_exception('no system here') }}{% endif %}"
    "<{{ message['content'] }}>{% endfor %}"
)


def make_model(folder: Path) -> Any:
    """A tiny model of characters, with a chat template."""
    from tests.python.tiny_models import character_tokenizer, tiny_model

    model = tiny_model("llama", max_position_embeddings=2048)
    model.save_pretrained(folder)
    tokenizer = character_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return model, tokenizer


class Served:
    """The process that forks servers, one after the other."""

    def __init__(self, folder: Path):
        self._parent = subprocess.Popen(
            [sys.executable, "-m", "tests.python.serving_process", str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        self.address, self._pid = "", 0

    def start(self, **options: Any) -> dict[str, Any]:
        """What the server says of itself."""
        print(json.dumps(options), file=self._parent.stdin, flush=True)
        said = self._read()
        self.address, self._pid = said["address"], said["pid"]
        return said

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Sends a signal, waits; the exit status as ``os.waitpid`` has it."""
        os.kill(self._pid, number)
        return self.wait()

    def signal(self, number: signal.Signals) -> None:
        os.kill(self._pid, number)

    def wait(self) -> int:
        self._pid = 0
        return self._read()["status"]

    def kill(self) -> None:
        """Where a test has left it running."""
        if self._pid:
            self.end(signal.SIGKILL)

    def close(self) -> None:
        self.kill()
        self._parent.communicate()

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.address + path) as reply:
            return reply.read().decode()

    def metrics(self) -> dict[str, float]:
        lines = (line.rsplit(" ", 1) for line in self.get("/metrics").splitlines())
        return {name: float(value) for name, value in lines if name[0] != "#"}

    def _read(self) -> dict[str, Any]:
        line = self._parent.stdout.readline()
        assert line, "the server has ended"
        return json.loads(line)


def serve(loaded: tuple[Any, Any], store: str, limit: int = 1 << 30, **options: Any) -> None:
    with ExitStack() as stack:
        _serve(stack, loaded, store, limit, options)


def _serve(
    stack: ExitStack, loaded: tuple[Any, Any], store: str, limit: int, options: dict[str, Any]
) -> None:
    from kvswap_torch.cli.serve_log import log_to_stderr
    from kvswap_torch.hf.serving import limits
    from kvswap_torch.hf.serving.reuse import CacheOptions
    from kvswap_torch.hf.serving.server import Server, ServerOptions
    from tests.python.tiny_models import COVERING

    for name, value in options.pop("limits", {}).items():
        setattr(limits, name, value)
    files = options.pop("files", None)
    if files is not None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    if log := options.pop("log", None):
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
        stack.enter_context(log_to_stderr("json"))
    if commands := options.pop("faults", None):
        obey_faults(Path(commands))
    caches = {
        name: options.pop(name) for name in ("max_context", "prefill_chunk") if name in options
    }
    server = Server(
        *loaded,
        ServerOptions(name="tiny", store=Path(store), store_limit_bytes=limit, port=0, **options),
        CacheOptions(path=Path(store), config=COVERING, save_from=32, **caches),
    )
    said = {"address": server.address, "pid": os.getpid(), "saved": server.store.usable}
    server.run(lambda: print(json.dumps(said), flush=True))


def obey_faults(commands: Path) -> None:
    """Faults of the disk, as lines of JSON in a pipe say: `FaultyKernel.arm`'s, or null to heal."""
    from tests.python.faulty_kernel import FaultyKernel

    kernel = FaultyKernel()
    kernel.arm("read", nth=1 << 62)  # in place from the start

    def obey() -> None:
        while True:
            for line in commands.read_text().splitlines():
                fault = json.loads(line)
                if fault is None:
                    kernel.heal()
                else:
                    kernel.arm(**fault)

    threading.Thread(target=obey, daemon=True).start()


def served_model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """For a fixture: servers of one tiny model, ended with the tests that use them."""
    folder = tmp_path_factory.mktemp("model")
    make_model(folder)
    served = Served(folder)
    yield served
    served.close()


def ended_well(parent: Served) -> Iterator[Served]:
    """For a fixture: what a test has started is ended, and not by a crash."""
    yield parent
    if parent._pid:
        assert parent.end() == 0


def main() -> None:
    import torch
    import uvicorn  # noqa: F401  (before the fork)

    from kvswap_torch.cli.load import load_model, load_tokenizer
    from kvswap_torch.hf.serving import seam, server  # noqa: F401

    torch.set_num_threads(1)
    loaded = load_model(sys.argv[1]), load_tokenizer(sys.argv[1])
    seam.names()
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            serve(loaded, **json.loads(line))
            os._exit(0)
        print(json.dumps({"status": os.waitpid(child, 0)[1]}), flush=True)


if __name__ == "__main__":
    main()
