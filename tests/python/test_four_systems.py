"""The four systems in every respect: the table of docs/presets.md, cell by cell.

Records, the device's path and caches without a path are run here. What a cell of generate, save,
fork and serve says is held by test_presets_generate.py and test_presets_kept.py, which run each
preset; of tuning by test_tuning_presets.py; of several processes by test_parallel.py.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from kvswap_torch import KVSwapCache
from kvswap_torch.hf import session as session_module
from kvswap_torch.preset.grid import GRIDS, NO_GRIDS
from tests.python import parallel_worker
from tests.python.test_presets_generate import NAMES, small
from tests.python.test_presets_kept import RETAINING
from tests.python.tiny_models import (
    greedy,
    has_native,
    host_device_options,
    prompt,
    tiny_model,
)

pytestmark = [
    pytest.mark.skipif(not has_native(), reason="kvswap_torch._C is not built"),
    pytest.mark.usefixtures("one_thread"),
]
SYSTEMS = {
    "KVSwap": ("kvswap", "kvswap-paper"),
    "DynaKV": ("dynakv",),
    "ARKV": ("arkv", "arkv-origin", "arkv-quant"),
    "ARKV, read back": ("arkv-recall",),
    "PRKV": ("prkv", "prkv-auto"),
}
RECORDS = {"records in e4m3": "fp8", "records of four bits": "int4"}
REFUSED = {
    ("DynaKV", "records of four bits"): "clusters are packed anew, and four bits would round each",
    ("DynaKV", "on a device"): "clusters must be left out where pages are a device's",
}
ALL = [(system, name) for system, names in SYSTEMS.items() for name in names]


def table() -> dict[str, dict[str, str]]:
    """Of the page: respect -> system -> cell."""
    page = (Path(__file__).parents[2] / "docs" / "presets.md").read_text(encoding="utf-8")
    rows = page.split("## The four systems")[1].split("\n## ")[0]
    lines = re.findall(r"^\|(.*)\|$", rows, re.MULTILINE)
    head, _, *body = ([cell.strip() for cell in line.split("|")] for line in lines)
    assert head[1:] == list(SYSTEMS)
    return {row[0]: dict(zip(SYSTEMS, row[1:], strict=True)) for row in body}


def yes(respect: str, system: str) -> bool:
    return table()[respect][system].startswith("yes")


def decoded(name: str, tmp_path: Path, **changes) -> tuple[torch.Tensor, int]:
    """Tokens of a model whose heads are wide enough for any records, and bytes written."""
    model = tiny_model("llama", head_dim=64)
    config = small(name, model, 4, group_tokens=8, **changes)
    with KVSwapCache(model, tmp_path, config) as cache:
        out = greedy(model, prompt(2, 120, padding=(0, 7)), cache)
        return out, cache.stats().bytes_written


def test_every_cell_says_yes_or_why_not() -> None:
    rows = table()
    for respect in (*RECORDS, "on a device", "tuned", "several processes", "without a path"):
        assert respect in rows
    for respect, cells in rows.items():
        for system, cell in cells.items():
            assert cell.startswith(("yes", "no: ", "by `--config`: ")), (respect, system)
    for system, names in SYSTEMS.items():
        assert set(names) <= set(NAMES)
        for respect in ("generate()", "batches, left padding, beams", "saved", "forked"):
            assert rows[respect][system] == "yes"
        served = "by `--config`: " if system == "ARKV" else "yes"
        assert rows["served"][system].startswith(served)


@pytest.mark.parametrize(("system", "name"), ALL)
@pytest.mark.parametrize("respect", RECORDS)
def test_records(system: str, name: str, respect: str, tmp_path: Path) -> None:
    records = RECORDS[respect]
    if (system, respect) in REFUSED:
        assert not yes(respect, system)
        with pytest.raises(ValueError, match=REFUSED[system, respect]):
            decoded(name, tmp_path, records=records)
        return
    assert yes(respect, system)
    told, written = decoded(name, tmp_path, records=records)
    assert told.shape == (2, 132)
    assert 0 < written < 0.5 * decoded(name, tmp_path)[1], "of fp32"


@pytest.mark.parametrize(("system", "name"), ALL)
@pytest.mark.parametrize("records", ["model", *RECORDS.values()])
def test_on_a_device(
    system: str, name: str, records: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device path over CPU tensors has the host's tokens."""
    refused = (system, "on a device") in REFUSED
    assert yes("on a device", system) is not refused
    if refused and records == "int4":
        return  # of clusters
    host, _ = decoded(name, tmp_path, records=records)
    monkeypatch.setattr(session_module, "cache_options", host_device_options)
    if refused:
        with pytest.raises(ValueError, match=REFUSED[system, "on a device"]):
            decoded(name, tmp_path, records=records)
    else:
        assert torch.equal(decoded(name, tmp_path, records=records)[0], host)


@pytest.mark.parametrize(("system", "name"), ALL)
def test_tuned_and_by_several_processes(system: str, name: str) -> None:
    assert yes("tuned", system) and yes("several processes", system)
    tuned = name in GRIDS or re.search(r"kvswap tune|search|has a share", NO_GRIDS[name])
    assert tuned, "by its own grid, or by another's that it is a part of"
    first = SYSTEMS[system][0]
    assert name in parallel_worker.SYSTEMS
    assert first in GRIDS or system == "KVSwap"


@pytest.mark.parametrize(("system", "name"), ALL)
def test_without_a_path(system: str, name: str) -> None:
    model = tiny_model("llama")
    config = small(name, model, 4)
    if yes("without a path", system):
        assert name in RETAINING
        with KVSwapCache(model, config=config) as cache:
            assert greedy(model, prompt(1, 60), cache).shape == (1, 72)
        return
    with pytest.raises(ValueError, match="path: must be given where every token is kept"):
        KVSwapCache(model, config=config)
