"""A server under clients, folders and kills of all kinds: no one of them changes another's answer.

    python -m tests.python.test_serving_soak --seconds 3600 --seed 7

goes on for as long as is wanted, with faults of the disk too; `make soak-server` runs it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from tests.python.serving_process import Served, make_model
from tests.python.test_serving import document, send
from tests.python.test_serving_disks import ERRNOS, FILES
from tests.python.tiny_models import has_native

pytestmark = [
    pytest.mark.skipif(not has_native(), reason="kvswap_torch._C is not built"),
    pytest.mark.usefixtures("one_thread"),
]
BOOKS, TOKENS, CLIENTS = 3, 4, 4
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
HOSTILE: list[tuple[str, str, Any]] = [
    ("POST", "/v1/completions", b"{"),
    ("POST", "/v1/completions", b"[" * 20_000),
    ("POST", "/v1/completions", {"prompt": "x" * 5000}),
    ("POST", "/v1/completions", {"prompt": "x", "temperature": 1e-300}),
    ("POST", "/v1/completions", {"prompt": "x", "stop": ["a"] * 100}),
    ("POST", "/v1/completions", {"prompt": "x", "logit_bias": {"9999": 1}}),
    ("POST", "/v1/chat/completions", {"messages": [{"role": "system", "content": "x"}]}),
    ("POST", "/v1/responses", {"input": [{"type": "input_image"}]}),
    ("GET", "/../../etc", None),
]


class World:
    """One server, its store, and what its answers must be."""

    def __init__(self, folder: Path, seed: int) -> None:
        model, tokenizer = make_model(folder / "model")
        self.random = random.Random(seed)
        self.store, self.done = folder / "store", Counter[str]()
        self.expected: dict[str, str] = {}
        self.faults: list[Callable[[], None]] = []
        for number in range(BOOKS):
            for question in "abc":
                prompt = document(number) + question
                ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
                cache = DynamicCache(config=model.config)
                with torch.no_grad():
                    out = model.generate(
                        ids, past_key_values=cache, do_sample=False, max_new_tokens=TOKENS
                    )
                self.expected[prompt] = tokenizer.decode(
                    out[0, ids.shape[1] :], skip_special_tokens=True
                )
        self.served = Served(folder / "model")
        self.commands = folder / "faults"
        os.mkfifo(self.commands)
        self.is_disk_well = True
        self.start()

    def start(self) -> None:
        limits = {"HEAD_SECONDS": 1.0, "BODY_SECONDS": 1.0, "LINGER_SECONDS": 0.1}
        limits["CHECK_SECONDS"] = 0.5
        self.served.start(store=str(self.store), limits=limits, files=256, limit=1 << 20,
                          faults=str(self.commands))  # fmt: skip

    def connect(self) -> socket.socket:
        host, port = self.served.address.removeprefix("http://").split(":")
        return socket.create_connection((host, int(port)), timeout=120)

    # Clients.

    def whole(self, draw: random.Random) -> None:
        prompt = draw.choice(list(self.expected))
        body = {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0}
        status, told = send(self.served, "POST", "/v1/completions", body)
        if self.refused(status, told):
            return
        assert json.loads(told)["choices"][0]["text"] == self.expected[prompt]

    def several(self, draw: random.Random) -> None:
        prompts = draw.sample(list(self.expected), 2)
        body = {"prompt": prompts, "n": 2, "max_tokens": TOKENS, "temperature": 0, "logprobs": 1}
        status, told = send(self.served, "POST", "/v1/completions", body)
        if self.refused(status, told):
            return
        texts = [each["text"] for each in json.loads(told)["choices"]]
        assert texts == [self.expected[each] for each in prompts for _ in range(2)]

    def slow(self, draw: random.Random) -> None:
        """Sends its request in pieces, and takes the answer in pieces."""
        prompt = draw.choice(list(self.expected))
        body = json.dumps({"prompt": prompt, "max_tokens": TOKENS, "temperature": 0}).encode()
        whole = HEAD + b"Content-Length: %d\r\nConnection: close\r\n\r\n" % len(body) + body
        told = b""
        with self.connect() as client:
            for begin in range(0, len(whole), 50):
                client.sendall(whole[begin : begin + 50])
                time.sleep(0.02)
            while piece := client.recv(100):
                told += piece
                time.sleep(0.005)
        head, _, text = told.partition(b"\r\n\r\n")
        status = int(head.split()[1])
        if status == 408 or self.refused(status, text.decode()):
            return  # on a machine that is busy it was too slow
        assert json.loads(text)["choices"][0]["text"] == self.expected[prompt]

    def refused(self, status: int, told: str) -> bool:
        """While the disk fails a request may; it says so, and nothing else."""
        if status == 200 and "error" not in told:
            return False
        assert not self.is_disk_well and status in (200, 500, 503, 507), (status, told)
        return True

    def streamed(self, draw: random.Random) -> None:
        prompt = draw.choice(list(self.expected))
        body = {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "stream": True}
        status, told = send(self.served, "POST", "/v1/completions", body)
        if self.refused(status, told):
            return
        lines = [line[6:] for line in told.splitlines() if line.startswith("data: {")]
        text = "".join(json.loads(line)["choices"][0]["text"] for line in lines)
        assert text == self.expected[prompt]

    def hostile(self, draw: random.Random) -> None:
        status, told = send(self.served, *draw.choice(HOSTILE))
        assert 400 <= status < 500 and json.loads(told)["error"]["message"], told

    def cut(self, draw: random.Random) -> None:
        """Hangs up: in the head, in the body, in line, in the answer."""
        body = json.dumps({"prompt": document(9), "max_tokens": 200, "stream": True}).encode()
        whole = HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body
        with self.connect() as client:
            client.sendall(whole[: draw.choice([20, len(HEAD) + 40, len(whole)])])
            if draw.random() < 0.5:
                client.settimeout(0.05)
                with contextlib.suppress(TimeoutError):
                    client.recv(100)

    # The store.

    def caches(self) -> list[Path]:
        return [path for path in self.store.glob("*.kvswap") if path.is_dir()]

    def name_that_is_no_text(self) -> None:
        os.makedirs(os.fsencode(self.store) + b"/\xff%d\x1b.kvswap" % self.random.randrange(9),
                    exist_ok=True)  # fmt: skip

    def damaged(self) -> None:
        """A copy of a saved cache with other bytes in one file."""
        caches = self.caches()
        if not caches:
            return
        copy = self.store / f"copy{self.random.randrange(6)}.kvswap"
        shutil.rmtree(copy, ignore_errors=True)
        try:
            shutil.copytree(self.random.choice(caches), copy)
            file = copy / self.random.choice(["manifest.json", "state.safetensors", "records.bin"])
            data = bytearray(file.read_bytes())
            data[self.random.randrange(len(data))] ^= 0xFF
            file.write_bytes(data[: self.random.choice([len(data), len(data) // 2, 0])])
        except (FileNotFoundError, ValueError, shutil.Error):
            return  # the server has removed it meanwhile

    def odd_entries(self) -> None:
        where = self.store / f"odd{self.random.randrange(6)}.kvswap"
        if not os.path.lexists(where):
            make: list[Callable[[], Any]] = [
                where.mkdir,
                lambda: where.write_bytes(b"x"),
                lambda: where.symlink_to("/nowhere"),
                lambda: where.symlink_to(where.name),
                lambda: os.mkfifo(where),
            ]
            self.random.choice(make)()

    def removed(self) -> None:
        for path in self.caches()[:1]:
            shutil.rmtree(path, ignore_errors=True)

    def disk_fails(self) -> None:
        """Until the clients of this round are answered."""
        self.is_disk_well = False
        call = self.random.choice(["open", "read", "facts", "write", "allocate"])
        name = self.random.choice(["", "", *FILES]) if call in ("open", "read", "facts") else ""
        fault = {"call": call, "nth": self.random.randrange(1, 9), "name": name}
        fault |= {"lasts": self.random.random() < 0.5, "error": self.random.choice(ERRNOS)}
        self.command(fault)

    def command(self, fault: Any) -> None:
        self.commands.write_text(json.dumps(fault) + "\n")

    # The process.

    def killed(self) -> None:
        self.served.end(signal.SIGKILL)
        self.start()

    def ended(self) -> None:
        assert self.served.end() == 0
        self.start()

    def few_files(self) -> None:
        import resource

        pid = self.served._pid
        open_files = int(self.served.metrics()["kvswap_open_files"])
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (open_files + 2, 256))
        try:
            self.connect().close()
        finally:
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (256, 256))

    def round(self) -> None:
        """One fault, then clients at once, then all is well."""
        if not self.faults:
            self.faults = [
                *(self.name_that_is_no_text, self.damaged, self.damaged, self.odd_entries),
                *(self.removed, self.killed, self.ended, self.few_files),
                *(self.disk_fails, self.disk_fails, self.disk_fails),
            ]
            self.random.shuffle(self.faults)
        fault = self.faults.pop()
        fault()
        clients = [self.whole, self.streamed, self.hostile, self.cut] * 2
        clients += [self.several, self.slow]
        self.random.shuffle(clients)
        draws = [random.Random(self.random.random()) for _ in clients]
        with ThreadPoolExecutor(CLIENTS) as pool:
            asked = [pool.submit(*each) for each in zip(clients, draws, strict=True)]
            for each in asked:
                each.result()
        self.done[fault.__name__] += 1
        if not self.is_disk_well:
            self.command(None)
            while send(self.served, "GET", "/ready", None)[0] != 200:
                time.sleep(0.05)
            self.is_disk_well = True
        self.whole(self.random)
        assert send(self.served, "GET", "/health", None)[0] == 200


def run(folder: Path, rounds: int, seed: int, seconds: float = float("inf")) -> Counter[str]:
    world, ends = World(folder, seed), time.monotonic() + seconds
    try:
        for _ in range(rounds):
            world.round()
            if time.monotonic() >= ends:
                break
        assert world.served.end() == 0
    finally:
        world.served.close()
    return world.done


@pytest.mark.long
def test_no_entry_client_or_kill_changes_anothers_answer(tmp_path: Path) -> None:
    done = run(tmp_path, rounds=11, seed=1)
    assert len(done) == 8 and done["disk_fails"] == 3


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(1)
    print(run(Path(tempfile.mkdtemp()), 1 << 30, given.seed, given.seconds))
