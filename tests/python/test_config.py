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
from kvswap_torch.config import (
    ARKV,
    H2O,
    PATHS,
    POLICIES,
    SOLVABLE,
    Audit,
    Clusters,
    Memory,
    Prefetch,
    Retention,
    Selection,
    SnapKV,
    Storage,
    Summary,
    settings_page,
)
from kvswap_torch.config.json_file import dumps
from kvswap_torch.config.json_schema import schema
from kvswap_torch.config.nested import BLOCKS, OPTIONAL, difference, settings_of
from tests.python import config_files

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
        batch, context, {"summary.rank": rank, "selection.group_tokens": tokens}
    ),
    st.integers(1, 64), st.integers(1, 1 << 20), ranks, st.integers(1, 64),
)  # fmt: skip
configs = st.builds(
    SwapConfig,
    summary=st.builds(
        Summary,
        rank=ranks,
        dtype=st.sampled_from(["auto", "int8", "int4"]),
        projection_file=st.none() | names,
    ),
    selection=st.builds(
        Selection,
        group_tokens=st.integers(1, 64),
        top_k_groups=st.integers(1, 200),
        sink_tokens=st.integers(0, 64),
    ),
    prefetch=st.builds(Prefetch, mode=st.sampled_from(["off", "trust", "verify"])),
    memory=st.builds(
        Memory,
        pages_per_layer=st.integers(200, 4000),
        replacement=st.sampled_from(
            ["fifo", "lru", "last_step_only", "no_reuse", "least_attended"]
        ),
    ),
    storage=st.builds(
        Storage,
        simulated_device=st.sampled_from([None, "nvme", "ufs", "emmc"]),
        max_disk_bytes=st.none() | st.integers(1, 2**63 - 1),
    ),
    retention=st.none()
    | st.builds(SnapKV, tokens=st.integers(1, 99))
    | st.builds(ARKV, low_watermark=st.floats(0, 1), tokens=st.integers(64, 99)),
    audit=st.none() | st.builds(Audit, interval=st.integers(1, 99)),
    model=st.none() | st.builds(ModelIdentity, layers=st.none() | st.integers(1, 200)),
    provenance=st.dictionaries(st.text(), json_values, max_size=4),
    solutions=st.lists(solutions, max_size=4, unique_by=lambda row: (row.batch, row.context)),
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
    assert SwapConfig.load(path) == config.save(path, full=True)
    assert [name.name for name in path.parent.iterdir()] == ["config.json"]


def test_defaults_are_the_documented_ones() -> None:
    config = SwapConfig()
    assert (config.selection.group_tokens, config.summary.rank) == (4, 32)
    assert (config.selection.top_k_groups, config.memory.pages_per_layer) == (100, 200)
    assert (config.selection.sink_tokens, config.selection.recent_tokens) == (4, 32)
    assert (config.memory.replacement, config.prefetch.mode) == ("fifo", "verify")
    assert config.selection.score == "mass_sum"
    assert (config.retention, config.clusters, config.audit) == (None, None, None)
    for item in dataclasses.fields(SwapConfig):
        assert item.name == "source" or f"\n{item.name} : " in SwapConfig.__doc__
    for kind in {*BLOCKS.values(), *POLICIES.values()} - {Retention}:
        for item in dataclasses.fields(kind):
            assert f"\n{item.name} : " in kind.__doc__


def test_a_file_has_what_differs_from_the_defaults() -> None:
    assert json.loads(dumps(SwapConfig())) == {"version": 2}
    config = SwapConfig(summary=Summary(rank=8), retention=SnapKV(), audit=Audit())
    assert json.loads(dumps(config)) == {
        "version": 2,
        "summary": {"rank": 8},
        "retention": {"policy": "snapkv"},
        "audit": {},
    }
    whole = json.loads(dumps(config, full=True))
    assert whole["clusters"] is None and whole["selection"]["group_tokens"] == 4
    paths = {f"{block}.{field}" for block in BLOCKS for field in whole[block] or ()}
    assert {path for path in PATHS if not path.startswith(("retention.", "clusters."))} < paths


def test_policies_that_share_a_field_have_one_rule_for_it() -> None:
    """Which the C++ struct's one field of that name relies on."""
    seen: dict[str, Any] = {}
    for kind in POLICIES.values():
        for item in dataclasses.fields(kind):
            told = (item.default, item.metadata["schema"], item.metadata["doc"])
            assert seen.setdefault(item.name, told) == told, item.name


def test_a_page_for_each_query() -> None:
    few = {"selection": {"top_k_groups": 4}}
    with pytest.raises(ConfigError, match="^memory.pages_per_layer: must be at least selection.m"):
        SwapConfig(**few, memory={"pages_per_layer": 7})
    assert SwapConfig(**few, memory={"pages_per_layer": 8}).memory == Memory(8)


def test_a_config_is_frozen_hashable_and_travels() -> None:
    config = SwapConfig(
        summary={"rank": [8, 48]},
        model={"layers": 2},
        solutions=[Solution(1, 2, {"summary.rank": [4, 4]})],
    )
    assert config.summary.rank == (8, 48)
    assert config.model == ModelIdentity(layers=2)
    assert len({config, SwapConfig(), dataclasses.replace(config)}) == 2
    assert pickle.loads(pickle.dumps(config)) == config
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.summary = Summary()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.summary.rank = 3


@pytest.mark.parametrize(
    ("path", "value"),
    [
        *(("selection.group_tokens", value) for value in (0, 65, 4.0, True)),
        *(("summary.rank", value) for value in (0, (), (8, 0), "32", (True,), 1 << 17)),
        ("summary.dtype", "int3"), ("summary.dtype", None), ("selection.top_k_groups", 0),
        ("memory.pages_per_layer", 99), ("selection.sink_tokens", -1),
        ("selection.recent_tokens", -1), ("memory.replacement", "random"),
        ("memory.replacement", ["fifo"]), ("selection.max_step_tokens", 17),
        ("prefetch.mode", True), ("storage.layout", "clusters"), ("storage.io_backend", "aio"),
        ("storage.io_mode", "mmap"), ("storage.queue_depth", 0),
        ("storage.coalesce_gap_bytes", -1), ("storage.max_read_bytes", 8192),
        ("storage.max_read_bytes", 4095), ("storage.verify_checksums", None),
        ("storage.simulated_device", "tape"), ("storage.max_disk_bytes", 0),
        *(("summary.projection_file", value) for value in ("", "/a", "../a", 3)),
        ("summary.projection", "pca"), ("audit.interval", 0), ("clusters.max_tokens", 3),
    ],
)  # fmt: skip
def test_what_is_out_of_range_is_refused_by_its_path(path: str, value: Any) -> None:
    block, field = path.split(".")
    for make in (
        lambda: SwapConfig(**{block: {field: value}}),
        lambda: SwapConfig().with_settings({path: value}),
    ):
        with pytest.raises(ConfigError, match=rf"^{path}: .*must") as caught:
            make()
        assert isinstance(caught.value, ValueError) and isinstance(caught.value, KVSwapError)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("summary", 3), ("summary", None), ("retention", {}), ("retention", 3), ("clusters", True),
        ("model", 3), ("model", {"wheels": 4}), ("model", {"layers": 0}),
        ("model", {"layers": "5"}),
        ("provenance", None), ("provenance", {"x": float("nan")}), ("provenance", {"x": object()}),
        ("solutions", "none"), ("solutions", [{"batch": 1}]), ("version", 0), ("version", 1),
        ("version", True), ("version", 2.0),
    ],
)  # fmt: skip
def test_what_is_no_field_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^{field}(\.\w+)?: .*(must|reads)"):
        SwapConfig(**{field: value})


def test_settings_are_changed_by_their_paths() -> None:
    config = SwapConfig(retention=SnapKV(tokens=9, window_size=8))
    assert config.with_settings({}) == config
    assert config.with_settings({"retention.tokens": 7}).retention == SnapKV(7, 8)
    assert config.with_settings({"retention": None}).retention is None
    assert config.with_settings({"retention.policy": "snapkv"}) == config
    # Another policy begins with its own defaults.
    assert config.with_settings({"retention.policy": "h2o"}).retention == H2O()
    made = config.with_settings({"retention.tokens": 64, "retention.policy": "arkv"})
    assert made.retention == ARKV(tokens=64)
    assert config.with_settings({"retention": ARKV(), "retention.tokens": 64}) == made
    assert config.with_settings({"audit.interval": 3}).audit == Audit(3)
    grouped = {"retention": None, "clusters": {}, "summary.kind": "centroid"}
    assert config.with_settings(grouped).clusters == Clusters()
    with pytest.raises(ConfigError, match="^retention.tokens: must come with retention.policy"):
        SwapConfig().with_settings({"retention.tokens": 7})
    with pytest.raises(ConfigError, match=r"only of arkv\), got 0.5"):
        config.with_settings({"retention.low_watermark": 0.5})
    with pytest.raises(ConfigError, match=r"did you mean selection.top_k_groups\?"):
        config.with_settings({"selection.top_k": 7})
    assert difference(config, made) == {
        "retention.policy": "arkv",
        "retention.tokens": 64,
    }


def test_the_default_score_follows_the_summary() -> None:
    """A score by attention mass needs every token's logit, which other summaries do not have."""
    kinds = {kind: SwapConfig(summary={"kind": kind}) for kind in ("min_max", "mean", "user")}
    assert {config.selection.score for config in kinds.values()} == {"logit_sum"}
    config = kinds["mean"].with_settings({"summary.kind": "low_rank"})
    assert config == SwapConfig()
    with pytest.raises(ConfigError, match="^selection.score: must be left out where summary.kind"):
        SwapConfig(summary={"kind": "mean"}, selection={"score": "mass_sum"})


@pytest.mark.parametrize(
    "rows",
    [
        [Solution(1, 8), Solution(1, 8)],
        [Solution(1, 8, {"storage.verify_checksums": False})],
        [Solution(1, 8, {"memory.pages_per_layer": 10})],
        [{"batch": 1, "context": 8, "settings": {"summary.rank": 0}}],
        [{"batch": 0, "context": 8, "settings": {}}],
        [{"batch": 1, "context": 8, "settings": []}],
    ],
)
def test_a_bad_table_is_refused(rows: list[Any]) -> None:
    with pytest.raises(ConfigError, match="^solutions: "):
        SwapConfig(solutions=rows)


def test_the_exact_or_nearest_pair_is_taken() -> None:
    rows = [
        Solution(1, 8192, {"summary.rank": 8}),
        Solution(1, 32768, {"summary.rank": 16}),
        Solution(8, 32768, {"summary.rank": 24, "memory.pages_per_layer": 400}),
    ]
    config = SwapConfig(solutions=rows, selection={"group_tokens": 2})
    assert config.for_batch_and_context(1, 8192).summary.rank == 8
    chosen = config.for_batch_and_context(7, 40000)
    assert (chosen.summary.rank, chosen.memory, chosen.selection.group_tokens) == (
        24, Memory(400), 2,
    )  # fmt: skip
    assert chosen.solutions == () and chosen.for_batch_and_context(1, 1) is chosen
    # Halfway between 8K and 32K: the longer.
    assert config.for_batch_and_context(1, 16384).summary.rank == 16
    assert SwapConfig().for_batch_and_context(3, 5) == SwapConfig()
    with pytest.raises(ConfigError, match="must be positive"):
        config.for_batch_and_context(0, 8)


@given(st.lists(solutions, min_size=1, unique_by=lambda row: (row.batch, row.context)))
def test_an_exact_pair_always_wins(rows: list[Solution]) -> None:
    config = SwapConfig(solutions=rows)
    for row in rows:
        chosen = config.for_batch_and_context(row.batch, row.context)
        assert {path: settings_of(chosen)[path] for path, _ in row.settings} == dict(row.settings)


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
    assert SwapConfig(summary=Summary(rank=8)).ranks(3) == (8, 8, 8)
    assert SwapConfig(summary=Summary(rank=(8, 4))).ranks(2) == (8, 4)
    with pytest.raises(ConfigError, match=r"^summary.rank: must be one number or 3"):
        SwapConfig(summary=Summary(rank=(8, 4))).check_model(ModelIdentity(layers=3))
    with pytest.raises(ConfigError, match=r"^summary.rank: must be an int from 1 to 16"):
        SwapConfig().check_model(ModelIdentity(kv_heads=1, head_dim=16))
    with pytest.raises(ConfigError, match=r"^summary.rank: must be an int from 1 to 16"):
        SwapConfig({"rank": 8}, solutions=[Solution(1, 8, {"summary.rank": 17})]).check_model(
            ModelIdentity(kv_heads=1, head_dim=16)
        )


def test_the_projection_lies_beside_the_config(tmp_path: Path) -> None:
    config = SwapConfig(summary={"projection_file": "projection.safetensors"})
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
        ("{}", "version must be 1 or 2"),
        ('{"version": 3, "new_field": 1}', "version must be 1 or 2"),
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
    SwapConfig({"rank": 8}).save(path)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ConfigError, match="No space left"):
        SwapConfig({"rank": 16}).save(path)
    assert SwapConfig.load(path).summary.rank == 8
    assert [entry.name for entry in tmp_path.iterdir()] == ["c.json"]


def test_the_checked_in_schema_is_the_current_one() -> None:
    assert json.loads(SCHEMA_FILE.read_text(encoding="utf-8")) == json.loads(json.dumps(schema()))


def test_the_checked_in_page_is_the_current_one() -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "settings.md"
    assert page.read_text(encoding="utf-8") == settings_page.page(), "run: make schema"


@given(configs)
def test_what_is_saved_follows_the_schema(config: SwapConfig) -> None:
    for full in (False, True):
        validate(json.loads(dumps(config, full)))


@pytest.mark.parametrize("fields", config_files.GOOD_BLOCKS)
def test_good_files_follow_the_schema(fields: dict[str, Any]) -> None:
    validate({"version": 2, **fields})


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"version": 1},
        {"version": 2, "summary": {"rank": 0}},
        {"version": 2, "summary": {"rnak": 8}},
        {"version": 2, "rank": 8},
        {"version": 2, "retention": {"tokens": 8}},
        {"version": 2, "retention": {"policy": "snapkv", "low_watermark": 0.5}},
        {"version": 2, "clusters": 3},
        {
            "version": 2,
            "solutions": [
                {"batch": 1, "context": 2, "settings": {"storage.verify_checksums": False}}
            ],
        },
    ],
)
def test_the_schema_refuses_what_the_class_refuses(fields: dict[str, Any]) -> None:
    import fastjsonschema

    with pytest.raises(fastjsonschema.JsonSchemaException):
        validate(fields)


def test_solvable_names_are_fields() -> None:
    assert set(SOLVABLE) < {*PATHS, *OPTIONAL} and not {"selection.heads", "model"} & set(SOLVABLE)


_validators: list[Any] = []


def validate(fields: dict[str, Any]) -> None:
    import fastjsonschema

    if not _validators:
        _validators.append(fastjsonschema.compile(json.loads(SCHEMA_FILE.read_text())))
    _validators[0](fields)
