"""Manifests and states that were changed and signed again: our errors alone, from open to save."""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from kvswap_torch import CorruptionError, KVSwapCache, KVSwapError
from kvswap_torch.cli.app import app
from kvswap_torch.config import PATHS
from tests.python.saved_conversation import filled, goes_on
from tests.python.saved_manifest import copied, put_state, resigned, signed
from tests.python.tiny_models import TIGHT, has_native, tiny_model

pytestmark = [
    pytest.mark.skipif(not has_native(), reason="kvswap_torch._C is not built"),
    pytest.mark.usefixtures("one_thread"),
]
FAMILIES = ("llama", "gemma3")
MUTATIONS = int(os.environ.get("KVSWAP_TEST_MUTATIONS", "120"))
VALUES = (0, 1, -1, 7, 2**31, 2**53, 2**63, 1.5, None, True, "", "x", [], {}, [1], "a" * 5000)
DELETED = object()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple]:
    """Of each family: model, folder, ids and how it goes on."""
    made = {}
    for family in FAMILIES:
        folder = tmp_path_factory.mktemp(family)
        model = tiny_model(family)
        cache, out = filled(model, folder, TIGHT)
        with cache:
            cache.save(folder / "a")
            made[family] = (model, folder / "a", out, goes_on(model, cache, out, tokens=4))
    return made


def leaves(value: Any, at: tuple = ()) -> Iterator[tuple]:
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    for key, each in inner:
        yield (*at, key)
        if isinstance(each, dict | list):
            yield from leaves(each, (*at, key))


def put(value: Any, at: tuple, new: Any) -> None:
    for key in at[:-1]:
        value = value[key]
    if new is DELETED:
        del value[at[-1]]
    else:
        value[at[-1]] = new


def used(model: Any, saved: Path, out: torch.Tensor, probe: bool) -> list | str:
    """Opened, decoded, saved and cropped; the tokens, or what of ours was raised."""
    try:
        with KVSwapCache.open(model, saved, path=saved.parent, probe=probe) as cache:
            tokens = goes_on(model, cache, out, tokens=4)
            cache.save(saved.parent / "again")
            cache.stats()
            return tokens
    except KVSwapError as error:
        return type(error).__name__
    finally:
        shutil.rmtree(saved.parent / "again", ignore_errors=True)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", FAMILIES)
def test_each_fact_that_is_lost_or_another_is_our_error(
    family: str, whole: dict, tmp_path: Path
) -> None:
    """Every field of `facts` in turn, but digests, whose names are many."""
    model, saved, out, expected = whole[family]
    manifest = json.loads((saved / "manifest.json").read_text())
    places = [at for at in leaves(manifest["facts"]) if at[:2] != ("weights", "tensors")]
    places.append(("weights", "tensors"))
    chosen = random.Random(1)
    for at in places:
        for new in (DELETED, *chosen.sample(VALUES, 2)):
            changed = copy.deepcopy(manifest)
            put(changed["facts"], at, new)
            target = copied(saved, tmp_path / "a")
            (target / "manifest.json").write_bytes(signed(changed))
            got = used(model, target, out, probe=False)
            assert isinstance(got, str) or got == expected, (at, new, got)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", range(2))
def test_mutated_manifests_and_states_are_our_errors(
    seed: int, whole: dict, tmp_path: Path
) -> None:
    """Signed again; no other exception, and no crash."""
    chosen = random.Random(seed)
    kinds: dict[str, int] = {}
    for number in range(MUTATIONS):
        model, saved, out, _ = whole[FAMILIES[number % 2]]
        target = copied(saved, tmp_path / "a")
        how = chosen.choice(("manifest", "bytes", "shape", "drop"))
        if how == "manifest":
            with resigned(target) as manifest:
                at = chosen.choice([at for at in leaves(manifest) if at[0] != "checksum"])
                put(manifest, at, chosen.choice((*VALUES, DELETED)))
        else:
            state = (saved / "state.safetensors").read_bytes()
            put_state(target, mutated(state, how, chosen))
        got = used(model, target, out, probe=bool(number % 3))
        kinds[got if isinstance(got, str) else "tokens"] = 1
    assert "CorruptionError" in kinds


def mutated(state: bytes, how: str, chosen: random.Random) -> bytes:
    """One tensor's bytes, shape or place in a safetensors file."""
    length = struct.unpack("<Q", state[:8])[0]
    header, data = json.loads(state[8 : 8 + length]), bytearray(state[8 + length :])
    name = chosen.choice(sorted(header))
    begin, end = header[name]["data_offsets"]
    if how == "bytes":
        place = chosen.randrange(begin, end)
        data[place : place + 4] = chosen.choice((b"\xff" * 4, b"\0" * 4, b"\x01\0\0\0"))
        data = data[: len(state) - 8 - length]
    elif how == "shape":
        header[name]["shape"] = [1, *header[name]["shape"][::-1]]
    else:
        del header[name], data[begin:end]
        for each in header.values():
            if each["data_offsets"][0] >= end:
                each["data_offsets"] = [at - (end - begin) for at in each["data_offsets"]]
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(data)


def without(saved: Path, *names: str) -> None:
    """Signed again, without these tensors."""
    state = (saved / "state.safetensors").read_bytes()
    length = struct.unpack("<Q", state[:8])[0]
    header, data = json.loads(state[8 : 8 + length]), state[8 + length :]
    kept, offset, pieces = {}, 0, []
    for name, entry in sorted(header.items(), key=lambda each: each[1]["data_offsets"]):
        if name in names:
            continue
        begin, end = entry["data_offsets"]
        kept[name] = entry | {"data_offsets": [offset, offset + end - begin]}
        offset += end - begin
        pieces.append(data[begin:end])
    text = json.dumps(kept).encode()
    put_state(saved, struct.pack("<Q", len(text)) + text + b"".join(pieces))


@pytest.mark.parametrize("lost", [("key",), ("query",), ("key", "query")])
def test_a_layer_without_its_projections_is_refused(
    lost: tuple, whole: dict, tmp_path: Path
) -> None:
    """It would choose nothing, and answer otherwise."""
    model, saved, _, _ = whole["llama"]
    target = copied(saved, tmp_path / "a")
    without(target, *(f"layers.1.projection.{each}" for each in lost))
    with pytest.raises(CorruptionError, match=f"layers.1.projection.{lost[0]} must be there"):
        KVSwapCache.open(model, target, path=tmp_path)


def test_the_command_line_says_what_is_damaged(whole: dict, tmp_path: Path) -> None:
    _, saved, _, _ = whole["llama"]
    for name, value in (("model", []), ("name", 3), ("layers", None)):
        target = copied(saved, tmp_path / "a")
        with resigned(target) as manifest:
            manifest["facts"][name] = value
        for words in (["show", str(target)], ["ask", str(target), "--question", "Who?"]):
            raised = CliRunner().invoke(app, words).exception
            assert isinstance(raised, CorruptionError) and f"facts.{name}" in str(raised)


def test_settings_are_those_that_python_knows(whole: dict, tmp_path: Path) -> None:
    """But the name of a file that is not read any more."""
    model, saved, out, _ = whole["llama"]
    taken = []
    for path in PATHS:
        block, field = path.split(".")
        target = copied(saved, tmp_path / "a")
        with resigned(target) as manifest:
            settings = manifest["settings"]
            settings[block] = {**(settings[block] or {}), field: "no such thing"}
        if isinstance(used(model, target, out, probe=False), list):
            taken.append(path)
    assert taken in ([], ["summary.projection_file"])
