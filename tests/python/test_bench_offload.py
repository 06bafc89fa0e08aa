"""`python -m bench offload`: the same tokens by every way to read layers, and who is ahead."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bench import offload
from bench.pages.offload import offload_rows
from kvswap_torch.half_linear import HalfLinear
from tests.python.test_weights_reader import no_thread_stays
from tests.python.tiny_models import has_native

__all__ = ["no_thread_stays"]  # a fixture
pytest.importorskip("accelerate", reason="weights on disk are accelerate's")
IDS = torch.arange(40) + 7


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return offload.folder_of("tiny", len(IDS))


@pytest.mark.skipif(not has_native(), reason="kvswap_torch._C is not built")
def test_each_way_decodes_the_same_and_is_told(folder, tmp_path):
    contenders = offload.open_all(folder, IDS, tmp_path, 20)
    for pages in offload.PAGES:
        for _ in range(2):
            for each in contenders.values():
                each.take(pages, folder, 2)
    offload.check_same(contenders)
    told = offload.told_of(contenders)
    assert told["layers"] == 2 and told["layer_bytes"] > 0
    first, *ours = offload.FIRST, *offload.OURS
    for rows in told["pages"].values():
        assert list(rows) == [first, *ours]
        assert rows[first]["ratio_of_pairs"] == 1.0
        assert all(row["ms"] > 0 for row in rows.values())
    models = [contenders[name].model for name in (first, *ours)]
    assert [hasattr(model, "weights_reader") for model in models] == [False, False, True, True]
    halves = [any(isinstance(each, HalfLinear) for each in model.modules()) for model in models]
    assert halves == [False, False, False, True]
    contenders[ours[0]].tokens[-1] += 1
    with pytest.raises(RuntimeError, match="accelerate, kvswap: must decode"):
        offload.check_same(contenders)
    for each in contenders.values():
        each.close()


def test_a_shape_is_made_once_and_a_folder_is_itself(folder, tmp_path):
    made = (folder / "model.safetensors").stat().st_mtime_ns
    assert offload.folder_of("tiny", len(IDS)) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == made
    assert offload.folder_of(str(tmp_path), 1) == tmp_path


def test_no_page_of_the_files_stays_mapped(folder):
    """Such a page could not be dropped from the page cache."""
    model = offload.open_offloaded(folder)
    model(input_ids=IDS[None])
    assert str(folder) not in Path("/proc/self/maps").read_text()


def test_the_table_says_who_is_ahead():
    slow, fast = (
        [{"seconds": s, "read": 4096.0} for s in (0.2, 0.4)],
        [{"seconds": s, "read": 0.0} for s in (0.1, 0.1)],
    )
    rows = {offload.FIRST: offload.summary(slow, slow), "ours": offload.summary(fast, slow)}
    machine = {"cpu": "A", "cores": 2, "file_system": "ext4", "simd": "AVX3", "date": "2026-11-28"}
    result = {"machine": machine, "model": "m", "layers": 2, "layer_bytes": 1 << 20, "tokens": 1024}
    *_, first, ours = offload_rows([result | {"pages": {"dropped": rows}}])
    assert first.startswith("| m, 2 of 1.00 MiB, 1,024 | dropped before each token | accelerate,")
    assert first.endswith("| 300.0 (150.0 - 450.0) |  | 4.00 KiB |")
    assert ours == "|  |  | ours | 100.0 (100.0 - 100.0) | 0.38, faster | 0 B |"
