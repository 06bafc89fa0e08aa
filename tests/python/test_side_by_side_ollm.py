"""oLLM beside us attends over the same keys and values, and reads them from the disk."""

from __future__ import annotations

import pytest
import torch

from bench.contenders import open_dynamic
from bench.side_by_side.child import disk_bytes
from bench.side_by_side.plan import NO_OLLM, UNMODELLED, Cell, Room
from bench.side_by_side.weights import load_model, weights_file

CELL = Cell("tiny", 2100, 2)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    weights = weights_file(CELL.shape, tmp_path_factory.mktemp("weights"))
    return load_model(CELL.shape, CELL.context, weights)


@pytest.fixture
def contender(model, tmp_path):
    pytest.importorskip("ollm")
    from bench.side_by_side.ollm import OllmContender

    contender = OllmContender(model, CELL, tmp_path)
    yield contender
    contender.close()
    assert list(tmp_path.iterdir()) == []


def test_it_decodes_what_a_full_cache_decodes(contender, model):
    full = open_dynamic(model, CELL.shape, CELL.batch, CELL.context)
    for _ in range(4):
        contender.step()
        full.step()
        assert torch.equal(contender.ids, full.ids)
    assert contender.cache.key_cache2[0].shape[2] == 4


def test_each_step_reads_every_layer_from_the_disk(contender):
    contender.step()
    before = disk_bytes()["read_bytes"]
    contender.step()
    read = disk_bytes()["read_bytes"] - before
    if read == 0:
        pytest.skip("reads of this file system reach no disk")
    assert read >= CELL.kv_bytes


def test_it_holds_a_layer_and_what_was_decoded(contender):
    layer = CELL.kv_bytes // CELL.shape.layers
    assert layer <= contender.nbytes < 1.1 * layer
    assert contender.about()["ollm"]


def test_without_it_or_on_a_modelled_device_its_cell_is_empty():
    room = Room(memory=1 << 50, disk=1 << 50, has_cap=True, modules=frozenset())
    assert room.problem(CELL, "ollm") == NO_OLLM
    assert room.problem(Cell("tiny", 1024, 1, "emmc"), "ollm") == UNMODELLED
