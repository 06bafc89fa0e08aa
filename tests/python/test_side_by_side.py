"""The side-by-side benchmark: its peers compute what a full cache does, its plan adds up."""

from __future__ import annotations

import json
import re

import pytest
import torch
from rich.console import Console
from transformers import DynamicCache

from bench import machine
from bench.kv_file import ROOM_TOKENS, KvFile
from bench.pages.speed import latent_rows, speed_rows
from bench.shapes import SHAPES, make_model
from bench.side_by_side import __main__ as command
from bench.side_by_side import memory_cap, report
from bench.side_by_side.busy import floor_ms_least, why_busy
from bench.side_by_side.child import Order, Runner
from bench.side_by_side.mapped import MappedCache
from bench.side_by_side.measure import Measurement, Run
from bench.side_by_side.plan import (
    LABELS,
    MEMORY_PART,
    OPTIONAL,
    PRESET,
    Cell,
    Room,
    cells,
    memory_need,
)
from bench.side_by_side.roofline import Floor, describe
from bench.side_by_side.settings import fit_kvswap, fit_per_head
from bench.side_by_side.steering import Child, ChildError
from bench.side_by_side.weights import load_model, touched_bytes, weights_file
from kvswap_torch import KVSwapCache, SwapConfig
from kvswap_torch.few_bits import FewBitLinear
from kvswap_torch.half_linear import HalfLinear
from kvswap_torch.hf.families import model_parts
from tests.python.tiny_models import has_native, prompt, tiny_model

needs_native = pytest.mark.skipif(not has_native(), reason="kvswap_torch._C is not built")
GIB = 1 << 30
ALL = frozenset(module for module, _ in OPTIONAL.values())
PLENTY = Room(memory=1 << 50, disk=1 << 50, has_cap=True, modules=ALL)


@torch.inference_mode()
def decoded(model, cache, ids, steps: int) -> torch.Tensor:
    """Logits of `steps` further tokens, [steps, batch, vocabulary]."""
    past, logits = cache.get_seq_length(), []
    for step in range(steps):
        positions = torch.full_like(ids, past + step)
        output = model(input_ids=ids, past_key_values=cache, position_ids=positions)
        logits.append(output.logits[:, -1])
        ids = output.logits[:, -1:].argmax(-1)
    return torch.stack(logits)


@torch.inference_mode()
def prefilled(model, ids) -> DynamicCache:
    cache = DynamicCache(config=model.config)
    model(input_ids=ids, past_key_values=cache)
    return cache


def tokens_after(ids: torch.Tensor) -> torch.Tensor:
    return torch.full((ids.shape[0], 1), 5)


# The peers.


def latent_model():
    return make_model(SHAPES["tiny-latent"], 64, torch.float32)


@pytest.mark.parametrize("open_model", [lambda: tiny_model("llama"), latent_model])
def test_a_mapped_file_gives_what_a_full_cache_gives(tmp_path, open_model):
    model, ids = open_model(), prompt(2, 20)["input_ids"]
    full = prefilled(model, ids)
    first = full.layers[0]
    size = (*first.keys.shape, first.values.shape[-1])
    file = KvFile(tmp_path, len(full.layers), size, torch.float32)
    for index, layer in enumerate(full.layers):
        file.write(index, 0, layer.keys[:, :, :7], layer.values[:, :, :7])
        file.write(index, 7, layer.keys[:, :, 7:], layer.values[:, :, 7:])
    file.flush()
    mapped = MappedCache(file)
    mapped.advise("random")
    expected = decoded(model, full, tokens_after(ids), 6)
    torch.testing.assert_close(decoded(model, mapped, tokens_after(ids), 6), expected)
    # Decoded tokens are in the mapping, not beside it.
    torch.testing.assert_close(mapped.layers[1].keys[:, :, 20:26], full.layers[1].keys[:, :, 20:])
    mapped.close()


def test_a_mapped_file_refuses_what_it_has_no_room_for(tmp_path):
    file = KvFile(tmp_path, 1, (1, 1, 4, 8, 8), torch.float32)
    cache = MappedCache(file)
    new = torch.zeros(1, 1, ROOM_TOKENS + 1, 8)
    with pytest.raises(ValueError, match=f"room for {ROOM_TOKENS + 4} positions"):
        cache.update(new, new, 0)
    cache.close()


@needs_native
def test_without_reuse_every_chosen_group_is_read(tmp_path):
    model, ids = tiny_model("llama"), prompt(1, 40)["input_ids"]
    rates = {}
    for replacement in ("fifo", "none"):
        config = SwapConfig(
            group_tokens=1, groups_max=64, pages_max=64, tail_tokens=4, replacement=replacement
        )
        with KVSwapCache(model, path=tmp_path, config=config) as cache:
            with torch.inference_mode():
                model(input_ids=ids, past_key_values=cache)
            decoded(model, cache, tokens_after(ids), 4)
            rates[replacement] = cache.stats().hit_rate
    assert rates["none"] == 0
    assert rates["fifo"] > 0.5


# Settings and weights.


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A model of the benchmark's tiny shape, and the file of its weights."""
    shape = Cell("tiny", 512, 1).shape
    path = weights_file(shape, tmp_path_factory.mktemp("weights"))
    return load_model(shape, 512, path), path


def test_mapped_weights_are_a_whole_model(tiny):
    model, _ = tiny
    output = model(input_ids=torch.tensor([[1, 2, 3]])).logits
    assert output.isfinite().all()
    shape = Cell("tiny", 512, 1).shape
    norms = sum(p.numel() for name, p in model.named_parameters() if "norm" in name)
    held = sum(parameter.numel() for parameter in model.parameters())
    assert touched_bytes(shape) == 2 * (held - norms)


@needs_native
@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_weights_in_few_bits_decode_and_are_counted(tiny, tmp_path, weights):
    cell = Cell("tiny", 8192, 1)
    key = f"weights_{weights}"
    runner = Runner(Order(key, vars(cell), str(tiny[1]), str(tmp_path), ""))
    runner.load()
    few = [each for each in runner.model.modules() if isinstance(each, FewBitLinear)]
    scales = sum(each.scales.nbytes for each in few if each.bits == 8)  # of an output: not counted
    held = sum(buffer.nbytes for each in few for buffer in each.buffers()) - scales
    head = runner.model.lm_head.weight.nbytes
    assert touched_bytes(cell.shape, weights=weights) == held + head
    runner.fill()
    assert runner.step()["seconds"] > 0
    assert runner.report()["config"]["prefetch"] == "verify"
    runner.close()


def test_a_latent_shape_counts_what_its_model_has(tmp_path):
    shape = Cell("tiny-latent", 512, 1).shape
    model = load_model(shape, 512, weights_file(shape, tmp_path))
    norms = sum(p.numel() for name, p in model.named_parameters() if "norm" in name)
    held = sum(parameter.numel() for parameter in model.parameters())
    assert touched_bytes(shape) == 2 * (held - norms)
    full = prefilled(model, prompt(1, 30)["input_ids"])
    cached = sum(layer.keys.nbytes + layer.values.nbytes for layer in full.layers)
    assert shape.kv_bytes(1, 30) == cached == model_parts(model).shape.kv_bytes(30)
    widths = [layer.keys.shape[-1] for layer in full.layers]
    assert widths == [shape.latent.rank] * shape.layers  # it keeps latents, not what they become


@needs_native
def test_settings_keep_the_budget_and_the_number_of_tokens(tmp_path):
    roomy, narrow = Cell("small", 131072, 1), Cell("small", 1024, 1)
    model = make_model(roomy.shape, 131072)
    fitted = fit_kvswap(model, roomy, tmp_path)
    assert fitted.budget_bytes == roomy.kv_bytes // MEMORY_PART
    assert fitted.config.group_tokens * fitted.config.groups_max == 400
    least = fit_kvswap(model, narrow, tmp_path)
    assert least.budget_bytes > narrow.kv_bytes // MEMORY_PART
    assert least.config.groups_max == least.config.pages_max == 100
    for reuse in (True, False):
        heads = fit_per_head(model, roomy, tmp_path, fitted.budget_bytes, reuse)
        assert heads.config.group_tokens == 1
        assert heads.config.groups_max == 400
        assert (heads.config.replacement == "none") != reuse
        assert heads.budget_bytes >= fitted.budget_bytes
    assert heads.config.pages_max == 400
    with KVSwapCache(
        model, tmp_path, least.config, least.budget_bytes, max_context=1024 + 512, max_batch=1
    ) as cache:
        assert cache.driver.config.groups_max == 100


# The plan.


def test_the_plan_has_small_cells_first_and_models_a_device_at_one_context():
    plan = cells(["small", "1b"], [8192, 32768], [1, 8], ["local", "emmc"])
    assert len(plan) == 2 * 2 * 2 + 2 * 2
    assert plan[0].name == "small_8k_b1_local"
    assert {cell.context for cell in plan if cell.device} == {32768}
    assert Cell("1b", 8192, 1).shape.layers == 4
    assert Cell("1b-whole", 8192, 1).shape.layers == 16
    sizes = [cell.kv_bytes for cell in plan]
    assert sizes == sorted(sizes)
    assert [c.context for c in cells(["small"], [8192], [1], ["emmc"])] == [8192]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ((["2b"], [8192], [1], ["local"]), "shapes: .*'2b'"),
        ((["1b"], [0], [1], ["local"]), "contexts: .*positive"),
        ((["1b"], [8192], [1], ["floppy"]), "devices: .*'floppy'"),
        ((["1b"], [8192], [1], ["local"], "theirs"), "linear: .*'theirs'"),
    ],
)
def test_the_plan_refuses_by_name(given, said):
    with pytest.raises(ValueError, match=said):
        cells(*given)


def test_who_cannot_run_is_told_why():
    cell = Cell("1b", 131072, 8)
    assert PLENTY.problem(cell, "dynamic") is None
    little = Room(memory=4 * GIB, disk=1 << 50, has_cap=True, modules=ALL)
    assert re.match(r"memory: needs .* there is", little.problem(cell, "dynamic"))
    full = Room(memory=1 << 50, disk=GIB, has_cap=True, modules=ALL)
    assert full.problem(cell, "tokens").startswith("disk: needs")
    uncapped = Room(1 << 50, 1 << 50, has_cap=False, modules=ALL)
    assert uncapped.problem(cell, "mmap") == memory_cap.NONE
    assert "modelled" in PLENTY.problem(Cell("1b", 32768, 1, "emmc"), "mmap")


def test_waves_fit_and_pair_everybody_with_kvswap():
    cell, keys = Cell("1b", 131072, 8), list(LABELS)
    assert PLENTY.waves(cell, keys) == [
        ["kvswap", "floor", "default", "no_prefetch", "static", "dynamic",
         "tokens", "tokens_no_reuse", "fp8", "int4", "weights_int8", "weights_int4",
         "llama_f16", "llama_q8", "llama_floor", "ollm"],
        ["kvswap", "floor", "restore", "mmap"],
    ]  # fmt: skip
    assert PLENTY.waves(cell, ["kvswap", "floor", "mmap"]) == [["kvswap", "floor", "mmap"]]
    room = Room(memory=24 * GIB, disk=1 << 50, has_cap=True, modules=ALL)
    waves = room.waves(cell, keys)
    assert len(waves) > 1
    assert all(wave[:2] == ["kvswap", "floor"] for wave in waves)
    assert sorted({key for wave in waves for key in wave}) == sorted(keys)
    assert all(sum(memory_need(cell, key) for key in wave) <= 24 * GIB for wave in waves)
    assert waves[-1] == ["kvswap", "floor", "restore", "mmap"], "who reads most comes last"
    assert sum("mmap" in wave or "restore" in wave for wave in waves) == 1


def test_the_part_that_fills_the_distance_is_what_it_takes_above_its_own_bytes():
    floor = Floor(weights_ms=10, summary_ms=1, kv_ms=2, disk_ms=5)
    assert floor.ms == 13
    row = {"ms": 26.0, "parts_ms": {"model": 12.0, "select": 8.0, "attend": 3.0, "wait": 3.0}}
    told = describe("kvswap", floor, row)
    assert told["distance"] == 2.0
    assert told["largest_part_over"] == ["select", 7.0]
    slow_disk = Floor(weights_ms=10, summary_ms=0, kv_ms=20, disk_ms=100)
    row = {"ms": 130.0, "parts_ms": {"model, attention": 50.0, "update": 80.0}}
    told = describe("restore", slow_disk, row)
    assert told["largest_part_over"] == ["model, attention", 20.0]


# A busy machine.


def measured(floor_ms: float, floor_cpu: float, static_cpu: float = 0.0, **more):
    rows = {"floor": {"ms": floor_ms, "cpu_seconds": floor_cpu}}
    if static_cpu:
        rows["static"] = {"ms": 100.0, "cpu_seconds": static_cpu}
    return {"machine": {"cores": 2}, "contenders": rows} | more


def test_a_cell_is_marked_where_two_threads_had_one_core():
    assert why_busy(measured(50.0, 0.055, 0.105)) == "had 1.1 of 2 cores"
    # The work of a small model's floor is one thread's; its larger contenders' is not.
    assert why_busy(measured(20.0, 0.022, 0.150)) == ""
    assert why_busy(measured(50.0, 0.085)) == ""
    shown = measured(50.0, 0.055, shape="1b", layers=4, context=8192, batch=1)
    assert report.title(shown) == "1b (4 layers), 8,192, 1 (busy machine: had 1.1 of 2 cores)"
    shown |= {"contenders": measured(50.0, 0.085)["contenders"], "choices": "smollm2"}
    assert report.title(shown) == "1b (4 layers), 8,192, 1, SmolLM2's choices"


def test_a_cell_is_marked_where_its_floor_was_twice_as_fast_before():
    first, slow = measured(50.0, 0.085), measured(110.0, 0.190)
    assert floor_ms_least(first, None) == 50.0
    slow["floor_ms_least"] = floor_ms_least(slow, first)
    assert why_busy(slow) == "floor 2.2 times an earlier run's"
    assert floor_ms_least(measured(90.0, 0.1), slow) == 50.0
    assert floor_ms_least({"contenders": {}}, None) is None


# Children.


@needs_native
@pytest.mark.long
def test_a_latent_cell_is_measured_and_shown(tmp_path):
    cell = Cell("tiny-latent", 1024, 1)
    weights = weights_file(cell.shape, tmp_path / "weights")
    keys = ["static", "dynamic", "restore", f"{PRESET}exact"]
    measured = Measurement(cell, tmp_path, weights, seconds=0.01, say=lambda what: None)
    measured.run(keys, PLENTY)
    assert measured.empty == {}
    result = measured.results(1e10, _Disk()) | {"machine": machine.describe(tmp_path)}
    assert result["kv_bytes_full"] == cell.kv_bytes
    assert result["contenders"]["static"]["kv_memory_bytes"] > cell.kv_bytes
    rows = list(latent_rows([result]))
    assert [row.split(" | ")[1] for row in rows[-4:]] == [
        "StaticCache", "DynamicCache", "full restore", "kvswap, all tokens"
    ]  # fmt: skip


@needs_native
def test_a_cell_is_measured_and_told(tiny, tmp_path):
    cell = Cell("tiny", 1024, 1)
    keys = ["kvswap", "restore", "mmap"]
    room = Room(memory=1 << 50, disk=1 << 50, has_cap=False, modules=ALL)
    measured = Measurement(cell, tmp_path, tiny[1], seconds=0.01, say=lambda what: None)
    measured.run(keys, room)
    assert measured.empty == {"mmap": memory_cap.NONE}
    assert set(measured.rows) == {"kvswap", "restore"}
    assert list(tmp_path.glob("*.kv")) == []
    result = measured.results(1e10, _Disk())
    folder = tmp_path / "results"
    folder.mkdir()
    (folder / f"{cell.name}.json").write_text(json.dumps(result))
    rows = result["contenders"]
    steps, layers = rows["restore"]["steps"], cell.shape.layers
    # The next step's first layer may not have come when the last step ends.
    least = cell.kv_bytes * (steps * layers - 1) // (steps * layers)
    assert rows["restore"]["bytes_read"] >= least or not _counts_reads(rows)
    assert rows["kvswap"]["against_kvswap"] is None
    assert rows["restore"]["against_kvswap"] > 0
    assert rows["restore"]["bytes_written_per_token_stored"] >= cell.kv_bytes // cell.context
    assert rows["kvswap"]["steps"] >= 3
    result["machine"] = machine.describe(tmp_path)
    assert list(speed_rows([result]))[-1].startswith(f"| {report.title(result)} |")
    assert [each["contenders"].keys() for each in report.load(folder)] == [rows.keys()]
    console = Console(width=200, record=True)
    report.print_cell(console, result)
    assert "no memory" in console.export_text()


class _Disk:
    """A disk of one gigabyte a second."""

    def bytes_per_second(self, read_bytes):
        return 1e9

    def measured(self):
        return {"4096": 10**9}


def _counts_reads(rows) -> bool:
    """Whether reads reach a disk here: those of a file system in memory are not counted."""
    return rows["kvswap"]["bytes_read"] > 0


def test_a_child_says_why_it_could_not(tiny, tmp_path):
    order = Order("restore", {"shape_name": "tiny", "context": 1024, "batch": 1}, str(tiny[1]),
                  str(tmp_path), "/nowhere/file")  # fmt: skip
    child = Child(order)
    try:
        child.ask("load")
        with pytest.raises(ChildError, match="fill: FileNotFoundError"):
            child.ask("fill")
    finally:
        child.close()
    run = Run(child)
    run.steps = [{"seconds": 1.0}] * 3
    assert run.is_done(2.0)
    assert not run.is_done(4.0)


@pytest.mark.parametrize("linear", ["torch", "ours"])
def test_a_childs_model_has_the_linear_layers_asked_for(tiny, tmp_path, linear):
    cell = {"shape_name": "tiny", "context": 1024, "batch": 1, "linear": linear}
    runner = Runner(Order("floor", cell, str(tiny[1]), str(tmp_path), ""))
    runner.load()
    assert isinstance(runner.model.lm_head, HalfLinear) == (linear == "ours")


def test_a_cap_limits_its_own_cgroup_only(tmp_path):
    cap = memory_cap.MemoryCap.open()
    if cap is None:
        pytest.skip(memory_cap.NONE)
    try:
        cap.limit(64 << 20)
        limit = (cap.folder / memory_cap.FILES[cap.version][0]).read_text()
        assert int(limit) == 64 << 20
        assert (cap.folder / "cgroup.procs").read_text() == ""
    finally:
        cap.close()
    assert not cap.folder.exists()


def test_cells_with_a_result_are_left_alone(tmp_path, capsys):
    name = Cell("tiny", 1024, 1).name
    (tmp_path / f"{name}.json").write_text("{}")
    command.main(
        shapes="tiny", contexts="1024", batches="1", devices="local", only="floor", seconds=1,
        path=tmp_path, again=False, dry=False, out=tmp_path,
    )  # fmt: skip
    assert (tmp_path / f"{name}.json").read_text() == "{}"
    assert "0 cells" in capsys.readouterr().out


@needs_native
@pytest.mark.parametrize("preset", ["prkv", pytest.param("loki", marks=pytest.mark.long)])
def test_a_preset_is_measured_by_its_own_settings(tiny, tmp_path, preset):
    """One that keeps tokens by what the model's own queries paid them, one with projections."""
    key = f"{PRESET}{preset}"
    cell = Cell("tiny", 2048, 1)
    measured = Measurement(cell, tmp_path, tiny[1], seconds=0.01, say=lambda what: None)
    measured.run([key], PLENTY)
    assert measured.empty == {}
    row = measured.results(1e10, _Disk())["contenders"][key]
    own = SwapConfig.preset(preset, model=model_parts(tiny[0]).identity)
    assert row["config"]["groups_max"] == own.groups_max
    assert 0 < row["kv_memory_bytes"] < memory_need(cell, key)
