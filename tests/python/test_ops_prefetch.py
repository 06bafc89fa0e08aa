"""Records of a file, read beside computation by a program that has no cache."""

import os
import re
import threading
from pathlib import Path

import pytest
import reference
import torch
from torch.library import opcheck

from kvswap_torch import StorageError, ops

ops_of = torch.ops.kvswap_torch
RECORDS, SHAPE = 40, (2, 2, 4, 128)  # of 4,096 bytes in bf16


@pytest.fixture
def records():
    torch.manual_seed(6)
    return torch.randn(RECORDS, *SHAPE).bfloat16()


@pytest.fixture
def path(records, tmp_path):
    file = tmp_path / "layer.kv"
    file.write_bytes(records.view(torch.uint8).numpy().tobytes())
    return file


@pytest.fixture
def handle(path):
    opened = ops.prefetch_open(path, 4096)
    yield opened
    ops.prefetch_close(opened)


def read(handle, wanted):
    wanted = torch.as_tensor(wanted)
    ticket = ops.prefetch_submit(handle, wanted)
    return ops.prefetch_wait(handle, ticket, [len(wanted), *SHAPE], torch.bfloat16)


@pytest.mark.parametrize("io", ["auto", "buffered"])
@pytest.mark.parametrize("reader", ["auto", "threads", "sync"])
def test_batches_in_any_order(reader, io, path, records):
    handle = ops.prefetch_open(path, 4096, reader=reader, io=io, depth=8)
    assert handle[1:3].tolist() == [4096, RECORDS]
    assert io == "auto" or handle[3] == 0
    batches = [torch.randint(0, RECORDS, (count,)) for count in (0, 1, 5, 40, 90)]
    batches.append(torch.arange(RECORDS))
    tickets = [ops.prefetch_submit(handle, each) for each in batches]
    for i in (3, 0, 5, 1, 4, 2):
        shape = [len(batches[i]), *SHAPE]
        found = ops.prefetch_wait(handle, tickets[i], shape, torch.bfloat16)
        assert torch.equal(found, records[batches[i]])
        assert found.data_ptr() % 4096 == 0
    ops.prefetch_close(handle)
    assert handle[0] == 0


@pytest.mark.parametrize(
    ("record_bytes", "first_byte"), [(4096, 8192), (100, 0), (4096, 12), (8192, 1)]
)
def test_records_of_any_size_begin_anywhere(record_bytes, first_byte, path):
    handle = ops.prefetch_open(path, record_bytes, first_byte)
    count = int(handle[2])
    assert count == (path.stat().st_size - first_byte) // record_bytes
    wanted = torch.randint(0, count, (30,))
    ticket = ops.prefetch_submit(handle, wanted)
    found = ops.prefetch_wait(handle, ticket, [30, record_bytes], torch.uint8)
    assert torch.equal(found, reference.read_records(str(path), record_bytes, first_byte, wanted))
    ops.prefetch_close(handle)


def test_direct_is_refused_if_it_cannot_be(path):
    with pytest.raises(ValueError, match="io='direct' must have .* got 100 and 0; pad the records"):
        ops.prefetch_open(path, 100, io="direct")


def test_a_ticket_may_be_waited_for_again(handle, path, records):
    ticket = ops.prefetch_submit(handle, torch.tensor([3, 4, 9]))
    first, second = (
        ops.prefetch_wait(handle, ticket, [3, *SHAPE], torch.bfloat16) for _ in range(2)
    )
    assert torch.equal(first, second) and torch.equal(first, records[[3, 4, 9]])
    first.zero_()  # memory of its own
    assert torch.equal(second, records[[3, 4, 9]])


def test_old_tickets_are_forgotten_and_those_in_flight_are_not(handle, records):
    kept = ops.prefetch_submit(handle, torch.tensor([7]))
    old = ops.prefetch_submit(handle, torch.tensor([8]))
    ops.prefetch_wait(handle, old, [1, *SHAPE], torch.bfloat16)
    for _ in range(1024):
        read(handle, [0])
    found = ops.prefetch_wait(handle, kept, [1, *SHAPE], torch.bfloat16)
    assert torch.equal(found[0], records[7])
    with pytest.raises(ValueError, match="ticket must be one of this handle's newest 1024, got 2"):
        ops.prefetch_wait(handle, old, [1, *SHAPE], torch.bfloat16)


def test_so_many_batches_may_be_in_flight(handle, records):
    tickets = [ops.prefetch_submit(handle, torch.tensor([i % RECORDS])) for i in range(64)]
    with pytest.raises(ValueError, match="at most 64 batches may be in flight"):
        ops.prefetch_submit(handle, torch.tensor([0]))
    ops.prefetch_wait(handle, tickets[9], [1, *SHAPE], torch.bfloat16)
    assert torch.equal(read(handle, [2])[0], records[2])


def test_handles_are_independent_and_threads_may_share_one(path, records):
    one, other = (ops.prefetch_open(path, 4096) for _ in range(2))
    assert one[0] != other[0]
    wrong = []

    def work(seed):
        generator = torch.Generator().manual_seed(seed)
        for _ in range(30):
            wanted = torch.randint(0, RECORDS, (7,), generator=generator)
            if not torch.equal(read(one, wanted), records[wanted]):
                wrong.append(wanted)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    ops.prefetch_close(one)
    with pytest.raises(ValueError, match="handle must be one of prefetch_open.. that is not close"):
        read(one, [0])
    assert torch.equal(read(other, [5])[0], records[5])
    ops.prefetch_close(other)
    ops.prefetch_close(other)


def test_closing_gives_the_file_back(path):
    def is_open() -> bool:
        links = (os.readlink(each) for each in Path("/proc/self/fd").iterdir() if each.is_symlink())
        return str(path) in links

    handle = ops.prefetch_open(path, 4096)
    assert is_open()
    ops.prefetch_submit(handle, torch.arange(RECORDS))  # is never waited for
    ops.prefetch_close(handle)
    assert not is_open()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda h: ops.prefetch_submit(h, torch.tensor([40])), "records must be 0..39, got 40"),
        (lambda h: ops.prefetch_submit(h, torch.tensor([-1])), "records must be 0..39, got -1"),
        (lambda h: ops.prefetch_submit(h, torch.tensor([0.0])), "records must be Long, got Float"),
        (lambda h: ops.prefetch_submit(h[:2], torch.tensor([0])), r"handle must be \[4\]"),
        (
            lambda h: ops.prefetch_wait(h, torch.tensor(77), [1], torch.uint8),
            "ticket must be one of this handle's newest 1024, got 77",
        ),
        (
            lambda h: ops.prefetch_wait(
                h, ops.prefetch_submit(h, torch.tensor([1, 2])), [1, 8192], torch.uint8
            ),
            "shape must be of the ticket's 2 records, and with .* of 4096 bytes each, got",
        ),
        (lambda h: ops.prefetch_open("x", 0), "record_bytes must be 1.."),
        (lambda h: ops.prefetch_open("x", 1, -1), "first_byte must be at least 0, got -1"),
        (lambda h: ops.prefetch_open("x", 1, depth=0), "depth must be 1..1024, got 0"),
        (lambda h: ops.prefetch_open("x", 1, io="no"), "io must be auto, direct or buffered, got"),
        (
            lambda h: ops.prefetch_open("x", 1, reader="dma"),
            "reader must be auto, uring, threads or sync, got 'dma'",
        ),
    ],
)
def test_wrong_arguments_are_named(call, message, handle):
    with pytest.raises(ValueError, match=message):
        call(handle)


def test_what_the_world_refuses_is_a_storage_error(tmp_path, path, handle):
    with pytest.raises(StorageError, match="must be a file to read, got No such file") as raised:
        ops.prefetch_open(tmp_path / "none", 4096)
    assert raised.value.filename == str(tmp_path / "none") and raised.value.errno == 2
    with pytest.raises(StorageError, match="must be a plain file"):
        ops.prefetch_open(tmp_path, 4096)
    os.truncate(path, 4096 * 4)
    with pytest.raises(StorageError, match=f"{4096 * 20}"):
        read(handle, [20])
    assert read(handle, [3]).shape == (1, *SHAPE), "the handle goes on"


def test_opcheck(path, handle):
    # No two handles and no two tickets are equal, which test_aot_dispatch_dynamic would have them.
    others = ["test_schema", "test_autograd_registration", "test_faketensor"]
    opcheck(ops_of.prefetch_open, (str(path), 4096), test_utils=others)
    opcheck(ops_of.prefetch_submit, (handle, torch.tensor([1, 2])), test_utils=others)
    ticket = ops.prefetch_submit(handle, torch.tensor([1, 2]))
    opcheck(ops_of.prefetch_wait, (handle, ticket, [2, *SHAPE], torch.bfloat16))
    opcheck(ops_of.prefetch_close, (ops.prefetch_open(path, 4096),))


def attend(handle, pages, slots, query, summary, tokens):
    """One step of a program of one's own: choose, read beside computation, attend over pages."""
    chosen, _ = ops.select_groups(summary, query.sum(1)[..., : summary.shape[2]], 4, 5)
    ticket = ops.prefetch_submit(handle, chosen[0].long())
    recent = query.float().softmax(-1)  # what there is to do meanwhile
    found = ops.prefetch_wait(handle, ticket, [5, *SHAPE], torch.bfloat16)
    encoded, exponents = ops.encode_records(found)
    rounded = ops.decode_records(encoded, exponents, torch.bfloat16)
    ops.transfer_records(rounded, pages, torch.arange(5, dtype=torch.int32)[None], slots)
    output, mass = ops.paged_attention(
        query[:, :, None].bfloat16(),
        pages,
        slots[None],
        torch.full((1, 1, 5), 15),
        4 * chosen[None],
        torch.tensor([tokens], dtype=torch.int32),
        0.1,
    )
    return chosen, output.float() + recent.sum(), mass


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.long)])
def test_a_compiled_program_is_the_same(backend, handle, records):
    """One graph, of the whole function, run again with other data."""
    compiled = torch.compile(attend, fullgraph=True, backend=backend)
    slots = torch.tensor([[6, 0, 3, 9, 2]], dtype=torch.int32)
    chosen_before = []
    for seed in range(3):
        torch.manual_seed(seed)
        query, summary = torch.randn(1, 4, 128), torch.randn(1, 10, 8, 16)
        ours, theirs = torch.zeros(2, 10, *SHAPE).bfloat16().unbind()
        expected = attend(handle, theirs, slots, query, summary, 160)
        found = compiled(handle, ours, slots, query, summary, 160)
        assert torch.equal(found[0], expected[0])
        torch.testing.assert_close(found[1:], expected[1:])  # inductor has a softmax of its own
        assert torch.equal(ours, theirs) and ours.any()
        rounded = reference.float8_rounded(records[found[0][0].long()])
        assert torch.equal(ours[slots[0].long()], rounded)
        chosen_before.append(found[0])
    assert not torch.equal(chosen_before[0], chosen_before[1]), "the graph holds no choice"


def test_the_program_of_the_docs_attends_what_it_selected(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = Path(__file__).resolve().parents[2] / "docs" / "api.md"
    (text,) = (
        block
        for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
        if "prefetch_open" in block
    )
    names: dict = {}
    exec(compile(text, str(page), "exec"), names)
    groups, query = names["groups"][0].long(), names["query"][0].bfloat16().float()
    keys, values = (
        names[name][0].unflatten(1, (40, 16))[:, groups].flatten(1, 2).float()
        for name in ("keys", "values")
    )
    weights = torch.einsum("hd,htd->ht", query, keys).mul(0.125).softmax(-1)
    expected = torch.einsum("ht,htd->hd", weights, values)
    torch.testing.assert_close(names["output"][0, 0].float(), expected, atol=2e-2, rtol=2e-2)
    assert names["handle"][0] == 0
