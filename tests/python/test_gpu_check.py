"""`make gpu-check` where there is no GPU: its time, and what it must do without."""

import json
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache
from transformers.cache_utils import Cache

from bench import gpu, gpu_decode
from bench.gpu_predicted import PREDICTED, predicted
from kvswap_torch import KVSwapCache
from tests.gpu import check, prebuilt, test_engine
from tests.python.tiny_models import forward, greedy, prompt, tiny_model

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
    assert check.main([]) == 1
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


def test_what_was_asked_for_that_is_not_there_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, why in (
        (["--only", "ops,everything"], "must be of smoke, ops"),
        (["--prebuilt", str(tmp_path)], "must hold lib/libkvswap_torch.so"),
    ):
        with pytest.raises(SystemExit):
            check.parse(arguments)
        assert why in capsys.readouterr().err


def test_a_visit_brings_back_the_results_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build, out, results = tmp_path / "build", tmp_path / "out", tmp_path / "card.json"
    build.mkdir()
    results.write_text("{}")
    for i in range(12):
        (build / f"{i:02}.xml").write_text("x" * i)
    (build / "huge.json").write_bytes(b"0" * (check.OUT_BYTES_MAX + 1))
    monkeypatch.setattr(check, "ROOT", tmp_path)
    monkeypatch.setattr(check, "BUILD", Path("build"))
    check.bring_back(results)
    assert not out.exists(), "without OUT nothing is copied"
    monkeypatch.setenv("OUT", str(out))
    check.bring_back(results)
    names = sorted(path.name for path in out.iterdir())
    assert names == [*(f"{i:02}.xml" for i in range(7)), "card.json"]


def test_prebuilt_libraries_need_a_torch_with_cuda(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prebuilt, "DOWNLOADS", tmp_path)
    for cuda, is_fit in (("'13.0'", True), ("None", False)):
        wheel = tmp_path / f"torch-{is_fit}.whl"
        with zipfile.ZipFile(wheel, "w") as packed:
            packed.writestr("torch/version.py", f"__version__ = '2.11.0'\ncuda = {cuda}\n")
            packed.writestr("torch/include/torch/library.h", "")
            packed.writestr("torch/lib/libtorch_cuda.so", "")
            packed.writestr("torch/lib/libtorch_cuda_linalg.so", "")
        if not is_fit:
            with pytest.raises(SystemExit, match="must be built with CUDA"):
                prebuilt.unpack(wheel)
            continue
        site = prebuilt.unpack(wheel)
        made = sorted(str(path.relative_to(site)) for path in site.rglob("*") if path.is_file())
        assert made == [
            "torch/__init__.py", "torch/include/torch/library.h", "torch/lib/libtorch_cuda.so",
            "torch/version.py",
        ]  # fmt: skip
        asked = "import torch; print(torch.__version__, torch.version.cuda)"
        told = subprocess.run(
            [sys.executable, "-c", asked], cwd=site, check=True, capture_output=True, text=True
        )
        assert told.stdout == "2.11.0 13.0\n"


@torch.inference_mode()
def test_the_peer_that_writes_in_place_is_a_cache_in_memory() -> None:
    model = tiny_model("llama")
    inputs = prompt(2, 40)
    cache = Cache(layers=[gpu_decode.InPlaceLayer(60) for _ in model.model.layers])
    wanted = greedy(model, inputs, DynamicCache(config=model.config), 12)
    assert torch.equal(greedy(model, inputs, cache, 12), wanted)


def test_every_row_of_ops_has_a_prediction() -> None:
    assert gpu.predicted("paged_attention b1 gqa4 d256 bfloat16") == "0.7"
    assert gpu.predicted("top_k_groups, 16 rows, k 400") == "0.3-0.6"
    assert gpu.predicted("paged_gather") == gpu.PREDICTED_OTHERWISE
    expected = {name: gpu.predicted(name) for name in gpu.transfer_cases(1, "cpu")}
    assert len(set(expected.values())) == 4 and gpu.PREDICTED_OTHERWISE not in expected.values()


@pytest.mark.parametrize(
    "make", [gpu.attention_cases, gpu.select_cases, gpu.record_cases, gpu.transfer_cases]
)
def test_every_row_of_ops_runs(make) -> None:
    for name, (call, moved) in make(gpu.MIB, "cpu").items():
        assert moved > 0, name
        result = call()
        tensors = [result] if isinstance(result, torch.Tensor) else result
        for tensor in tensors:
            if tensor.is_floating_point() and tensor.numel():
                assert tensor.float().isfinite().any(), name


def test_all_ways_of_a_transfer_bring_the_same() -> None:
    torch.manual_seed(3)
    results = []
    for name in gpu.transfer_cases(1, "cpu"):
        torch.manual_seed(3)
        call, moved = gpu.transfer_cases(gpu.MIB, "cpu")[name]
        results.append(call())
        assert moved == gpu.bytes_of(results[-1]), name
    assert results[0].any()
    for result in results[1:]:
        assert torch.equal(result, results[0][: len(result)])


def test_every_row_of_a_large_model_has_a_prediction() -> None:
    large = [case for case in gpu_decode.cases(tiny=False) if case.shape_name == "8b-layers"]
    assert len(large) == len(PREDICTED)
    for case in large:
        for name in gpu_decode.OURS:
            expected = predicted(case.shape_name, case.context, case.batch, name)
            low, high = (float(part) for part in expected["ratio"].split("-"))
            assert 0 < low < high and expected["peer"] in gpu_decode.CONTENDERS
    assert predicted("8b-layers", 32768, 8, "inplace") is None
    assert predicted("1b", 32768, 8, "kvswap") is None


def test_a_full_cache_that_does_not_fit_is_left_out() -> None:
    (case,) = [case for case in gpu_decode.cases(tiny=False) if case.batch == 32]
    device = torch.device("cpu")
    fitting = {
        gib: {name for name in gpu_decode.CONTENDERS
              if gpu_decode.fits(name, case, gpu_decode.room_on(device, gib))}
        for gib in (16, 24, None)
    }  # fmt: skip
    assert case.kv_bytes == 16 * 2**30
    assert fitting[16] == {*gpu_decode.OURS, "offloaded"}
    assert fitting[24] == fitting[16] | {"inplace"}
    assert fitting[None] == set(gpu_decode.CONTENDERS)


def test_a_run_writes_what_was_expected_and_what_was_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = gpu_decode.Case("8b-layers", gpu_decode.Shape(1, 64, 4, 2, 64, 128), 32768, 1)
    monkeypatch.setattr(gpu_decode, "cases", lambda tiny: [replace(case, context=512)])
    monkeypatch.setitem(PREDICTED, (512, 1), PREDICTED[32768, 1])
    out = tmp_path / "rows.json"
    monkeypatch.setattr(sys, "argv", [
        "gpu_decode", "--device", "cpu", "--steps", "4", "--memory-gib", "0.0001", "--path",
        str(tmp_path), "--json", str(out), "--only", "kvswap", "inplace",
    ])  # fmt: skip
    gpu_decode.main()
    written = json.loads(out.read_text())
    (row,), (skipped,) = written["rows"], written["skipped"]
    assert row["predicted"] == {"peer": "inplace", "ratio": "2-2.5"}
    assert (skipped["cache"], skipped["why"]) == ("inplace", "memory")


@pytest.mark.parametrize("keeper", test_engine.RETAINING, ids=lambda keeper: keeper["keeper"])
def test_what_a_device_is_to_retain_is_retained_here(tmp_path: Path, keeper: dict) -> None:
    """Its test compares with the CPU, which must have something to compare."""
    model, ids = tiny_model("llama", head_dim=64), prompt(2, 150)["input_ids"]
    with KVSwapCache(model, path=tmp_path, config=test_engine.retaining("model", keeper)) as cache:
        forward(model, ids[:, :140], cache)
        forward(model, ids[:, 140:141], cache)
        assert cache.stats().tokens_kept > 0
