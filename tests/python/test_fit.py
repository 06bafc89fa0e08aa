"""Will it fit? What `kvswap fit` counts is there once a model is loaded and a cache is full."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig
from typer.testing import CliRunner

from kvswap_torch import KVSwapCache, SwapConfig
from kvswap_torch.cli import app as cli
from kvswap_torch.cli.fit import asked_of, tokens_of
from kvswap_torch.errors import BudgetError, ConfigError
from kvswap_torch.few_bits import FewBitLinear
from kvswap_torch.hf import unloaded
from kvswap_torch.hf.fit import CONTEXT_LEAST, Asked, Place, advice, estimate, weights_on_disk
from kvswap_torch.hf.weights_reader import read_speed
from kvswap_torch.machine_memory import memory_limit
from tests.python.tiny_models import FAMILIES, has_native, prompt, tiny_model

pytestmark = pytest.mark.skipif(not has_native(), reason="kvswap_torch._C is not built")

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "examples/reference_model"
MIB = 1 << 20


def kvswap(*words: object) -> Any:
    return CliRunner().invoke(cli.app, [str(word) for word in words])


def never(*_: Any, **__: Any) -> None:
    raise AssertionError("a model was loaded")


# What a cache would be, beside one that is.


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("budget", [None, "900KiB", "4MiB"])
def test_the_plan_of_a_cache_is_the_cache(family: str, budget: str | None, tmp_path: Path) -> None:
    model = tiny_model(family)
    limits = {"kv_memory_bytes": budget, "max_context": 400, "max_batch": 2}
    planned = unloaded.plan_cache(
        unloaded.unloaded_model(model.config, torch.float32), tmp_path, **limits
    )
    with KVSwapCache(model, tmp_path, **limits) as cache:
        model(**prompt(2, 400), past_key_values=cache, use_cache=True)
        stats = cache.stats()
        assert planned.config == cache.driver.config
    taken = {name: count for name, count in stats.ledger.items() if count}
    assert sum(planned.uses.values()) >= stats.resident_bytes_peak
    assert taken.keys() <= planned.uses.keys()
    # The newest tokens are not on disk yet.
    assert 0.9 * planned.disk_bytes <= stats.kv_bytes_on_disk <= planned.disk_bytes
    assert planned.full_bytes == stats.kv_bytes_full


def test_a_config_and_heads_of_their_own_are_planned_too(tmp_path: Path) -> None:
    model = tiny_model("llama")
    config = SwapConfig().with_settings({"selection.heads": "per_head", "summary.rank": 8})
    limits = {"config": config, "kv_memory_bytes": "4MiB", "max_context": 400, "max_batch": 1}
    empty = unloaded.unloaded_model(model.config, torch.float32)
    planned = unloaded.plan_cache(empty, tmp_path, **limits)
    with KVSwapCache(model, tmp_path, **limits) as cache:
        model(**prompt(1, 400), past_key_values=cache, use_cache=True)
        assert planned.config == cache.driver.config
        on_disk = cache.stats().kv_bytes_on_disk
    assert 0.9 * planned.disk_bytes <= on_disk <= planned.disk_bytes


def test_what_the_plan_refuses_the_cache_refuses_in_the_same_words(tmp_path: Path) -> None:
    model = tiny_model("llama")
    limits = {"kv_memory_bytes": 4096, "max_context": 400, "max_batch": 1}
    with pytest.raises(BudgetError) as planned:
        empty = unloaded.unloaded_model(model.config, torch.float32)
        unloaded.plan_cache(empty, tmp_path, **limits)
    with pytest.raises(BudgetError) as opened:
        KVSwapCache(model, tmp_path, **limits)
    assert str(planned.value) == str(opened.value)


def test_a_preset_that_drops_tokens_needs_no_disk() -> None:
    empty = unloaded.unloaded_model(tiny_model("llama").config, torch.float32)
    planned = unloaded.plan_cache(empty, None, preset="streaming", max_context=400, max_batch=1)
    assert planned.disk_bytes == 0 and planned.uses


# Weights and activations.


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_counted_once_each(family: str) -> None:
    for tied in (False, True):
        model = tiny_model(family, tie_word_embeddings=tied)
        held = {p.data_ptr(): p.nbytes for p in (*model.parameters(), *model.buffers())}
        empty = unloaded.unloaded_model(model.config, torch.float32)
        assert unloaded.weight_bytes(empty) == sum(held.values())


def test_few_bits_are_counted_as_layers_have_them() -> None:
    config = LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=2)  # fmt: skip
    sizes = [
        unloaded.weight_bytes(unloaded.unloaded_model(config, torch.bfloat16, weights))
        for weights in (None, "int8", "int4")
    ]
    assert sizes[0] > sizes[1] > sizes[2]
    empty = unloaded.unloaded_model(config, torch.bfloat16, "int4")
    assert type(empty.model.layers[0].mlp.up_proj) is FewBitLinear
    assert empty.lm_head.bits == 8 and empty.model.layers[0].mlp.up_proj.bits == 4


def test_what_a_pass_holds_at_once_is_counted() -> None:
    """Of a chain of known sizes: the input was there before, a layer's goes after the next."""
    layers = torch.nn.Sequential(*(torch.nn.Linear(64, 64, device="meta") for _ in range(5)))
    rows = torch.empty(10, 64, device="meta")
    with torch.no_grad(), unloaded.LiveBytes() as live:
        made = layers(rows)
    assert live.most == 2 * rows.nbytes and live.now == made.nbytes


def test_experts_that_tokens_choose_are_an_estimate_and_said_to_be(tmp_path: Path) -> None:
    config = Qwen3MoeConfig(vocab_size=200, hidden_size=64, intermediate_size=96, head_dim=16,
                            num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                            num_experts=4, moe_intermediate_size=32)  # fmt: skip
    config.save_pretrained(tmp_path)
    words = ["fit", "--model", tmp_path, "--context", "4K", "--path", tmp_path]
    told = json.loads(kvswap(*words, "--json").output)
    # Where a release of transformers computes them without looking, they are counted.
    is_said = "an estimate" in kvswap(*words).output
    assert is_said == told["activations_are_estimated"]


def test_a_longer_chunk_takes_more_and_no_model_is_left_changed() -> None:
    empty = unloaded.unloaded_model(tiny_model("gemma3").config, torch.float32)
    before = empty.config._attn_implementation
    few, many = (unloaded.activations(empty, 1, tokens).bytes for tokens in (64, 128))
    assert 1.8 * few < many < 2.2 * few
    assert unloaded.activations(empty, 2, 64).bytes == pytest.approx(many, rel=0.1)
    assert unloaded.activations(empty, 1, 64, is_wide=True).bytes > few
    assert empty.config._attn_implementation == before


def test_a_pass_that_depends_on_numbers_is_reckoned_by_its_widest_layers(monkeypatch) -> None:
    empty = unloaded.unloaded_model(tiny_model("llama").config, torch.float32)

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("Tensor.item() cannot be called on meta tensors")

    monkeypatch.setattr(type(empty.model), "forward", fail)
    assert unloaded.activations(empty, 1, 10) == (2 * 10 * (48 + 64) * 4, True)


# The whole process.

PROCESS = """
import json, sys, torch
torch.set_num_threads(1)
from kvswap_torch import KVSwapCache
from kvswap_torch.cli.load import load_model
from kvswap_torch.process_memory import process_memory
model = load_model(sys.argv[1])
ids = torch.randint(3, 3000, (1, 12000), generator=torch.Generator().manual_seed(1))
with KVSwapCache(model, sys.argv[2], kv_memory_bytes="12MiB", max_context=12100) as cache:
    model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False,
                   **cache.as_argument())
print(json.dumps(process_memory().peak))
"""


def test_a_process_takes_what_was_said(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROCESS, str(REFERENCE), str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, check=True, timeout=600,
    )  # fmt: skip
    peak = json.loads(done.stdout.splitlines()[-1])
    words = ["--context", 12100, "--kv-memory", "12MiB", "--path", tmp_path, "--json"]
    said = subprocess.run(
        [sys.executable, "-m", "kvswap_torch", "fit", "--model", REFERENCE, *map(str, words)],
        cwd=ROOT, capture_output=True, text=True, check=True, timeout=600,
    )  # fmt: skip
    told = json.loads(said.stdout)["memory_bytes"]["total"]
    # With AMX oneDNN's copies of what it multiplies take 18 to 28 MiB more at the peak.
    most = 128 if torch.cpu._is_amx_tile_supported() else 96
    assert told - 64 * MIB <= peak <= told + most * MIB, (peak, told)


# What to turn.

LARGE = LlamaConfig(vocab_size=128, hidden_size=1024, intermediate_size=4096, num_hidden_layers=8,
                    num_attention_heads=8, num_key_value_heads=2, head_dim=128,
                    max_position_embeddings=1 << 20, dtype="bfloat16")  # fmt: skip


def asked(**changes: Any) -> Asked:
    return Asked(LARGE, torch.bfloat16, **{"context": 65536, "path": "/tmp"} | changes)


def placed(memory: int, disk: int = 1 << 40) -> Place:
    return Place(memory, disk, fixed_bytes=0)


def turned(memory: int, **changes: Any) -> str:
    place = placed(memory)
    return advice(estimate(asked(**changes), 0), place)


def test_what_fits_needs_no_advice() -> None:
    assert turned(estimate(asked(), 0).memory_bytes) == ""


def test_the_first_thing_to_turn_is_what_changes_answers_least() -> None:
    fit = estimate(asked(), 0)
    assert re.match(r"give --kv-memory \d+MiB: then", turned(fit.memory_bytes - 2 * MIB))
    beside = fit.memory_bytes - fit.cache.memory_bytes
    assert turned(beside - 1).startswith("give --weights int8: then")
    few = estimate(asked(weights="int8"), 0)
    beside = few.memory_bytes - few.cache.memory_bytes
    assert turned(beside - 1).startswith("give --weights int4 --kv-memory")
    assert turned(MIB).startswith("no option makes it fit")


def test_what_it_says_to_give_then_fits() -> None:
    fit = estimate(asked(), 0)
    memory = fit.memory_bytes * 2 // 3
    while (said := turned(memory)).startswith("give"):
        options = dict(re.findall(r"--([a-z-]+) (\S+?)(?:[: ])", said))
        changes: dict[str, Any] = {"weights": options.get("weights")}
        if "kv-memory" in options:
            changes["kv_memory_bytes"] = int(options["kv-memory"].removesuffix("MiB")) * MIB
        if "context" in options:
            changes["context"] = int(options["context"])
        assert estimate(asked(**changes), 0).memory_bytes <= memory
        memory = memory * 3 // 4
    assert said.startswith("no option")


@pytest.mark.parametrize("short", [10, 100])
def test_weights_that_do_not_fit_may_be_on_disk(short: int) -> None:
    fit = estimate(asked(), 0)
    place = placed(fit.memory_bytes - short * MIB)
    plan = weights_on_disk(fit, place)
    assert plan.memory_bytes + fit.memory_bytes - fit.weights <= place.memory_bytes
    assert 0 < short * MIB < plan.read_bytes < fit.weights
    assert weights_on_disk(fit, placed(fit.memory_bytes)) is None
    assert weights_on_disk(fit, placed(place.memory_bytes, fit.cache.disk_bytes - 1)) is None
    few = estimate(asked(weights="int8"), 0)
    assert weights_on_disk(few, placed(few.memory_bytes - MIB)) is None
    assert weights_on_disk(fit, placed(MIB)) is None


def test_the_last_thing_to_turn_is_where_weights_are() -> None:
    """More layers than int4 has room for, of a text that is as short as is proposed."""
    layers = {"num_hidden_layers": 24, "layer_types": None}
    deep = dataclasses.replace(
        asked(context=CONTEXT_LEAST), config=LlamaConfig(**LARGE.to_dict() | layers)
    )
    fit = estimate(deep, 0)
    place = placed(fit.memory_bytes - fit.weights + 80 * MIB)
    (size,) = re.findall(r"^give --weights-memory (\d+)MiB: then it takes", advice(fit, place))
    assert 79 <= int(size) <= 80


def test_the_command_says_what_a_token_costs_with_weights_on_disk(tmp_path: Path) -> None:
    LlamaConfig(**LARGE.to_dict()).save_pretrained(tmp_path)
    need = estimate(asked(context=4096), 0)
    words = ["fit", "--model", tmp_path, "--context", "4K", "--path", tmp_path, "--memory"]
    fixed = json.loads(kvswap(*words, "64GiB", "--json").output)
    assert fixed["weights_on_disk"] is None
    memory = fixed["memory_bytes"]["total"] - 64 * MIB
    told = json.loads(kvswap(*words, memory, "--json").output)["weights_on_disk"]
    assert 64 * MIB < told["read_bytes_per_token"] < need.weights
    assert told["seconds_per_token"] == told["read_bytes_per_token"] / told["disk_bytes_per_second"]
    assert told["disk_speed_is"] == "assumed"
    shown = " ".join(kvswap(*words, memory).output.split())
    assert re.search(r"with --weights-memory \d+MiB it fits, .* s at 2.00 GB/s, assumed", shown)


def test_the_disk_s_speed_is_of_a_file_that_is_long_enough(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    assert read_speed(tmp_path) is None
    file.write_bytes(bytes(64 * MIB - 1))
    assert read_speed(tmp_path) is None
    file.write_bytes(bytes(64 * MIB))
    found = read_speed(tmp_path)
    assert found is None or found > 0


def test_a_full_disk_is_named() -> None:
    fit = estimate(asked(), 0)
    place = placed(1 << 40, fit.cache.disk_bytes // 2)
    assert advice(fit, place).startswith("give --context 32768")
    assert advice(fit, placed(1 << 40, 1 << 20)).startswith("the disk must have")


def test_weights_that_are_quantised_already_stay_so(tmp_path: Path) -> None:
    fit = estimate(asked(stored_bytes=1 << 30), 0)
    assert fit.weights == 1 << 30
    assert "--weights" not in advice(fit, placed(1 << 30))


# The command.


def test_the_command_says_it_as_a_table_and_as_json(tmp_path: Path) -> None:
    words = ["fit", "--model", REFERENCE, "--context", "16K", "--path", tmp_path]
    shown = kvswap(*words)
    assert shown.exit_code == 0, shown.output
    assert "it fits" in shown.output and "16,384 tokens x 1" in shown.output
    told = json.loads(kvswap(*words, "--json").output)
    memory = told["memory_bytes"]
    assert memory["total"] == sum(n for name, n in memory.items() if name != "total")
    assert told["disk_bytes_per_token"] == told["disk_bytes"] / 16384
    assert told["written_per_day_bytes"] == 10 * told["disk_bytes"]
    assert told["fits"] and told["advice"] == ""
    small = kvswap(*words, "--memory", "100MiB", "--texts-per-day", 3)
    assert "it does not fit" in small.output and "with 3 new texts" in small.output


def test_it_reads_no_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((REFERENCE / "config.json").read_text())
    done = kvswap("fit", "--model", tmp_path, "--context", 4096, "--path", tmp_path, "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.output)["memory_bytes"]["weights"] > 0


@pytest.mark.parametrize("text", ["", "0", "128KB", "-5", "1e3", "9999999999"])
def test_a_context_that_is_no_number_of_tokens_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--context: must be a number of tokens"):
        tokens_of(text)


def test_tokens_may_be_told_in_thousands() -> None:
    assert [tokens_of(text) for text in ("128K", "1m", "7")] == [131072, 1 << 20, 7]


def test_sizes_of_a_checkpoint_come_from_its_index_and_files(tmp_path: Path) -> None:
    assert unloaded.stored_bytes(tmp_path) is None
    (tmp_path / "a.safetensors").write_bytes(b"x" * 100)
    assert unloaded.stored_bytes(tmp_path) == 100
    index = {"metadata": {"total_size": 70}, "weight_map": {}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert unloaded.stored_bytes(tmp_path) == 70


def test_a_config_without_a_type_has_that_of_its_weights(tmp_path: Path) -> None:
    model = tiny_model("llama", dtype=torch.float16)
    model.save_pretrained(tmp_path)
    told = json.loads((tmp_path / "config.json").read_text())
    told.pop("dtype", None)
    (tmp_path / "config.json").write_text(json.dumps(told))
    assert asked_of(str(tmp_path), 100).dtype == torch.float16
    assert asked_of(str(tmp_path), 100, weights="bf16").dtype == torch.bfloat16
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert loaded.dtype == torch.float16


# A budget that is too small is refused before a model is loaded.


@pytest.fixture
def book(tmp_path: Path) -> Path:
    path = tmp_path / "book.txt"
    path.write_text("A long text of few words. " * 60)
    return path


@pytest.mark.parametrize("command", ["generate", "ingest", "serve"])
def test_a_small_budget_is_refused_before_a_model_is_loaded(
    command: str, book: Path, tiny_model_dir: Path, tmp_path: Path, monkeypatch
) -> None:
    for module in ("generate", "serve"):
        monkeypatch.setattr(f"kvswap_torch.cli.{module}.load_model", never)
    words = {
        "generate": ["--document", book, "--question", "Why?"],
        "ingest": [book, "-o", tmp_path / "b.kvswap"],
        "serve": ["--store", tmp_path / "store"],
    }[command]
    done = kvswap(command, "--model", tiny_model_dir, *words, "--kv-memory", "9KiB")
    assert isinstance(done.exception, BudgetError), done.output
    assert "must be at least" in str(done.exception)


@pytest.mark.parametrize("command", ["ask", "chat", "generate"])
def test_a_saved_cache_is_too_large_before_its_model_is_loaded(
    command: str, book: Path, tiny_model_dir: Path, tmp_path: Path, monkeypatch
) -> None:
    saved = tmp_path / "b.kvswap"
    made = kvswap("ingest", book, "--model", tiny_model_dir, "-o", saved, "--path", tmp_path)
    assert made.exit_code == 0, made.output
    for module in ("generate", "saved"):
        monkeypatch.setattr(f"kvswap_torch.cli.{module}.load_model", never)
    words = [command, saved, "--path", tmp_path]
    if command == "generate":
        words = ["generate", "--model", tiny_model_dir, "--open", saved]
    words += [] if command == "chat" else ["--question", "Why?"]
    done = kvswap(*words, "--kv-memory", "9KiB")
    assert isinstance(done.exception, BudgetError), done.output


# The machine's memory.


def proc(folder: Path, cgroup: str, mounts: str) -> Path:
    (folder / "self").mkdir(parents=True)
    (folder / "meminfo").write_text("MemTotal: 1000 kB\nMemAvailable: 600 kB\n")
    (folder / "self/cgroup").write_text(cgroup)
    (folder / "self/mounts").write_text(mounts)
    return folder


@pytest.mark.parametrize(
    ("version", "limits", "expected"),
    [
        (1, {"a/b": "500000", "a": "400000", ".": "9223372036854771712"}, 400000),
        (2, {"a/b": "max", "a": "300000"}, 300000),
        (2, {"a/b": "max"}, 1024000),
        (2, {}, 1024000),
    ],
)
def test_the_lowest_limit_counts(
    version: int, limits: dict[str, str], expected: int, tmp_path: Path
) -> None:
    mount = tmp_path / "cgroup"
    name = {1: "memory.limit_in_bytes", 2: "memory.max"}[version]
    for group, limit in limits.items():
        (mount / group).mkdir(parents=True, exist_ok=True)
        (mount / group / name).write_text(limit + "\n")
    cgroup = {1: "4:memory:/a/b\n0::/\n", 2: "0::/a/b\n"}[version]
    kind = {1: f"cgroup {mount} cgroup rw,memory 0 0\n", 2: f"cgroup2 {mount} cgroup2 rw 0 0\n"}
    limit = memory_limit(proc(tmp_path / "proc", cgroup, kind[version]))
    assert limit.limit_bytes == expected and limit.available_bytes == 600 << 10
    assert ("cgroup" in limit.what) == (expected != 1024000)


def test_this_machine_has_a_limit() -> None:
    limit = memory_limit()
    assert limit.available_bytes > 0 and limit.limit_bytes > 0
    assert dataclasses.asdict(limit)["what"]
