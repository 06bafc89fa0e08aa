"""Ctrl-C: a command ends between two layers, with one line, status 130 and nothing on the disk.

Each command runs in a process of its own. The signal comes from a hook of a layer, or of what
stands before the layers, so that no clock decides: of the layers, none may run after it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.python import ready_python
from tests.python.tiny_models import has_native

pytestmark = pytest.mark.skipif(not has_native(), reason="kvswap_torch._C is not built")
# `kvswap`, interrupted when it has passed as many layers as the first argument says. At 0 it is
# while the model is loaded, and at -1 while a line is typed.
PROGRAM = """
import io, os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
at, passed = int(sys.argv.pop(1)), 0

def interrupt():
    os.kill(os.getpid(), signal.SIGINT)

def count(module, *_):
    global passed
    if type(module).__name__.endswith("DecoderLayer"):
        passed += 1
        if 0 < at < passed:
            print("a layer ran after it", flush=True)
        if passed == at:
            interrupt()

class Typed(io.StringIO):
    def readline(self, *_):
        interrupt()
        return ""

from torch.nn.modules.module import register_module_forward_hook
from transformers import AutoModelForCausalLM
register_module_forward_hook(count)
if at == 0:
    AutoModelForCausalLM.from_pretrained = lambda *_, **__: interrupt()
if at == -1:
    sys.stdin = Typed()
from kvswap_torch.cli.app import main
main()
"""


def interrupted(at: int, *arguments: object, cwd: Path) -> list[str]:
    """Lines of standard error of a command that Ctrl-C ended, at that place."""
    ended = ready_python.Running("-c", PROGRAM, at, *arguments, cwd=cwd).wait()
    assert ended.returncode == 130, ended.stdout + ended.stderr
    assert "a layer ran after it" not in ended.stdout
    assert "Traceback" not in ended.stdout + ended.stderr
    return [line for line in ended.stderr.splitlines() if "Loading weights" not in line and line]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "a.txt"
    path.write_text("The colour of the house is blue. " * 12)
    return path


@pytest.mark.parametrize("at", [0, 1, 3])
def test_reading_a_document(at: int, tiny_model_dir: Path, text: Path, tmp_path: Path) -> None:
    """Of `generate` and of `ingest`, in whose first chunk the model's two layers stop apart."""
    usual = ["--model", tiny_model_dir, "--path", tmp_path, "--prefill-chunk", 64]
    asked = ["--document", text, "--question", "What?", "--save", "book"]
    assert interrupted(at, "generate", *usual, *asked, cwd=tmp_path) == ["interrupted"]
    assert interrupted(at, "ingest", text, *usual, "-o", "book", cwd=tmp_path) == ["interrupted"]
    assert list(tmp_path.iterdir()) == [text]


def test_an_answer_and_a_chat(tiny_model_dir: Path, text: Path, tmp_path: Path) -> None:
    """The saved document is as it was; a chat ends at its prompt, and goes on after an answer."""
    ready_python.run(
        *("-m", "kvswap_torch", "ingest", text, "--model", tiny_model_dir, "-o", "book"),
        cwd=tmp_path,
    )
    before = {path.name: path.read_bytes() for path in (tmp_path / "book").iterdir()}
    assert interrupted(3, "ask", "book", "--question", "What?", cwd=tmp_path) == ["interrupted"]
    assert interrupted(0, "ask", "book", "--question", "What?", cwd=tmp_path) == ["interrupted"]
    assert interrupted(0, "chat", "book", cwd=tmp_path) == ["interrupted"]
    assert interrupted(-1, "chat", "book", cwd=tmp_path) == ["interrupted"]
    assert {path.name: path.read_bytes() for path in (tmp_path / "book").iterdir()} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "book"]


def test_a_server_that_loads(tiny_model_dir: Path, tmp_path: Path) -> None:
    """One that answers ends its answer, and with 0: test_serving_edges.py."""
    usual = ["--model", tiny_model_dir, "--store", "store", "--port", 0]
    assert interrupted(0, "serve", *usual, cwd=tmp_path) == ["interrupted"]
    assert not (tmp_path / "store").exists()


def test_tuning(tiny_model_dir: Path, text: Path, tmp_path: Path) -> None:
    usual = ["--model", tiny_model_dir, "--path", tmp_path, "--kv-memory", "2MiB"]
    (line,) = interrupted(0, "tune", *usual, "--max-context", 1024, "--no-report", cwd=tmp_path)
    assert line == "interrupted; what was measured is kept, the same command goes on from it"
    assert list(tmp_path.iterdir()) == [text]
