"""Files from outside, mutated: Python and C++ take the same ones, and refuse the others in words.

KVSWAP_TEST_MUTATIONS says how many of each kind; `make fuzz` tries a hundred times as many.
"""

from __future__ import annotations

import json
import os
import random
import struct
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from kvswap_torch import ConfigError, SwapConfig
from kvswap_torch.config import ModelIdentity
from kvswap_torch.memory_size import parse_bytes
from kvswap_torch.projection_file import load_projections, save_projections
from tests.python import config_files
from tests.python.test_config_cpp import ask, plain

MUTATIONS = int(os.environ.get("KVSWAP_TEST_MUTATIONS", "400"))
SEED = int(os.environ.get("KVSWAP_TEST_SEED", "1"))
CORPUS = Path(__file__).parents[1] / "cpp" / "fuzz" / "corpus"
IDENTITY = ModelIdentity("qwen3", 2, 2, 1, 4, "float32")
SHAPE = {"layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 4,
         "dtype": "float32", "model_type": "qwen3"}  # fmt: skip
RANKS = [2, 1]
WORDS = (b"null", b"true", b"-0", b"1e999", b"18446744073709551616", b"\xff", b"\x00", b"\\ud800",
         b'"', b"[", b"{", b"}", b"]", b",", b":", b"1.0", b"9223372036854775807", b"NaN", b" ",
         b"\xef\xbb\xbf", b"data_offsets", b"shape", b"-1", b"0x1", b"\\u0000", b"'")  # fmt: skip


def mutated(corpus: list[bytes], chooser: random.Random, head: int = 1 << 30) -> bytes:
    """A file of the corpus with a few bytes changed, moved or joined with another's."""
    data = bytearray(chooser.choice(corpus))
    for _ in range(chooser.randint(1, 4)):
        at = chooser.randrange(min(len(data), head) + 1)
        kind = chooser.randrange(6)
        if kind == 0 and at < len(data):
            data[at] ^= 1 << chooser.randrange(8)
        elif kind == 1:
            data[at:at] = chooser.choice(WORDS)
        elif kind == 2:
            del data[at : at + chooser.randint(1, 12)]
        elif kind == 3:
            piece = data[at : at + chooser.randint(1, 40)]
            data[at:at] = piece
        elif kind == 4 and at < len(data):
            data[at : at + 1] = str(chooser.choice((0, 1, 2, 7, 64, -1, 2**31, 2**63))).encode()
        else:
            other = chooser.choice(corpus)
            data[at:] = (
                other[chooser.randrange(len(other) + 1) :] if chooser.random() < 0.3 else b""
            )
    return bytes(data)


def written(folder: Path, files: Iterable[bytes]) -> list[Path]:
    paths = []
    for number, data in enumerate(files):
        paths.append(folder / f"{number}.file")
        paths[-1].write_bytes(data)
    return paths


def test_mutated_configs_get_one_verdict(tmp_path: Path) -> None:
    chooser = random.Random(SEED)
    corpus = [file.read_bytes() for file in sorted((CORPUS / "config").iterdir())]
    corpus += [json.dumps({"version": 1, **fields}).encode() for fields in config_files.GOOD]
    corpus += [text.encode() for text, _ in config_files.BAD]
    paths = written(tmp_path, corpus + [mutated(corpus, chooser) for _ in range(MUTATIONS)])
    answers = ask(*({"do": "load", "path": str(path)} for path in paths))
    differ, taken = [], 0
    for path, answer in zip(paths, answers, strict=True):
        try:
            ours: object = plain(SwapConfig.load(path))
            taken += 1
        except ConfigError as error:
            ours = error
        theirs = answer["ok"]["settings"] if "ok" in answer else answer
        agree = (
            answer.get("refused") == "config" if isinstance(ours, ConfigError) else ours == theirs
        )
        if not agree:
            differ.append((path.read_bytes(), ours, theirs))
    assert not differ, (len(differ), *differ[:5])
    assert taken > 10


def projection_corpus(folder: Path) -> list[bytes]:
    """Small files, good and bad in one way each."""
    pairs = [(torch.randn(4, 2), torch.randn(4, 2)) for _ in RANKS]
    path = folder / "good.st"
    save_projections(path, pairs, kind="query_aware", model=IDENTITY)
    good = path.read_bytes()
    length = struct.unpack("<Q", good[:8])[0]
    header = json.loads(good[8 : 8 + length])
    files = [good]
    for change in ("hole", "shared", "late", "odd", "twice", "long"):
        changed = json.loads(json.dumps(header))
        names = sorted(name for name in changed if name != "__metadata__")
        first, last = changed[names[0]], changed[names[-1]]
        data = good[8 + length :]
        if change == "hole":
            data += b"\0" * 8
        if change == "shared":
            last["data_offsets"] = first["data_offsets"]
        if change == "late":
            last["data_offsets"] = [offset + 4 for offset in last["data_offsets"]]
        if change == "odd":
            first["dtype"] = "F16"
        if change == "long":
            first["shape"] = [2**40, 2**40]
        text = json.dumps(changed).encode()
        if change == "twice":
            text = text[:-1] + b"," + text[1:]
        files.append(struct.pack("<Q", len(text)) + text + data)
    return files + [file.read_bytes() for file in sorted((CORPUS / "projection").iterdir())]


def test_mutated_projections_get_one_verdict(tmp_path: Path) -> None:
    chooser = random.Random(SEED)
    torch.manual_seed(SEED)
    corpus = projection_corpus(tmp_path)
    heads = [8 + int.from_bytes(file[:8], "little") for file in corpus if len(file) > 200]
    mutations = [mutated(corpus, chooser, min(heads)) for _ in range(MUTATIONS)]
    for number, data in enumerate(mutations):
        if chooser.random() < 0.7 and len(data) > 8:  # a header of the length that it says
            end = data.find(b"}}", 8) + 2
            mutations[number] = struct.pack("<Q", max(end - 8, 0)) + data[8:]
    paths = written(tmp_path, corpus + mutations)
    requests = []
    for path in paths:
        config = path.with_suffix(".json")
        SwapConfig(rank=tuple(RANKS), projection_file=path.name).save(config)
        requests.append({"do": "prepare", "path": str(config), "directory": str(tmp_path), **SHAPE})
    differ, taken = [], 0
    for path, answer in zip(paths, ask(*requests), strict=True):
        try:
            load_projections(path, RANKS, 4, IDENTITY)
            verdict = "ok"
            taken += 1
        except ConfigError:
            verdict = "config"
        if verdict != ("ok" if "ok" in answer else answer["refused"]):
            differ.append((verdict, answer, path.read_bytes()))
    assert not differ, (len(differ), *differ[:5])
    assert taken > 0


def test_mutated_sizes_get_one_verdict() -> None:
    chooser = random.Random(SEED)
    corpus = [file.name.encode() for file in sorted((CORPUS / "parse_bytes").iterdir())]
    corpus += [b" 3 kib ", b".5M", b"8388607.9TiB", b"1_000", b"+5GiB", b"1.5e3MiB"]
    sizes = [mutated(corpus, chooser).decode("utf-8", "replace") for _ in range(MUTATIONS)]
    differ = []
    for size, answer in zip(sizes, ask(*({"do": "parse_bytes", "size": s} for s in sizes)),
                            strict=True):  # fmt: skip
        try:
            ours: object = {"ok": parse_bytes(size, "size")}
        except ConfigError:
            ours = "config"
        if ours != (answer if "ok" in answer else answer["refused"]):
            differ.append((size, ours, answer))
    assert not differ, (len(differ), *differ[:5])


@pytest.mark.parametrize("kind", ["pipe", "folder", "device", "long"])
def test_only_short_regular_files_are_read(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.write_bytes(b'{"version": 1, "provenance": {"a": "' + b"x" * (4 << 20) + b'"}}')
    (answer,) = ask({"do": "load", "path": str(path)})
    assert answer["refused"] == "config"
    with pytest.raises(ConfigError):
        SwapConfig.load(path)
    if kind != "long":
        with pytest.raises(ConfigError):
            load_projections(path, RANKS, 4, IDENTITY)
