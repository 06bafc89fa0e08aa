"""What the command line refuses, before it does any work, and in one line."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvswap_torch import ConfigError
from kvswap_torch.cli import app as app_module
from kvswap_torch.cli import room
from kvswap_torch.cli.agreement import agreements
from kvswap_torch.cli.load import device_of, load_config, load_model, load_tokenizer
from kvswap_torch.errors import CorruptionError, StorageError
from kvswap_torch.machine_memory import MemoryLimit
from tests.python.test_cli import document, generate

__all__ = ["document"]  # a fixture
REFERENCE = Path(__file__).resolve().parents[2] / "examples" / "reference_model"


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (["--timeline", "/tmp"], "--timeline: must be a file, and /tmp is a folder"),
        (["--json", "/tmp"], "--json: must be a file, and /tmp is a folder"),
        (["--json", "/proc/x.json"], "--json: must be a file that can be written, got /proc/x"),
        (["--timeline", "/proc/x"], "--timeline: must be a file that can be written, got /proc/x"),
        (["--question", "a\udcff"], r"--question: must be UTF-8 text, got 'a\udcff'"),
        (
            ["--path", "/nope"],
            "--path: must be a directory on the disk to use, got /nope, which is",
        ),
        (["--path", "/dev/null"], "got /dev/null, which is not one; choose another path"),
        (["--save", "no/book"], "--save: its parent must be a folder that takes a new one, got no"),
        (["--save", "/tmp"], "--save: /tmp must not exist, and does"),
    ],
)
def test_what_is_refused_before_a_model_is_looked_for(
    document: Path, more: list[str], told: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        generate(Path("nowhere"), document, *more)
    assert told in str(caught.value)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["serve", "--store", "/tmp", "--path", "/nope"], "--path: must be a directory"),
        (["serve", "--store", "/tmp", "--device", "foo"], "--device: must be cpu or cuda"),
        (["serve", "--store", "/tmp", "--preset", "snapkv"], "--preset: must be one that drops no"),
        (["serve", "--store", "/tmp", "--preset", "quest", "--config", "x"], "--config: must be"),
        (["ingest", "a.txt", "-o", "no/book"], "--output: its parent must be a folder"),
        (["ingest", "a.txt", "-o", "/nope-book", "--path", "/nope"], "--path: must be a directory"),
        (["calibrate", "--preset", "loki", "--path", "/nope"], "--path: must be a directory"),
        (["calibrate", "--preset", "loki", "--out", "no/a.json"], "--out: its folder must exist"),
        (["fit", "--context", "8K", "--path", "/nope"], "--path: must be a directory"),
    ],
)
def test_what_other_commands_refuse_before_a_model_is_looked_for(
    words: list[str], told: str
) -> None:
    command, *rest = words
    asked = [command, *rest, "--model", "/nowhere"]
    with pytest.raises(ConfigError) as caught:
        CliRunner().invoke(app_module.app, asked, catch_exceptions=False)
    assert told in str(caught.value)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--path", "/nope"], "--path: must be a directory"),
        (["--path", "/tmp", "--out", "no/a.json"], "--out: its folder must exist"),
        (["--path", "/tmp", "--json", "no/a.json"], "--json: its folder must exist"),
        (["--path", "/tmp", "--kv-memory", "much"], "--kv-memory"),
    ],
)
def test_what_the_tuner_refuses_before_a_model_is_looked_for(
    words: list[str], told: str, capsys: Any
) -> None:
    """It reports errors itself, since it is a program of its own too."""
    asked = ["tune", "--no-report", "--kv-memory", "1MiB", *words, "--model", "/nowhere"]
    done = CliRunner().invoke(app_module.app, asked, catch_exceptions=False)
    assert done.exit_code == 1 and told in done.stderr


@pytest.mark.parametrize("load", [load_config, load_model, load_tokenizer])
@pytest.mark.parametrize("name", ["/nope", "./nope", "~/nope", "a/b/c", "", "/dev/null"])
def test_a_path_that_is_no_folder_is_no_hub_name(load: Any, name: str) -> None:
    """Not "Repo id must use alphanumeric chars", which speaks of a hub that nobody asked for."""
    what = "not a folder" if name == "/dev/null" else "not there"
    with pytest.raises(ConfigError, match=f"^--model: must be .*, got {name!r}, which is {what}$"):
        load(name)


def test_only_devices_that_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    assert device_of("cpu") == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert device_of("cuda:1") == torch.device("cuda:1")
    for name in ("mps", "foo", "meta", ""):
        with pytest.raises(ConfigError, match=f"^--device: must be cpu or cuda.* got '{name}'"):
            load_model("nowhere", device=name)
    with pytest.raises(ConfigError, match=r"--device: .* CUDA devices 0 to 1, got 'cuda:2'"):
        device_of("cuda:2")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="sees no CUDA device, got 'cuda'"):
        device_of("cuda")


def test_weights_that_were_cut_off(tiny_model_dir: Path, document: Path, tmp_path: Path) -> None:
    model = shutil.copytree(tiny_model_dir, tmp_path / "model")
    os.truncate(model / "model.safetensors", 1000)
    with pytest.raises(ConfigError, match=r"^--model: .*header"):
        generate(model, document)


def test_weights_that_do_not_fit_the_config(
    tiny_model_dir: Path, document: Path, tmp_path: Path
) -> None:
    model = shutil.copytree(tiny_model_dir, tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    config["intermediate_size"] *= 2
    (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"^--model: .*mismatched"):
        generate(model, document)


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ConfigError("[b]: must be\n  one"), "error: [b]: must be one\n"),
        (ValueError("wrong"), "error: wrong\n"),
        (OSError(2, "none", "x"), "error: [Errno 2] none: 'x'\n"),
        (StorageError("weights: closed"), "error: weights: closed\n"),
        (StorageError(2, "open: 'x' must be", "x"), "error: open: 'x' must be\n"),
        (StorageError(5, "read: failed", "x"), "error: read: failed: 'x'\n"),
        (TypeError("ours"), None),
        (AttributeError("ours"), None),
    ],
)
def test_errors_of_users_are_a_line_and_ours_are_not_hidden(
    error: Exception, told: str | None, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr(app_module, "app", fail)
    with pytest.raises(SystemExit if told else type(error)) as ended:
        app_module.main()
    if told:
        assert (ended.value.code, capsys.readouterr().err) == (1, told)


def test_presets_options_are_for_one_preset() -> None:
    for words in (["--context", "100"], ["--model", "nowhere"]):
        with pytest.raises(ConfigError, match="must be left out without a preset's name"):
            CliRunner().invoke(app_module.app, ["presets", *words], catch_exceptions=False)


@pytest.mark.parametrize("error", [CorruptionError("damaged"), StorageError(5, "no", "x")])
def test_a_comparison_does_not_hide_what_the_disk_says(error: Exception) -> None:
    class Failing:
        turns = ()

        def log_likelihoods(self, *_: Any) -> None:
            raise error

    with pytest.raises(type(error)):
        agreements(Failing(), Failing(), 1)


# The reference model: 10.5 MiB in bf16, as its file has it, of which a layer is 1.5; 4.3 in int4.
@pytest.mark.parametrize(
    ("limit", "arguments", "told"),
    [
        (1 << 20, {}, "1.50 MiB of it at once, more than the cgroup's limit, 1.00 MiB; see kvswap"),
        (2 << 20, {}, None),
        (8 << 20, {"dtype": "float16"}, "needs 10.51 MiB of it at once, .* give --weights-memory"),
        (11 << 20, {"dtype": "float16"}, None),
        (4 << 20, {"weights": "int4"}, "needs 4.32 MiB"),
        (5 << 20, {"weights": "int4"}, None),
        (8 << 20, {"weights_memory": 9 << 20}, "needs 9.00 MiB .* give less to --weights-memory"),
        (8 << 20, {"weights_memory": 16 << 20}, None),  # all of them fit: they are mapped
        (8 << 20, {"weights_memory": 7 << 20}, None),
    ],
)
def test_weights_that_cannot_be_in_memory_are_refused(
    monkeypatch: pytest.MonkeyPatch, limit: int, arguments: dict[str, Any], told: str | None
) -> None:
    monkeypatch.setattr(room, "memory_limit", lambda: MemoryLimit(limit, "the cgroup's limit", 0))
    settings: dict[str, Any] = {"dtype": "auto", "weights": None, "weights_memory": None}
    asked = (str(REFERENCE), *(settings | arguments).values(), load_config)
    if told is None:
        room.check_room(*asked)
        return
    with pytest.raises(ConfigError, match=f"--model: its weights must fit in memory, .*{told}"):
        room.check_room(*asked)


def test_room_is_looked_at_before_a_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "memory_limit", lambda: MemoryLimit(1 << 20, "RLIMIT_DATA", 0))
    with pytest.raises(ConfigError, match="more than RLIMIT_DATA, 1.00 MiB"):
        load_model(str(REFERENCE))
    # Of a model that is split over processes each has a part: transformers is asked, as ever.
    with pytest.raises(AttributeError, match="tp_size"):
        load_model(str(REFERENCE), distributed=object())


def test_swap_adds_to_ram(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = MemoryLimit(1 << 20, "this machine's RAM", 0, swap_bytes=1 << 20)
    monkeypatch.setattr(room, "memory_limit", lambda: limit)
    room.check_room(str(REFERENCE), "auto", None, None, load_config)


def test_a_small_model_is_not_looked_into(monkeypatch: pytest.MonkeyPatch) -> None:
    def unread(name: str) -> Any:
        raise AssertionError(name)

    monkeypatch.setattr(room, "memory_limit", lambda: MemoryLimit(1 << 30, "RLIMIT_DATA", 0))
    room.check_room(str(REFERENCE), "auto", None, None, unread)
