"""examples/batch.py: every document answered once, also when a run was stopped or killed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from examples.batch import answered

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "examples" / "reference_model"


def run(folder: Path, documents: list[str], *launcher: str) -> list[dict]:
    subprocess.run(
        [*(launcher or (sys.executable,)), "-m", "examples.batch", *documents]
        + ["--model", str(MODEL), "--question", "What is the key?", "--max-new-tokens", "4"]
        + ["--out", str(folder / "answers.jsonl"), "--path", str(folder)],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    lines = [
        line
        for file in sorted(folder.glob("answers.jsonl.*"))
        for line in file.read_text().splitlines()
    ]
    return [json.loads(line) for line in lines]


@pytest.fixture
def documents(tmp_path: Path) -> list[str]:
    files = [tmp_path / f"{name}.txt" for name in "abc"]
    for number, file in enumerate(files):
        file.write_text(f"The number of this text is {number}. " * 20)
    return [str(file) for file in files]


@pytest.mark.slow
@pytest.mark.long
def test_a_run_goes_on_where_another_one_stopped(tmp_path: Path, documents: list[str]) -> None:
    assert {told["document"] for told in run(tmp_path, documents[:2])} == set(documents[:2])
    half = json.dumps({"document": documents[2], "question": "What is the key?"})[:-9]
    with (tmp_path / "answers.jsonl.0").open("a") as file:
        file.write(half)  # as a killed run leaves it
    pytest.importorskip("accelerate")
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone")
    told = run(tmp_path, documents, *launcher, "--nproc-per-node", "2")
    assert sorted(each["document"] for each in told) == documents


def test_what_was_answered_is_known_by_its_question(tmp_path: Path) -> None:
    lines = [json.dumps({"document": "a", "question": question}) for question in ("x", "y")]
    (tmp_path / "out.3").write_text("\n".join([*lines, '{"document": "b", "quest']))
    assert answered(tmp_path / "out", "x") == {"a"}
    assert answered(tmp_path / "other", "x") == set()
