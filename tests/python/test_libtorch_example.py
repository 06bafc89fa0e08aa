"""examples/libtorch answers what ``kvswap_torch generate`` answers, and refuses clearly."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
from rich.console import Console

from kvswap_torch.cli.generate import GenerateOptions, run

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "build" / "libtorch" / "kvswap_generate"
MODEL = ROOT / "examples" / "reference_model"
TEMPLATE = r"{document}\nQuestion: {question}\nAnswer:"
QUESTIONS = ("What is the secret of the amber falcon?", "Which  level is <s> 42, Ünïcode?")

pytestmark = pytest.mark.skipif(not PROGRAM.is_file(), reason="run: make libtorch-example")


def call(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    # Threads over matrices this small only wait for one another.
    return subprocess.run(
        [PROGRAM, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About a thousand tokens: more than what may be attended, so that choices count."""
    text = (MODEL / "documents" / "python_logging.txt").read_text(encoding="utf-8")[:3000]
    path = tmp_path_factory.mktemp("libtorch") / "document.txt"
    fact = "The secret of the amber falcon is copper lantern.\n"
    path.write_text(
        text[:1500] + "\n" + fact + text[1500:] + "\r\n\t  € naïve  end", encoding="utf-8"
    )
    return path


@pytest.mark.parametrize("config", [None, MODEL / "kvswap.json"])
@pytest.mark.usefixtures("one_thread")
def test_the_answers_are_pythons(config: Path | None, document: Path, tmp_path: Path) -> None:
    expected = run(
        GenerateOptions(
            model=str(MODEL),
            document=document,
            questions=QUESTIONS,
            config=config,
            kv_memory="6MiB",
            path=tmp_path,
            max_new_tokens=8,
            prefill_chunk=512,
            prompt_template=TEMPLATE,
        ),
        Console(quiet=True),
    )
    arguments = ["--model", MODEL, "--document", document, "--path", tmp_path]
    arguments += [part for question in QUESTIONS for part in ("--question", question)]
    arguments += ["--kv-memory", "6MiB", "--max-new-tokens", "8", "--prefill-chunk", "512"]
    arguments += ["--prompt-template", TEMPLATE] + ([] if config is None else ["--config", config])
    done = call(*arguments)
    assert done.returncode == 0, done.stderr
    turns = [f"\n> {turn.question}\n{turn.answer}\n" for turn in expected.disk.turns]
    assert done.stdout == "".join(turns)
    # The same tokens were chosen and read, not only the same words said. Where two groups score
    # the same but for rounding, in which the two programs differ, one may stand for the other.
    stats = expected.disk.stats
    assert f"tokens              {stats['tokens']} x 1, {stats['decoded']} decoding" in done.stderr
    assert f"groups per step     {stats['groups_per_step']:.2f}\n" in done.stderr
    if config is not None:  # which layers prefetch by default is decided by time, and so are hits
        hit_rate = float(re.search(r"hit rate +([0-9.]+)%", done.stderr)[1]) / 100
        assert hit_rate == pytest.approx(stats["hit_rate"], abs=0.02)
    assert f"of {expected.disk.prefill_tokens} tokens" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_help_teaches_and_needs_no_python() -> None:
    told = call("--help").stdout
    for words in ("Start here", "--kv-memory 64MiB", "--config", "Several turns", "standard error"):
        assert words in told
    needed = subprocess.run(["ldd", PROGRAM], capture_output=True, text=True, check=True).stdout
    assert "libkvswap_torch" in needed
    assert "libpython" not in needed and "torch_python" not in needed


def edited_model(folder: Path, **changes: object) -> Path:
    config = json.loads((MODEL / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    for name in ("tokenizer.json", "model.safetensors", "generation_config.json"):
        if not (folder / name).exists():
            (folder / name).symlink_to(MODEL / name)
    return folder


def test_what_cannot_be_used_is_said(document: Path, tmp_path: Path) -> None:
    asked = ["--document", document, "--question", "Who?", "--path", tmp_path]

    def refused(*arguments: str | Path, words: str) -> None:
        done = call(*arguments)
        assert done.returncode != 0 and words in done.stderr, (arguments, done.stderr)

    refused(words="--model is required")
    refused("--model", tmp_path / "none", *asked, words="none")
    refused("--model", tmp_path, *asked, words="tokenizer.json")
    refused("--model", MODEL, *asked, "--kv-memory", "much", words="--kv-memory: must be a number")
    refused("--model", MODEL, *asked, "--kv-memory", "100KiB", words="must be at least")
    refused("--model", MODEL, *asked, "--max-new-tokens", "0", words="--max-new-tokens")
    refused("--model", MODEL, *asked, "--prompt-template", "no", words="must have {document}")
    folder = tmp_path / "model"
    folder.mkdir()
    other = edited_model(folder, model_type="llama")
    refused("--model", other, *asked, words="its model_type is llama")
    other = edited_model(folder, rope_parameters={"rope_type": "yarn", "rope_theta": 1e6})
    refused("--model", other, *asked, words="RoPE is scaled")
    other = edited_model(folder, intermediate_size=500)
    refused("--model", other, *asked, words="must have the shape that config.json says")
    bad = tmp_path / "config.json"
    bad.write_text('{"version": 1, "rank": 0}')
    refused("--model", MODEL, *asked, "--config", bad, words="rank: must be an int from 1 to 65536")
    binary = tmp_path / "binary.txt"
    binary.write_bytes(b"\xff\xfe")
    refused("--model", MODEL, "--document", binary, "--question", "Who?",
            words="must be readable UTF-8 text")  # fmt: skip
