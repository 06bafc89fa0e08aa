"""`kvswap verify --store`: every saved cache of a folder, damaged ones named and moved aside."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvswap_torch import ConfigError, CorruptionError, KVSwapCache, KVSwapError
from kvswap_torch.cli.app import app
from kvswap_torch.errors import StorageError
from kvswap_torch.saved_scrub import check, check_all, read_whole
from tests.python.faulty_kernel import faulty_kernel
from tests.python.saved_conversation import filled
from tests.python.tiny_models import has_native, tiny_model

pytestmark = [
    pytest.mark.skipif(not has_native(), reason="kvswap_torch._C is not built"),
    pytest.mark.usefixtures("one_thread"),
]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Of four: a and d are whole, of b a record is damaged, of c the state."""
    store = tmp_path / "store"
    store.mkdir()
    cache, _ = filled(tiny_model("llama"), tmp_path)
    with cache:
        cache.save(store / "a.kvswap")
    for name, file in (("b", "records.bin"), ("c", "state.safetensors"), ("d", None)):
        shutil.copytree(store / "a.kvswap", store / f"{name}.kvswap")
        if file is not None:
            content = bytearray((store / f"{name}.kvswap" / file).read_bytes())
            content[-4000 if file == "records.bin" else -40] ^= 4
            (store / f"{name}.kvswap" / file).write_bytes(content)
    (store / ".left").mkdir()
    (store / "notes.txt").write_text("no folder")
    return store


def kvswap(*words: Any) -> tuple[Any, BaseException | None]:
    done = CliRunner().invoke(app, [str(word) for word in words])
    return done, done.exception


def test_damaged_ones_are_named(store: Path) -> None:
    found = {each.path.name: each for each in check_all(store)}
    assert {name: each.failure for name, each in found.items()} == {
        "a.kvswap": None, "b.kvswap": "damage", "c.kvswap": "damage", "d.kvswap": None,
    }  # fmt: skip
    assert found["a.kvswap"].tokens == 51 and "records.bin" in found["b.kvswap"].error
    assert sorted(each.name for each in store.iterdir()) == [
        ".left", "a.kvswap", "b.kvswap", "c.kvswap", "d.kvswap", "notes.txt",
    ]  # fmt: skip


def test_the_command_moves_them_aside_once(store: Path) -> None:
    done, error = kvswap("verify", "--store", store)
    assert isinstance(error, CorruptionError) and "2 of 4" in str(error)
    assert "b.kvswap, c.kvswap" in str(error)
    done, error = kvswap("verify", "--store", store, "--move-damaged", "--json")
    assert isinstance(error, CorruptionError)
    told = {Path(each["path"]).name: each for each in json.loads(done.stdout)}
    assert told["b.kvswap"]["moved_to"] == str(store / "b.kvswap.damaged")
    assert told["a.kvswap"] == {
        "path": str(store / "a.kvswap"), "tokens": 51, "failure": None, "error": "",
        "moved_to": None,
    }  # fmt: skip
    done, error = kvswap("verify", "--store", store, "--move-damaged")
    assert error is None and done.stdout.count("whole") == 2
    shutil.copytree(store / "b.kvswap.damaged", store / "b.kvswap")
    assert check(store / "b.kvswap", move=True).moved_to == store / "b.kvswap.damaged-2"


def test_what_somebody_has_open_stays(store: Path) -> None:
    model = tiny_model("llama")
    with KVSwapCache.open(model, store / "b.kvswap", path=store.parent, probe=False):
        found = check(store / "b.kvswap", move=True)
    assert found.is_damaged and found.moved_to is None
    assert (store / "b.kvswap").is_dir()


def test_lack_is_told_and_moves_nothing(store: Path) -> None:
    with faulty_kernel() as faults:
        faults.arm("open", lasts=True, error=errno.EMFILE, name="state.safetensors")
        found = list(check_all(store, move=True))
        assert [each.failure for each in found] == ["passing"] * 4
    assert all(each.moved_to is None for each in found)
    (saved := store / "a.kvswap" / "manifest.json").write_text(
        json.dumps(json.loads(saved.read_text()) | {"kvswap_cache": 6})
    )
    assert check(store / "a.kvswap", move=True).failure == "permanent"
    with pytest.raises(ConfigError, match="version 5 or lower"):
        read_whole(store / "a.kvswap")


def test_bad_calls_have_their_sentence(store: Path) -> None:
    for words in (
        (),
        (store / "a.kvswap", "--store", store),
        (store / "a.kvswap", "--move-damaged"),
    ):
        done, _ = kvswap("verify", *words)
        assert done.exit_code == 2 and "name one saved cache" in done.output
    with pytest.raises(StorageError, match="must be a folder"):
        list(check_all(store / "none"))
    _, error = kvswap("verify", "--store", store / "none")
    assert isinstance(error, KVSwapError)
