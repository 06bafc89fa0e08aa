"""SwapConfig: what it refuses, what it keeps, and the file."""

import dataclasses
import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvswap_torch import ConfigError, KVSwapError, ModelIdentity, Solution, SwapConfig
from kvswap_torch.config import SOLVABLE
from kvswap_torch.config_file import dumps
from kvswap_torch.config_schema import schema

SCHEMA_FILE = Path(__file__).resolve().parents[2] / "kvswap_torch" / "config.schema.json"

ranks = st.one_of(st.integers(1, 4096), st.lists(st.integers(1, 512), min_size=1).map(tuple))
names = st.text("abcdefgh_-.", min_size=1, max_size=12).filter(lambda name: ".." not in name)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
solutions = st.builds(
    lambda batch, context, rank, tokens: Solution(
        batch, context, {"rank": rank, "group_tokens": tokens}
    ),
    st.integers(1, 64), st.integers(1, 1 << 20), ranks, st.integers(1, 64),
)  # fmt: skip
configs = st.builds(
    SwapConfig,
    group_tokens=st.integers(1, 64),
    rank=ranks,
    summary_dtype=st.sampled_from(["model", "int8", "int4"]),
    groups_max=st.integers(1, 200),
    pages_max=st.integers(200, 4000),
    sink_tokens=st.integers(0, 64),
    replacement=st.sampled_from(["fifo", "lru", "unused", "none", "score"]),
    look_ahead=st.booleans(),
    device_model=st.sampled_from([None, "nvme", "ufs", "emmc"]),
    disk_quota_bytes=st.none() | st.integers(1, 2**63 - 1),
    projection_file=st.none() | names,
    model=st.none() | st.builds(ModelIdentity, layers=st.none() | st.integers(1, 200)),
    provenance=st.dictionaries(st.text(), json_values, max_size=4),
    table=st.lists(solutions, max_size=4, unique_by=lambda row: (row.batch, row.context)),
)


@given(configs)
def test_saved_and_loaded_is_equal_and_bytes_are_stable(
    tmp_path_factory: pytest.TempPathFactory, config: SwapConfig
) -> None:
    path = tmp_path_factory.mktemp("config") / "config.json"
    saved = config.save(path)
    loaded = SwapConfig.load(path)
    assert loaded == saved == config
    assert loaded.source == saved.source == path
    assert dumps(loaded).encode() == path.read_bytes()
    assert [name.name for name in path.parent.iterdir()] == ["config.json"]


def test_defaults_are_the_documented_ones() -> None:
    config = SwapConfig()
    assert (config.group_tokens, config.rank, config.groups_max, config.pages_max) == (
        4, 32, 100, 200,
    )  # fmt: skip
    assert (config.sink_tokens, config.tail_tokens, config.replacement) == (4, 32, "fifo")
    for item in dataclasses.fields(SwapConfig):
        assert item.name == "source" or f"\n{item.name} : " in SwapConfig.__doc__


def test_a_page_for_each_query() -> None:
    with pytest.raises(ConfigError, match="^pages_max: must be at least select_queries_max"):
        SwapConfig(groups_max=4, pages_max=7)
    assert SwapConfig(groups_max=4, pages_max=8).pages_max == 8


def test_a_config_is_frozen_hashable_and_travels() -> None:
    config = SwapConfig(rank=[8, 48], model={"layers": 2}, table=[Solution(1, 2, {"rank": [4, 4]})])
    assert config.rank == (8, 48)
    assert config.model == ModelIdentity(layers=2)
    assert len({config, SwapConfig(), dataclasses.replace(config)}) == 2
    assert pickle.loads(pickle.dumps(config)) == config
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.rank = 3


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("group_tokens", 0), ("group_tokens", 65), ("group_tokens", 4.0), ("group_tokens", True),
        ("rank", 0), ("rank", ()), ("rank", (8, 0)), ("rank", "32"), ("rank", (True,)),
        ("rank", 1 << 17), ("summary_dtype", "int3"), ("summary_dtype", None), ("groups_max", 0),
        ("pages_max", 99), ("sink_tokens", -1), ("tail_tokens", -1), ("replacement", "random"),
        ("replacement", ["fifo"]), ("select_queries_max", 17), ("look_ahead", 1),
        ("layout", "clusters"), ("reader", "aio"), ("io_mode", "mmap"), ("read_depth", 0),
        ("merge_gap_bytes", -1), ("merge_bytes_max", 8192), ("merge_bytes_max", 4095),
        ("checksum", None), ("device_model", "tape"), ("disk_quota_bytes", 0),
        ("projection_file", ""), ("projection_file", "/a"), ("projection_file", "../a"),
        ("projection_file", 3), ("projection_kind", "pca"), ("model", 3),
        ("model", {"wheels": 4}), ("model", {"layers": 0}), ("model", {"layers": "5"}),
        ("provenance", None), ("provenance", {"x": float("nan")}), ("provenance", {"x": object()}),
        ("table", "none"), ("table", [{"batch": 1}]), ("version", 0), ("version", 2),
        ("version", True), ("version", 1.0),
    ],
)  # fmt: skip
def test_what_is_out_of_range_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^{field}(\.\w+)?: .*(must|reads)") as caught:
        SwapConfig(**{field: value})
    assert isinstance(caught.value, ValueError) and isinstance(caught.value, KVSwapError)


@pytest.mark.parametrize(
    "rows",
    [
        [Solution(1, 8), Solution(1, 8)],
        [Solution(1, 8, {"checksum": False})],
        [Solution(1, 8, {"pages_max": 10})],
        [{"batch": 1, "context": 8, "settings": {"rank": 0}}],
        [{"batch": 0, "context": 8, "settings": {}}],
        [{"batch": 1, "context": 8, "settings": []}],
    ],
)
def test_a_bad_table_is_refused(rows: list[Any]) -> None:
    with pytest.raises(ConfigError, match="^table: "):
        SwapConfig(table=rows)


def test_the_exact_or_nearest_pair_is_taken() -> None:
    rows = [
        Solution(1, 8192, {"rank": 8}),
        Solution(1, 32768, {"rank": 16}),
        Solution(8, 32768, {"rank": 24, "pages_max": 400}),
    ]
    config = SwapConfig(table=rows, group_tokens=2)
    assert config.for_batch_and_context(1, 8192).rank == 8
    chosen = config.for_batch_and_context(7, 40000)
    assert (chosen.rank, chosen.pages_max, chosen.group_tokens) == (24, 400, 2)
    assert chosen.table == () and chosen.for_batch_and_context(1, 1) is chosen
    # Halfway between 8K and 32K: the longer.
    assert config.for_batch_and_context(1, 16384).rank == 16
    assert SwapConfig().for_batch_and_context(3, 5) == SwapConfig()
    with pytest.raises(ConfigError, match="must be positive"):
        config.for_batch_and_context(0, 8)


@given(st.lists(solutions, min_size=1, unique_by=lambda row: (row.batch, row.context)))
def test_an_exact_pair_always_wins(rows: list[Solution]) -> None:
    config = SwapConfig(table=rows)
    for row in rows:
        chosen = config.for_batch_and_context(row.batch, row.context)
        assert {name: getattr(chosen, name) for name, _ in row.settings} == dict(row.settings)


def test_another_models_config_is_refused_naming_what_differs(tmp_path: Path) -> None:
    made_for = ModelIdentity("qwen3", 5, 4, 2, 64, "float32")
    config = SwapConfig(model=made_for).save(tmp_path / "c.json")
    config.check_model(made_for)
    config.check_model(dataclasses.replace(made_for, model_type=None, config_hash="ab"))
    other = dataclasses.replace(made_for, layers=6, dtype="bfloat16")
    with pytest.raises(ConfigError) as caught:
        config.check_model(other)
    for told in ("c.json", "layers 5 (this model: 6)"):
        assert told in str(caught.value)
    assert "head_dim" not in str(caught.value)


def test_ranks_must_fit_the_model() -> None:
    assert SwapConfig(rank=8).ranks(3) == (8, 8, 8)
    assert SwapConfig(rank=(8, 4)).ranks(2) == (8, 4)
    with pytest.raises(ConfigError, match=r"^rank: must be one number or 3"):
        SwapConfig(rank=(8, 4)).check_model(ModelIdentity(layers=3))
    with pytest.raises(ConfigError, match=r"^rank: must be an int from 1 to 16"):
        SwapConfig(rank=32).check_model(ModelIdentity(kv_heads=1, head_dim=16))
    with pytest.raises(ConfigError, match=r"^rank: must be an int from 1 to 16"):
        SwapConfig(rank=8, table=[Solution(1, 8, {"rank": 17})]).check_model(
            ModelIdentity(kv_heads=1, head_dim=16)
        )


def test_the_projection_lies_beside_the_config(tmp_path: Path) -> None:
    config = SwapConfig(projection_file="projection.safetensors")
    with pytest.raises(ConfigError, match="was not loaded"):
        _ = config.projection_path
    config.save(tmp_path / "c.json")
    loaded = SwapConfig.load(tmp_path / "c.json")
    assert loaded.projection_path == tmp_path / "projection.safetensors"
    assert loaded.for_batch_and_context(1, 1).projection_path == loaded.projection_path
    assert SwapConfig().projection_path is None


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "valid JSON"),
        ("{", "valid JSON"),
        ("[]", "must be a JSON object"),
        ("{}", "version must be 1"),
        ('{"version": 2, "new_field": 1}', "version must be 1"),
        ('{"version": true}', "version must be 1"),
        ('{"version": 1, "rnak": 32}', "got rnak"),
        ('{"version": 1, "source": "x"}', "got source"),
        ('{"version": 1, "rank": 32, "rank": 16}', "got rank again"),
        ('{"version": 1, "provenance": {"x": NaN}}', "must be finite"),
        ('{"version": 1, "rank": "32"}', "rank: must be"),
        ('{"version": 1, "group_tokens": 99}', "group_tokens: must be"),
        ('{"version": 1, "rank": ' + "9" * 5000 + "}", "valid JSON"),
        ("[" * 100_000, "valid JSON"),
        ("\ufeff{}", "valid JSON"),
    ],
)
def test_a_bad_file_is_refused_naming_it(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        SwapConfig.load(path)
    assert str(caught.value).startswith(f"config {path}: ") and told in str(caught.value)


def test_files_that_cannot_be_read_or_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="must be a readable JSON file"):
        SwapConfig.load(tmp_path / "missing.json")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="must be a readable JSON file"):
        SwapConfig.load(tmp_path / "binary.json")
    with pytest.raises(ConfigError, match="folder must be writable"):
        SwapConfig().save(tmp_path / "no" / "c.json")


def test_a_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "c.json"
    SwapConfig(rank=8).save(path)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ConfigError, match="No space left"):
        SwapConfig(rank=16).save(path)
    assert SwapConfig.load(path).rank == 8
    assert [entry.name for entry in tmp_path.iterdir()] == ["c.json"]


def test_the_checked_in_schema_is_the_current_one() -> None:
    assert json.loads(SCHEMA_FILE.read_text(encoding="utf-8")) == json.loads(json.dumps(schema()))


@given(configs)
def test_what_is_saved_follows_the_schema(config: SwapConfig) -> None:
    validate(json.loads(dumps(config)))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"version": 2},
        {"version": 1, "rank": 0},
        {"version": 1, "rnak": 8},
        {"version": 1, "table": [{"batch": 1, "context": 2, "settings": {"checksum": False}}]},
    ],
)
def test_the_schema_refuses_what_the_class_refuses(fields: dict[str, Any]) -> None:
    import fastjsonschema

    with pytest.raises(fastjsonschema.JsonSchemaException):
        validate(fields)


def test_solvable_names_are_fields() -> None:
    assert set(SOLVABLE) < {item.name for item in dataclasses.fields(SwapConfig)}
    assert not {"model", "table", "version", "source"} & set(SOLVABLE)


_validators: list[Any] = []


def validate(fields: dict[str, Any]) -> None:
    import fastjsonschema

    if not _validators:
        _validators.append(fastjsonschema.compile(json.loads(SCHEMA_FILE.read_text())))
    _validators[0](fields)
