"""The engine's clusters are the reference's, token by token; wrong arguments.

The reference runs in fp64 here, on keys without ties: then both must decide alike, whatever the
order of a sum is on this CPU. What must hold of both for any keys stands in `test_clusters.py`,
what threads and instruction sets must not change in `tests/cpp/methods/test_adaptive_clusters.cpp`.
"""

import pytest
import torch

from tests.python.engine_clusters import EngineClusters
from tests.python.reference_methods.clusters import ClusterOptions, Clusters
from tests.python.test_clusters import drawn

STEPS = 120
OPTIONS = {
    "usual": ClusterOptions(16, 32, sink_tokens=3),
    "narrow": ClusterOptions(8, 12, 0.6, 4),
    "nothing waits": ClusterOptions(12, 24, 1.0, 0),
    "at the limit": ClusterOptions(20, 25, 0.05, 8),
    "static": ClusterOptions(16, 20, sink_tokens=3, update="static"),
    "local": ClusterOptions(8, 10, sink_tokens=3, update="local"),
    "local at the limit": ClusterOptions(20, 25, 0.05, update="local"),
}


@pytest.fixture
def in_double():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def assert_same(row: EngineClusters, reference: Clusters) -> None:
    assert torch.equal(row.place, reference.place)
    assert torch.equal(row.size, reference.size[: reference.count])
    for name in ("count", "left", "pending", "splits", "refused", "forced", "clusters_max"):
        assert getattr(row, name) == getattr(reference, name), name
    torch.testing.assert_close(
        row.centroid.double(), reference.centroid[: reference.count], rtol=1e-5, atol=1e-5
    )
    torch.testing.assert_close(
        row.variance, reference.variance[: reference.count], rtol=1e-5, atol=1e-5
    )
    assert (row.threshold is None) == (reference.threshold is None)
    if row.threshold is not None:
        assert row.threshold == pytest.approx(reference.threshold, rel=1e-6)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("kind", ["normal", "equal", "moving", "odd"])
@pytest.mark.parametrize(("prompt", "width"), [(0, 5), (200, 16), (700, 33), (1500, 8)])
@pytest.mark.pairs
def test_decides_as_the_reference(in_double, options, kind, prompt, width):
    keys = drawn(kind, prompt + STEPS, width, seed=prompt + width).float()
    row = EngineClusters(width, len(keys), options)
    reference = Clusters(width, len(keys), options)
    row.enter_prompt(keys, prompt)
    reference.enter_prompt(keys.double(), prompt)
    assert_same(row, reference)
    generator = torch.Generator().manual_seed(1)
    for end in range(prompt + 2, len(keys) + 1, 2):
        some = torch.rand(row.count, generator=generator) < 0.1
        read = set(some.nonzero().flatten().tolist())
        assert row.enter(keys, end, read) == reference.enter(keys.double(), end, read)
        assert_same(row, reference)
    copy = row.copy()
    assert_same(copy, reference)


def test_a_prompt_of_more_than_a_block_is_the_reference_s(in_double):
    keys = drawn("normal", 8192 + 700, 4, seed=4).float()
    options = ClusterOptions(64, 128)
    row, reference = EngineClusters(4, len(keys), options), Clusters(4, len(keys), options)
    row.enter_prompt(keys, len(keys))
    reference.enter_prompt(keys.double(), len(keys))
    assert_same(row, reference)


@pytest.mark.parametrize(
    ("keys", "end", "told"),
    [
        (torch.zeros(9, 3), 5, r"keys must be \[tokens, 4\] fp32"),
        (torch.zeros(9, 4, dtype=torch.float16), 5, "fp32 in the CPU's memory, got .* Half"),
        (torch.zeros(4, 9).T, 5, r"keys must be \[tokens, 4\] fp32"),
        (torch.zeros(9, 4), 10, r"room for \(9 and 12\), got 10"),
        (torch.zeros(20, 4), 13, r"room for \(20 and 12\), got 13"),
        (torch.zeros(9, 4), -1, "got -1"),
    ],
)
def test_keys_that_do_not_fit_are_refused(keys, end, told):
    row = EngineClusters(4, 12, ClusterOptions(2, 4))
    for call in (row.enter_prompt, lambda keys, end: row.enter(keys, end, ())):
        with pytest.raises(RuntimeError, match=told):
            call(keys, end)
    assert (row.left, row.count) == (0, 0)


def test_a_cluster_that_is_not_there_was_not_read():
    row = EngineClusters(4, 12, ClusterOptions(2, 4))
    with pytest.raises(IndexError, match=r"clusters that there are \(0\), got 3"):
        row._row.enter(torch.zeros(12, 4), 1, [3])
    with pytest.raises(IndexError, match=r"clusters that there are \(0\), got 3"):
        row.members(3)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((0, 4, 1.0, 0, 0), "cluster_tokens must be at least 1"),
        ((8, 4, 1.0, 0, 0), "at most cluster_tokens_max, got 8 and 4"),
        ((8, 8, 0.0, 0, 0), "split_factor must be above 0"),
        ((8, 8, 1.0, -1, 0), "pending_tokens and sink_tokens at least 0"),
    ],
)
def test_options_that_make_no_sense_are_refused(arguments, told):
    from kvswap_torch import _C

    with pytest.raises(ValueError, match=told):
        _C.Clusters(4, 12, *arguments)
    with pytest.raises(ValueError, match="one of adaptive, static, local, got 'never'"):
        _C.Clusters(4, 12, 8, 8, 1.0, 0, 0, update="never")
