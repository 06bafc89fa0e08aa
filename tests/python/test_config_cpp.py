"""The C++ side of configs and budgets gives Python's verdicts and numbers."""

from __future__ import annotations

import dataclasses
import json
import random
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from kvswap_torch import BudgetError, ConfigError, SwapConfig
from kvswap_torch.config import ModelIdentity, cpp_codegen
from kvswap_torch.config.engine import flat_settings
from kvswap_torch.hf.session import alignment_bytes, memory_need
from kvswap_torch.hf.settings import Budget, FirstPass, settle
from kvswap_torch.memory_size import format_bytes, parse_bytes
from kvswap_torch.preset import presets
from kvswap_torch.preset.definition import Shape
from kvswap_torch.projection_file import load_projections, save_projections
from kvswap_torch.sizing import ModelShape, effective_ranks
from tests.python import config_files

ROOT = Path(__file__).resolve().parents[2]
PROBE = ROOT / "build" / "dev" / "tests" / "cpp" / "config_probe"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def ask(*requests: dict[str, Any]) -> list[dict[str, Any]]:
    """The C++ library's answers: ``ok``, or ``refused`` and ``error``."""
    assert PROBE.is_file(), "run: make build"
    lines = "".join(json.dumps(request) + "\n" for request in requests)
    told = subprocess.run([PROBE], input=lines, capture_output=True, text=True, check=True).stdout
    answers = [json.loads(line) for line in told.splitlines()]
    assert len(answers) == len(requests)
    return answers


def plain(config: SwapConfig) -> dict[str, Any]:
    """The config's settings as C++ tells them."""
    return json.loads(json.dumps(flat_settings(config)))


@pytest.mark.parametrize("name", ["settings", "rules"])
def test_the_generated_headers_are_the_current_ones(name: str) -> None:
    file = {"settings": "settings.h", "rules": "settings_rules.h"}[name]
    written = (ROOT / "csrc" / "kvswap" / file).read_text(encoding="utf-8")
    # clang-format has the say over blanks, and over where a long literal is divided.
    ours, theirs = (re.sub(r'\s|"\s*"', "", t) for t in (written, getattr(cpp_codegen, name)()))
    assert ours == theirs, "run: make schema"


def test_a_file_of_many_names_takes_no_time_for_each_pair(tmp_path: Path) -> None:
    """100,000 names: looked up one by one in a list they would take minutes."""
    fields = {f"n{i}": 0 for i in range(100_000)}
    path = tmp_path / "many.json"
    for version in (1, 2):
        told = {"version": version, "provenance": fields, **fields}
        path.write_text(json.dumps(told), encoding="utf-8")
        ((ours, theirs),) = refusals([path])
        assert "fields must be among" in ours and "fields must be among" in theirs


def test_good_files_mean_the_same(tmp_path: Path) -> None:
    paths = []
    files = [{"version": 1, **fields} for fields in config_files.GOOD]
    files += [{"version": 2, **fields} for fields in config_files.GOOD_BLOCKS]
    for number, fields in enumerate(files):
        paths.append(tmp_path / f"{number}.json")
        paths[-1].write_text(json.dumps(fields), encoding="utf-8")
    for path, answer in zip(paths, ask(*({"do": "load", "path": str(p)} for p in paths)),
                            strict=True):  # fmt: skip
        config = SwapConfig.load(path)
        told = answer["ok"]
        assert told["settings"] == plain(config)
        assert told["model"] == (config.model and dataclasses.asdict(config.model))
        rows = [
            {"batch": row.batch, "context": row.context,
             "settings": plain(config.for_batch_and_context(row.batch, row.context))}
            for row in config.solutions
        ]  # fmt: skip
        assert told["table"] == rows
        for full in (False, True):  # what was read, written as version 2
            config.save(path, full=full)
            (again,) = ask({"do": "load", "path": str(path)})
            assert again == answer
            assert SwapConfig.load(path) == config


def test_the_files_of_all_presets_mean_the_same(tmp_path: Path) -> None:
    configs = {
        preset.name: SwapConfig.preset(preset.name, preset.shown(Shape())) for preset in presets()
    }
    for name, config in configs.items():
        config.save(tmp_path / f"{name}.json")
    asked = [{"do": "load", "path": str(tmp_path / f"{name}.json")} for name in configs]
    for (name, config), answer in zip(configs.items(), ask(*asked), strict=True):
        assert answer["ok"]["settings"] == plain(config), name


def test_what_python_saves_cpp_reads(tmp_path: Path) -> None:
    config = SwapConfig(rank=(4, 8), model=ModelIdentity(layers=2)).save(tmp_path / "c.json")
    (answer,) = ask({"do": "load", "path": str(tmp_path / "c.json")})
    assert answer["ok"]["settings"] == plain(config)
    (answer,) = ask({"do": "prepare", "path": "", "directory": str(tmp_path), **MODEL})
    assert answer["ok"]["settings"] == plain(SwapConfig())  # no file: the defaults


def refusals(paths: list[Path]) -> list[tuple[str, str]]:
    """(Python's message, the C++ loader's) for each file; both must refuse."""
    pairs = []
    for path, answer in zip(paths, ask(*({"do": "load", "path": str(p)} for p in paths)),
                            strict=True):  # fmt: skip
        with pytest.raises(ConfigError) as caught:
            SwapConfig.load(path)
        assert answer.get("refused") == "config", (path.read_bytes()[:80], answer)
        pairs.append((str(caught.value), answer["error"]))
    return pairs


def test_bad_files_are_refused_by_both(tmp_path: Path) -> None:
    paths = []
    bad = [*config_files.BAD, *config_files.BAD_BLOCKS]
    for number, (text, _) in enumerate(bad):
        paths.append(tmp_path / f"{number}.json")
        paths[-1].write_text(text, encoding="utf-8")
    for (ours, theirs), (_, words), path in zip(refusals(paths), bad, paths, strict=True):
        assert words in ours
        assert theirs.startswith(f"config {path}: ") and len(theirs) < 1100


def test_what_no_parser_takes_is_refused_by_both(tmp_path: Path) -> None:
    paths = [tmp_path / f"{number}.json" for number in range(len(config_files.PARSERS_OWN))]
    for path, text in zip(paths, config_files.PARSERS_OWN, strict=True):
        path.write_text(text, encoding="utf-8")
    binary, missing = tmp_path / "binary.json", tmp_path / "missing.json"
    binary.write_bytes(b"\xff\xfe\x00")
    pairs = refusals(paths)
    for (ours, theirs), path in zip(pairs, paths, strict=True):
        beginning = f"config {path}: must be valid JSON: "
        assert ours.startswith(beginning) and theirs.startswith(beginning)
        assert theirs.endswith("; restore the file or tune again")
    with pytest.raises(ConfigError) as caught:
        SwapConfig.load(missing)
    answers = ask({"do": "load", "path": str(missing)}, {"do": "load", "path": str(binary)},
                  {"do": "load", "path": str(tmp_path)})  # fmt: skip
    assert str(missing) in str(caught.value) and "No such file" in answers[0]["error"]
    for answer, path in zip(answers, (missing, binary, tmp_path), strict=True):
        assert answer["refused"] == "config" and answer["error"].startswith(f"config {path}: ")


def test_the_same_solution_is_nearest(tmp_path: Path) -> None:
    rows = [
        {"batch": batch, "context": context, "settings": {"rank": 8 * batch + number}}
        for number, (batch, context) in enumerate(
            (b, c) for b in (1, 2, 8) for c in (4096, 8192, 32768)
        )
    ]
    path = tmp_path / "c.json"
    config = SwapConfig(table=rows).save(path)
    draw = random.Random(3)
    pairs = [(1, 16384), (4, 8192), (3, 5), (0, 8)]
    pairs += [(draw.randint(1, 40), draw.randint(1, 1 << 20)) for _ in range(60)]
    pairs += [(2 ** draw.randint(0, 5), 2 ** draw.randint(8, 20)) for _ in range(60)]
    requests = [{"do": "nearest", "path": str(path), "batch": b, "context": c} for b, c in pairs]
    for (batch, context), answer in zip(pairs, ask(*requests), strict=True):
        if batch == 0:
            assert "for_batch_and_context: both must be positive" in answer["error"]
        else:
            assert answer["ok"] == plain(config.for_batch_and_context(batch, context))


# Budgets.

MODEL = {"layers": 3, "heads": 8, "kv_heads": 2, "head_dim": 32, "dtype": "bfloat16",
         "model_type": "qwen3"}  # fmt: skip


LIMITS = ("kv_memory_bytes", "max_context", "max_batch")


def shape_of(model: dict[str, Any]) -> ModelShape:
    return ModelShape(model["layers"], model["heads"], model["kv_heads"], model["head_dim"],
                      DTYPES[model["dtype"]].itemsize)  # fmt: skip


def settled(request: dict[str, Any], config: SwapConfig | None, folder: Path) -> dict[str, Any]:
    """What `KVSwapCache` would settle on, as the probe answers."""
    shape, reserved = shape_of(request), request["reserved_bytes"]
    budget = Budget(*(request[name] for name in LIMITS))
    alignment = alignment_bytes(folder)

    def need(candidate: SwapConfig, batch: int, context: int) -> dict[str, int]:
        beside = reserved if candidate.predicts else 0
        inner = {name: getattr(budget, name) for name in LIMITS}
        if budget.kv_memory_bytes is not None:
            inner["kv_memory_bytes"] = max(1, budget.kv_memory_bytes - beside)
        options = flat_settings(candidate) | inner
        options |= {n: request[n] for n in ("layers", "kv_heads", "head_dim")}
        options["query_heads"] = request["heads"]
        options |= {"dtype": DTYPES[request["dtype"]], "directory": str(folder)}
        options["ranks"] = list(effective_ranks(candidate, shape, False))
        uses = memory_need(options, batch, context, alignment)
        sums = {name: uses[name] + beside for name in ("total", "least")}
        return uses | {"predictor": beside} | sums

    first = None
    if request["first_batch"] is not None:
        first = FirstPass(request["first_batch"], request["first_tokens"])
    try:
        chosen = settle(config, shape, budget, need, first)
    except BudgetError as error:
        return {"refused": "budget", "error": str(error)}
    except ConfigError as error:
        return {"refused": "config", "error": str(error)}
    return {"settings": plain(chosen), "ranks": list(effective_ranks(chosen, shape, False))}


def random_config(draw: random.Random, layers: int) -> SwapConfig:
    def settings() -> dict[str, Any]:
        groups = draw.randint(1, 200)
        rank = [draw.randint(1, 16) for _ in range(layers)]
        return {
            "rank": draw.choice([rank[0], rank]),
            "groups_max": groups,
            "pages_max": max(16, groups + draw.randint(0, 400)),
            "group_tokens": draw.choice([1, 4, 16]),
            "tail_tokens": draw.randint(0, 64),
        }

    rows = [
        {"batch": batch, "context": context, "settings": settings()}
        for batch in (1, 4)
        for context in (4096, 32768)
    ]
    return SwapConfig(
        **settings(),
        summary_dtype=draw.choice(["model", "int8", "int4"]),
        look_ahead=draw.choice(["off", "trust", "verify"]),
        select_queries_max=draw.randint(1, 16),
        table=draw.choice([[], rows]),
    )


def random_request(draw: random.Random, folder: Path) -> dict[str, Any]:
    kv_heads = draw.choice([1, 2, 8])
    first = draw.random() < 0.3
    known = draw.random() < 0.7
    return {
        "do": "prepare",
        "directory": str(folder),
        "layers": draw.randint(1, 12),
        "heads": 8,
        "kv_heads": kv_heads,
        "head_dim": draw.choice([16, 64, 128]),
        "dtype": draw.choice(list(DTYPES)),
        "model_type": "",
        "kv_memory_bytes": draw.choice([None, int(2 ** draw.uniform(18, 32))]),
        "max_context": draw.randint(1, 100_000) if known else None,
        "max_batch": draw.randint(1, 8) if known else None,
        "first_batch": draw.randint(1, 4) if first else None,
        "first_tokens": draw.randint(1, 20_000),
        "reserved_bytes": draw.choice([0, 0, 12345]),
        "path": "",
    }


def test_a_budget_gives_the_same_settings(tmp_path: Path) -> None:
    draw = random.Random(11)
    requests, configs = [], []
    for number in range(150):
        request = random_request(draw, tmp_path)
        config = random_config(draw, request["layers"]) if draw.random() < 0.7 else None
        if config is not None:
            request["path"] = str(tmp_path / f"{number}.json")
            config = config.save(request["path"])
        requests.append(request)
        configs.append(config)
    kinds = {"settled": 0, "refused": 0}
    for request, config, answer in zip(requests, configs, ask(*requests), strict=True):
        expected = settled(request, config, tmp_path)
        if "refused" in expected:
            kinds["refused"] += 1
            assert answer["refused"] == expected["refused"]
            # The minimum, which is what the reader acts on.
            numbers = [re.findall(r"\d+", text["error"])[:3] for text in (answer, expected)]
            assert numbers[0] == numbers[1]
        else:
            kinds["settled"] += 1
            assert {name: answer["ok"][name] for name in expected} == expected
    assert min(kinds.values()) > 10, kinds


def test_another_models_config_is_refused_by_both(tmp_path: Path) -> None:
    made_for = ModelIdentity("qwen3", 3, 8, 2, 32, "bfloat16")
    configs = [
        SwapConfig(model=dataclasses.replace(made_for, model_type="llama", layers=4)),
        SwapConfig(model=dataclasses.replace(made_for, kv_heads=1, head_dim=64)),
        SwapConfig(model=ModelIdentity(config_hash="ab", kv_heads=9)),
        SwapConfig(rank=(8, 8)),
        SwapConfig(rank=65),
        SwapConfig(rank=(8, 8, 65)),
        SwapConfig(true_query_layers=(1, 3)),
        SwapConfig(table=[{"batch": 1, "context": 9, "settings": {"rank": 65}}]),
    ]
    requests = []
    for number, config in enumerate(configs):
        path = tmp_path / f"{number}.json"
        configs[number] = config.save(path)
        requests.append({"do": "prepare", "path": str(path), "directory": str(tmp_path), **MODEL})
    for config, answer in zip(configs, ask(*requests), strict=True):
        with pytest.raises(ConfigError) as caught:
            config.check_model(made_for)
        assert answer["refused"] == "config"
        assert answer["error"].split(":")[0] == str(caught.value).split(":")[0]  # the same field


# Projections.


def test_projections_are_read_alike_and_refused_by_both(tmp_path: Path) -> None:
    width, ranks = 64, [8, 16, 4]
    identity = ModelIdentity("qwen3", 3, 8, 2, 32, "bfloat16")
    pairs = [(torch.randn(width, 20), torch.randn(width, 20)) for _ in ranks]
    nan = [(pairs[0][0].clone(), pairs[0][1]), *pairs[1:]]
    nan[0][0][3, 3] = float("nan")
    save_projections(tmp_path / "good.st", pairs, kind="query_aware", model=identity)
    save_projections(tmp_path / "any.st", pairs, kind="svd_keys")
    save_projections(tmp_path / "nan.st", nan, kind="query_aware")
    save_projections(tmp_path / "short.st", pairs[:2], kind="query_aware")
    save_projections(tmp_path / "narrow.st", [(k[:, :7], q) for k, q in pairs], kind="query_aware")
    other = dataclasses.replace(identity, layers=9, dtype="float32")
    save_projections(tmp_path / "other.st", pairs, kind="query_aware", model=other)
    from safetensors.torch import save_file

    save_file({"layers.0.key": pairs[0][0]}, str(tmp_path / "plain.st"))
    save_file({"layers.0.key": torch.zeros(width, 20, dtype=torch.int32)},
              str(tmp_path / "ints.st"), metadata={"kvswap_projection": "1"})  # fmt: skip
    names = ["good", "any", "nan", "short", "narrow", "other", "plain", "ints"]
    requests = []
    for name in names:
        path = tmp_path / f"{name}.json"
        SwapConfig(rank=tuple(ranks), projection_file=f"{name}.st").save(path)
        requests.append({"do": "prepare", "path": str(path), "directory": str(tmp_path), **MODEL})
    for name, answer in zip(names, ask(*requests), strict=True):
        if name in ("good", "any"):
            read = load_projections(tmp_path / f"{name}.st", ranks, width, identity)
            total = sum(matrix.double().sum().item() for pair in read for matrix in pair)
            assert answer["ok"]["sum"] == pytest.approx(total, abs=1e-5)
            assert (answer["ok"]["ranks"], answer["ok"]["projections"]) == (ranks, 3)
            continue
        with pytest.raises(ConfigError):
            load_projections(tmp_path / f"{name}.st", ranks, width, identity)
        assert answer["refused"] == "config" and f"{name}.st" in answer["error"]


def test_sizes_are_read_and_shown_alike() -> None:
    sizes = ["\x1e5", "9" * 5000, "0" * 5000 + "1." + "0" * 5000 + "KiB", "0." + "9" * 30 + "TiB",
             "512MiB", "1.5GB", "65536", " 3 kib ", "0.1K", ".5M", "2.", "9223372036854775807",
             "9223372036854775808", "0", "", "MiB", "1.5.2", "1XB", "-3", "1e3", "0.0001",
             "8388607.999999999999999TiB", "00012GB", "x'y"]  # fmt: skip
    for size, answer in zip(sizes, ask(*({"do": "parse_bytes", "size": s} for s in sizes)),
                            strict=True):  # fmt: skip
        try:
            assert answer == {"ok": parse_bytes(size, "size")}, size
        except ConfigError:
            assert answer["refused"] == "config", size
    counts = [0, 1, 1023, 1024, 3 << 19, 102400, 1048575, 10**9, 10**13, 2**62]
    for count, answer in zip(counts, ask(*({"do": "format_bytes", "count": c} for c in counts)),
                             strict=True):  # fmt: skip
        assert answer["ok"] == format_bytes(count)
