"""`make gpu-check` where there is no GPU: its time, and what it must do without."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.gpu import check

ROOT = Path(__file__).resolve().parents[2]


def sleeping(seconds: float) -> list[str]:
    return [sys.executable, "-c", f"import time; time.sleep({seconds})"]


def outcomes(steps: check.Steps) -> list[str]:
    return [step["outcome"] for step in steps.done]


def test_a_step_says_what_came_of_it() -> None:
    steps = check.Steps(300)
    assert steps.run("fine", sleeping(0), 100)
    assert not steps.run("wrong", [sys.executable, "-c", "raise SystemExit(3)"], 100)
    assert not steps.run("missing", ["no-such-tool"], 100)
    assert outcomes(steps) == ["ok", "failed (3)", "failed: no no-such-tool on PATH"]


def test_a_step_that_takes_too_long_is_ended() -> None:
    assert check.run_within(sleeping(600), 0.2, {}) == "ended: took more than 0.2 s"


def test_a_step_without_time_is_left_out() -> None:
    steps = check.Steps(check.STEP_SECONDS_MIN / 2)
    assert not steps.run("late", sleeping(600), 100)
    assert outcomes(steps) == ["left out: no time was left"]


def test_what_came_of_each_step_is_written() -> None:
    written: list[list[str]] = []
    steps = check.Steps(300, lambda: written.append(outcomes(steps)))
    steps.run("fine", sleeping(0), 100)
    steps.leave_out("other", "not installed")
    assert written == [["ok"], ["ok", "left out: not installed"]]


def test_half_a_file_is_none(tmp_path: Path) -> None:
    (tmp_path / "half.json").write_text('{"rows": [')
    assert check.read(tmp_path / "half.json") == check.read(tmp_path / "none.json") == {}


def test_all_steps_end_within_eight_minutes() -> None:
    # Interpreter, torch and the device are opened before the first step.
    assert check.SECONDS <= 8 * 60 - 10


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_device_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert check.main() == 1
    assert "sees no CUDA device" in capsys.readouterr().out


def test_neither_typer_nor_rich_is_needed() -> None:
    script = (
        "import sys\n"
        "for name in ('typer', 'rich', 'hypothesis'):\n"
        "    sys.modules[name] = None\n"
        "sys.path.insert(0, 'tests')\n"
        "import kvswap_torch, tests.gpu.check, bench.gpu, bench.gpu_decode\n"
        "import tests.gpu.test_engine, tests.gpu.test_ops\n"
        "kvswap_torch.KVSwapCache\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT, timeout=120)
