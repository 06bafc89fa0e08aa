"""Messages of the C++ code call settings as a config file has them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvswap_torch.config.engine import NAMES
from kvswap_torch.config.nested import BLOCKS

CSRC = Path(__file__).parents[2] / "csrc"
# What says version 1's names by right: its reader, the tables, and arguments of functions.
ELSEWHERE = (
    "kvswap/settings_rules.h",
    "kvswap/settings.h",
    "kvswap/config_json.cpp",
    "kvswap/config_blocks.cpp",
    "engine/setting_names.cpp",
    "methods/clusters/cluster_options.cpp",
)
FOLDERS_ELSEWHERE = ("python", "torch", "kernels")
FIELDS = {path.partition(".")[2] or path for path in NAMES.values()}
# Names that are also plain words, the field's own, or a call's, are looked for as `name=`.
PLAIN = {"checksum", "grouping", "heads", "layout", "look_ahead", "rank", "reader", "records"}
PLAIN |= {"replacement", "rows", "score"}
OLD = sorted(NAMES.keys() - FIELDS - PLAIN)
LITERAL = re.compile(r'"((?:[^"\\\n]|\\.)*)"')


def _literals() -> Iterator[tuple[str, str]]:
    for file in sorted(CSRC.rglob("*")):
        place = file.relative_to(CSRC).as_posix()
        if file.suffix not in (".h", ".cpp", ".cu", ".cuh") or place in ELSEWHERE:
            continue
        if place.split("/")[0] in FOLDERS_ELSEWHERE:
            continue
        for line in file.read_text().splitlines():
            if not line.lstrip().startswith(("//", "#include")):
                for text in LITERAL.findall(line.replace('file_word("keeper"', "")):
                    yield f"{place}: {text}", text


def _wrong(text: str) -> list[str]:
    """What a message calls a setting that no config file does."""
    old = re.findall(rf"\b(?:{'|'.join(OLD)})\b", text)
    old += re.findall(rf"\b(?:{'|'.join([*PLAIN, 'keeper'])})=", text)
    blocks = "|".join(BLOCKS)
    paths = re.findall(rf"\b(?:{blocks})\.[a-z_]+\b(?!\()", text)
    return old + [path for path in paths if path not in NAMES.values()]


def test_messages_name_settings_as_config_files_do():
    wrong = [told for told, text in _literals() if _wrong(text)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "text",
    [
        "session: pages_max must be at least 4",
        "lower keep_tokens",
        "with records=fp8",
        "memory.pages must be 4",
    ],
)
def test_the_check_finds_a_name_of_version_1(text):
    assert _wrong(text)


def test_the_check_reads_messages():
    assert sum("selection.dense_layers" in text for _, text in _literals()) >= 2
