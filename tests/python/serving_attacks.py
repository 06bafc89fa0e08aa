"""A server attacked by one client: what each attack costs, and how long `/health` takes meanwhile.

    python -m tests.python.serving_attacks --model examples/reference_model

The server is ``kvswap serve`` itself with a context of 2,048 tokens, in a process of its own, asked
over HTTP on this machine.
"""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

CONTEXT = 2048
BODY = 440 << 10  # as large as one may be
ASKED = {"max_tokens": 3, "temperature": 0}
WORDS = "the quick brown fox "
STOPS = ["Observation:", "Thought:", "\n\n", "</s>"]

ATTACKS: dict[str, Any] = {
    "three tokens, nothing else": {"prompt": "Once upon a time"},
    "prompt of 430 KiB of words": {"prompt": WORDS * (BODY // 20)},
    "prompt of 430 KiB of one letter": {"prompt": "a" * (BODY - 200)},
    "prompt of 430 KiB of blanks": {"prompt": " " * (BODY - 200)},
    "body of 8 MiB": {"prompt": WORDS * ((8 << 20) // 20)},
    "4 usual stop texts": {"prompt": "Name a colour.", "stop": STOPS},
    "4 stop texts of 252 bytes": {"prompt": "Name a colour.", "stop": ["Question " * 28] * 4},
    "a stop text of 2,000 bytes": {"prompt": "Name a colour.", "stop": "Question " * 222},
    "body of empty lists": b'{"prompt": "a", "user": [' + b"[]," * (BODY // 3) + b"[]]}",
    "25,000 lists": b'{"prompt": "a", "max_tokens": 1, "user": [' + b"[]," * 25_000 + b"[]]}",
    "model's name of control characters": {"prompt": "a", "model": "\x01" * (BODY // 6)},
}


class Attacked:
    """The server, its process, and how long `/health` takes."""

    def __init__(self, model: Path, store: str) -> None:
        command = [sys.executable, "-m", "kvswap_torch", "serve", "--model", str(model)]
        command += ["--store", store, "--port", "0", "--max-context", str(CONTEXT), "--json"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        said = json.loads(self.process.stdout.readline())
        self._host = said["address"].removeprefix("http://")
        self.health_seconds: list[float] = []

    def ask(self, method: str, path: str, body: Any = None) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(self._host, timeout=600)
        data = body if isinstance(body, bytes | None) else json.dumps(body)
        connection.request(method, path, data, {"Content-Type": "application/json"})
        reply = connection.getresponse()
        told = reply.read()
        connection.close()
        return reply.status, told

    def cpu_seconds(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def peak_mib(self) -> float:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) / 1024

    @contextmanager
    def watched(self) -> Iterator[None]:
        over = threading.Event()

        def watch() -> None:
            while not over.wait(0.02):
                began = time.perf_counter()
                self.ask("GET", "/health")
                self.health_seconds.append(time.perf_counter() - began)

        thread = threading.Thread(target=watch)
        thread.start()
        yield
        over.set()
        thread.join()


def main(
    model: Annotated[Path, typer.Option(help="Folder of a model.")],
) -> None:
    with tempfile.TemporaryDirectory() as store:
        server = Attacked(model, store)
        server.ask("POST", "/v1/completions", ASKED | {"prompt": "warm"})
        print("attack | status | CPU seconds | peak memory, MiB more | /health at worst, seconds")
        for name, attack in ATTACKS.items():
            body = attack if isinstance(attack, bytes) else ASKED | attack
            cpu, peak, server.health_seconds = server.cpu_seconds(), server.peak_mib(), []
            with server.watched():
                status, _ = server.ask("POST", "/v1/completions", body)
                time.sleep(0.3)
            spent, grown = server.cpu_seconds() - cpu, server.peak_mib() - peak
            worst = max(server.health_seconds, default=0.0)
            print(f"{name} | {status} | {spent:.2f} | {grown:.1f} | {worst:.3f}", flush=True)
        server.process.terminate()
        assert server.process.wait() == 0


if __name__ == "__main__":
    typer.run(main)
