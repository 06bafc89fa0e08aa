"""The whole process keeps to its budget: above the loaded model it has the ledger and a constant.

Both models, a long text in one `generate()`, a document by `kvswap ingest`, and 50 requests of
`kvswap serve`, each in a process of its own, since a process has one peak.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.python.test_process_memory import MIB, PEAK_MAX, ROOT, SETTLED_MAX
from tests.python.tiny_models import has_native
from tools.real_model.make import MODEL as REAL_MODEL

pytestmark = pytest.mark.skipif(not has_native(), reason="kvswap_torch._C is not built")

DOCUMENT = ROOT / "examples/reference_model/documents/python_logging.txt"
REQUESTS = 50
WARM_REQUESTS = 5
GROWTH_MAX = 16  # MiB, from the fifth request to the fiftieth


class Model(NamedTuple):
    """`tokens`: of a text; `characters`: of a document; `words`: of a request's prompt."""

    folder: Path
    tokens: int
    memory: str
    characters: int
    words: int


REFERENCE = Model(ROOT / "examples/reference_model", 16384, "16MiB", 40_000, 500)
REAL = Model(ROOT / REAL_MODEL, 7936, "24MiB", 12_000, 100)


@pytest.fixture(params=["reference", pytest.param("real", marks=pytest.mark.real_model)])
def model(request: pytest.FixtureRequest) -> Model:
    if request.param == "reference":
        return REFERENCE
    if not REAL.folder.exists():
        pytest.skip(f"make real-model was not run: {REAL_MODEL} is not there")
    return REAL


def told(*words: Any) -> dict[str, int]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.python.whole_process", *map(str, words)],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def check(found: dict[str, int], loaded: int, ledger: int) -> None:
    above = {name: (found[name] - loaded - ledger) / MIB for name in ("rss", "peak")}
    assert above["rss"] <= SETTLED_MAX and above["peak"] <= PEAK_MAX, (found, above)


def test_a_long_prompt_and_its_answer(model: Model, tmp_path: Path) -> None:
    found = told("generate", model.folder, tmp_path, model.tokens, model.memory)
    check(found, found["loaded"], found["ledger"])


def test_a_document_that_is_read_and_saved(model: Model, tmp_path: Path) -> None:
    document = tmp_path / "document.txt"
    document.write_text(DOCUMENT.read_text(encoding="utf-8")[: model.characters])
    loaded = told("loaded", model.folder)["rss"]
    words = ("--model", model.folder, "--output", tmp_path / "saved", "--path", tmp_path)
    found = told("ingest", document, *words, "--kv-memory", model.memory)
    check(found, loaded, ledger_max(model))


def ledger_max(model: Model) -> int:
    return int(model.memory.removesuffix("MiB")) * MIB


class Serving(NamedTuple):
    pid: int
    address: str

    def ask(self, prompt: str) -> None:
        body = {"prompt": prompt, "max_tokens": 8, "temperature": 0}
        request = urllib.request.Request(
            f"{self.address}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=300) as reply:
            assert json.loads(reply.read())["usage"]["completion_tokens"] > 0

    def memory(self) -> dict[str, int]:
        """Of the process once the request before has been settled: the next waits for that."""
        self.ask("one word")
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        fields = dict(line.split(":", 1) for line in lines)
        names = {"rss": "VmRSS", "peak": "VmHWM"}
        return {name: int(fields[field].split()[0]) << 10 for name, field in names.items()}


@contextmanager
def serving(model: Model, store: Path) -> Iterator[Serving]:
    words = ("--model", model.folder, "--store", store, "--kv-memory", model.memory)
    words += ("--save-from", 256, "--max-context", model.tokens, "--port", 0, "--json")
    server = subprocess.Popen(
        [sys.executable, "-m", "kvswap_torch", "serve", *map(str, words)],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    try:
        yield Serving(server.pid, json.loads(server.stdout.readline())["address"])
    finally:
        server.terminate()
        server.wait(timeout=60)


def test_fifty_requests_of_a_server(model: Model, tmp_path: Path) -> None:
    """Each prompt is another text of another length, and is saved."""
    draw = random.Random(1)
    words = DOCUMENT.read_text(encoding="utf-8").split()
    with serving(model, tmp_path / "store") as server:
        loaded = server.memory()["rss"]
        for number in range(REQUESTS):
            server.ask(" ".join(draw.choices(words, k=model.words + draw.randrange(model.words))))
            if number == WARM_REQUESTS - 1:
                warm = server.memory()
        last = server.memory()
    check(last, loaded, ledger_max(model))
    assert (last["rss"] - warm["rss"]) / MIB <= GROWTH_MAX, (warm, last)
