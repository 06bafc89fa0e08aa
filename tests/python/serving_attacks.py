"""A server attacked by one client: what each attack costs, and how long `/health` takes meanwhile.

    python -m tests.python.serving_attacks --model examples/reference_model

The server is ``kvswap serve`` itself with a context of 2,048 tokens, in a process of its own, asked
over HTTP on this machine.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
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
    "16 answers, 20 log-probabilities each": {"prompt": "a", "n": 16, "logprobs": 20},
    "128 prompts scored": {"prompt": [WORDS] * 128, "echo": True, "logprobs": 5, "max_tokens": 0},
    "a schema of 60 KiB": {"messages": [{"role": "user", "content": "a"}], "response_format": {
        "type": "json_schema", "json_schema": {"schema": {"type": "object", "properties": {
            f"field{i}": {"type": "string", "pattern": "^[a-z]{1,40}$"} for i in range(900)}}}}},
    "a schema that grows": {"messages": [{"role": "user", "content": "a"}], "response_format": {
        "type": "json_schema", "json_schema": {"schema": {"type": "string", "pattern":
            "((((a{1,99}){1,99}){1,99}){1,99}){1,99}"}}}},
}  # fmt: skip
HEAD = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def half_heads(server: Attacked) -> str:
    """Each says half of what it wants, and stays."""
    clients = [server.connect() for _ in range(600)]
    for client in clients:
        with contextlib.suppress(OSError):
            client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nX-a: ")
    time.sleep(2)
    for client in clients:
        client.close()
    return "closed"


def bodies_at_once(server: Attacked) -> str:
    """24 clients, each with as large a body as one may have."""
    body = json.dumps({"prompt": "a", "max_tokens": 1, "user": "u" * (BODY - 200)})
    with ThreadPoolExecutor(24) as pool:
        asked = [
            pool.submit(server.ask, "POST", "/v1/completions", body.encode()) for _ in range(24)
        ]
        statuses = sorted({each.result()[0] for each in asked})
    return ", ".join(map(str, statuses))


def declared(server: Attacked) -> str:
    """A body that says that it has 1 GiB, and sends what is taken of it."""
    client = server.connect()
    client.sendall(f"{HEAD}Content-Length: {1 << 30}\r\n\r\n".encode())
    status = client.recv(20).split()[1].decode()
    with contextlib.suppress(OSError):
        for _ in range(1 << 10):
            client.sendall(bytes(1 << 20))
    client.close()
    return status


def dripping(server: Attacked) -> str:
    """100 bodies, a byte each now and then."""
    clients = [server.connect() for _ in range(100)]
    for client in clients:
        client.sendall(f"{HEAD}Content-Length: 1000\r\n\r\n".encode())
    for _ in range(20):
        for client in clients:
            with contextlib.suppress(OSError):
                client.sendall(b" ")
        time.sleep(0.1)
    for client in clients:
        client.close()
    return "left"


def hanging_up(server: Attacked) -> str:
    """60 clients ask for a long answer and leave at once."""
    body = json.dumps({"prompt": "Once", "max_tokens": 1000, "stream": True}).encode()
    for _ in range(60):
        with server.connect() as client:
            client.sendall(f"{HEAD}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    while b"kvswap_running 0.0" not in (told := server.ask("GET", "/metrics")[1]):
        time.sleep(0.05)
    return "ended" if b"kvswap_waiting 0.0" in told else "waiting"


CLIENTS = {
    "600 connections with half a head": half_heads,
    "24 bodies of 440 KiB at once": bodies_at_once,
    "a Content-Length of 1 GiB": declared,
    "100 bodies that drip": dripping,
    "60 long answers whose client leaves": hanging_up,
}


class Attacked:
    """The server, its process, and how long `/health` takes."""

    def __init__(self, model: Path, store: str) -> None:
        command = [sys.executable, "-m", "kvswap_torch", "serve", "--model", str(model)]
        command += ["--store", store, "--port", "0", "--max-context", str(CONTEXT), "--json"]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        said = json.loads(self.process.stdout.readline())
        self._host = said["address"].removeprefix("http://")
        self.health_seconds: list[float] = []

    def ask(self, method: str, path: str, body: Any = None) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(self._host, timeout=600)
        data = body if isinstance(body, bytes | None) else json.dumps(body)
        try:
            connection.request(method, path, data, {"Content-Type": "application/json"})
            reply = connection.getresponse()
            return reply.status, reply.read()
        except ConnectionError:
            return 0, b""  # the server reads no more of a body that it has refused
        finally:
            connection.close()

    def connect(self) -> socket.socket:
        host, port = self._host.split(":")
        return socket.create_connection((host, int(port)), timeout=60)

    def attack(self, given: Any) -> int:
        """Its status."""
        body = given if isinstance(given, bytes) else ASKED | given
        is_chat = isinstance(given, dict) and "messages" in given
        return self.ask("POST", "/v1/chat/completions" if is_chat else "/v1/completions", body)[0]

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
        for name, attack in (ATTACKS | CLIENTS).items():
            cpu, peak, server.health_seconds = server.cpu_seconds(), server.peak_mib(), []
            with server.watched():
                status = attack(server) if callable(attack) else str(server.attack(attack))
                time.sleep(0.3)
            spent, grown = server.cpu_seconds() - cpu, server.peak_mib() - peak
            worst = max(server.health_seconds, default=0.0)
            print(f"{name} | {status} | {spent:.2f} | {grown:.1f} | {worst:.3f}", flush=True)
        server.process.terminate()
        assert server.process.wait() == 0


if __name__ == "__main__":
    typer.run(main)
