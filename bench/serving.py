"""A server asked several questions about one long document: seconds to the first token of each.

    python -m bench serving --tokens 16000

The server is ``kvswap serve`` itself, in a process of its own, asked over HTTP; the questions are
streamed. After two questions it is killed (SIGKILL) and started again, and asked once more.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from bench import machine
from kvswap_torch.cli.load import load_tokenizer
from tools.reference_model.documents import SOURCES, load_source
from tools.reference_model.place import MODEL


def start(model: Path, store: Path, kv_memory: str) -> tuple[subprocess.Popen, str]:
    """The server, and its address, once it answers."""
    command = [sys.executable, "-m", "kvswap_torch", "serve", "--model", str(model)]
    command += ["--store", str(store), "--kv-memory", kv_memory, "--port", "0", "--json"]
    command += ["--config", str(model / "kvswap.json")]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    return server, json.loads(server.stdout.readline())["address"]


def ask(address: str, model: Path, prompt: str, tokens: int = 16) -> dict[str, Any]:
    """Seconds to the first token and to the last, and what the server says of the prompt."""
    body = {"model": model.name, "prompt": prompt, "max_tokens": tokens, "temperature": 0,
            "stream": True}  # fmt: skip
    request = urllib.request.Request(
        f"{address}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    began, first, usage = time.perf_counter(), None, {}
    with urllib.request.urlopen(request) as reply:
        for line in reply:
            if line.startswith(b"data: {"):
                first = first or time.perf_counter()
                usage = json.loads(line.removeprefix(b"data: ")).get("usage") or usage
    ended = time.perf_counter()
    return {
        "first_token_seconds": first - began,
        "seconds": ended - began,
        "prompt_tokens": usage["prompt_tokens"],
        "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
    }


def main(
    tokens: Annotated[int, typer.Option(help="of the document, about")] = 16_000,
    kv_memory: Annotated[str, typer.Option(help="as kvswap serve has it")] = "32MiB",
    model: Annotated[Path, typer.Option(help="folder of a model and its kvswap.json")] = MODEL,
    path: Annotated[Path, typer.Option(help="folder on the disk to use")] = Path("build"),
    out: Annotated[str, typer.Option(help="name under bench/results; empty: none")] = "",
) -> None:

    tokenizer = load_tokenizer(str(model))
    ids = tokenizer(load_source(SOURCES[0]), add_special_tokens=False)["input_ids"][:tokens]
    document = tokenizer.decode(ids)
    store = path / "serving_store"
    shutil.rmtree(store, ignore_errors=True)
    told: dict[str, Any] = {}
    questions = {name: f"{document}\nQuestion: {word}?\nAnswer:" for name, word in
                 (("first", "Who"), ("second", "What"), ("after_restart", "Where"))}  # fmt: skip
    server, address = start(model, store, kv_memory)
    ask(address, model, "Good morning.")  # what only a process's first request takes
    for name in ("first", "second"):
        told[name] = ask(address, model, questions[name])
    metrics = f"{address}/metrics"
    while b"kvswap_store_caches 0" in urllib.request.urlopen(metrics).read():
        time.sleep(0.05)
    server.kill()
    server.wait()
    server, address = start(model, store, kv_memory)
    ask(address, model, "Good morning.")
    told["after_restart"] = ask(address, model, questions["after_restart"])
    server.send_signal(signal.SIGTERM)
    assert server.wait() == 0
    sooner = told["first"]["first_token_seconds"]
    for name in ("second", "after_restart"):
        told[name]["times_sooner"] = sooner / told[name]["first_token_seconds"]
    shutil.rmtree(store)
    results = {"machine": machine.describe(path), "kv_memory": kv_memory, **told}
    Console().print(results)
    if out:
        machine.write(out, results)


if __name__ == "__main__":
    typer.run(main)
