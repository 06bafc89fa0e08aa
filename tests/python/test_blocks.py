"""Projections of one block a KV head: rotations change no product, and all columns are exact."""

from __future__ import annotations

import pytest
import torch

from kvswap_torch.projection import from_chunk

KV_HEADS, HEADS, DIM = 2, 6, 16


def drawn(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and queries of one sequence whose channels weigh differently."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.linspace(3, 0.1, DIM)
    keys = torch.randn(1, KV_HEADS, 200, DIM, generator=generator) * weights + 1
    return keys, torch.randn(1, HEADS, 200, DIM, generator=generator) * weights.flip(0)


@pytest.mark.parametrize("tokens", [8, 300])
def test_a_skew_is_orthogonal(tokens):
    """Also of fewer queries than there are channels."""
    skew = from_chunk("skewed", torch.randn(1, 1, tokens, DIM), torch.randn(1, 1, tokens, DIM), DIM)
    torch.testing.assert_close(skew[0].T @ skew[0], torch.eye(DIM), atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", ["pca_per_head", "skewed", "channels"])
@pytest.mark.parametrize("heads", ["all", "each"])
def test_all_columns_give_the_products_of_each_head(kind, heads):
    keys, query = drawn()
    rank = DIM if heads == "each" else KV_HEADS * DIM
    key_side, query_side = from_chunk(kind, keys, query, rank, heads=heads)
    for head in range(KV_HEADS):
        own = slice(head * DIM, (head + 1) * DIM)
        product = key_side[own] @ query_side[own].T
        torch.testing.assert_close(product, torch.eye(DIM), atol=1e-4, rtol=0)
    if heads == "all":
        whole = key_side @ query_side.T
        torch.testing.assert_close(whole, torch.eye(KV_HEADS * DIM), atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", ["pca_per_head", "skewed", "channels"])
def test_columns_take_turns_and_blocks_are_each_heads_own(kind):
    keys, query = drawn()
    together = from_chunk(kind, keys, query, 6, heads="all")
    apart = from_chunk(kind, keys, query, 3, heads="each")
    for side, own_side in zip(together, apart, strict=True):
        for column in range(6):
            head, others = column % KV_HEADS, 1 - column % KV_HEADS
            rows = slice(head * DIM, (head + 1) * DIM)
            expected = own_side[rows, column // KV_HEADS]
            torch.testing.assert_close(side[rows, column].abs(), expected.abs(), atol=1e-3, rtol=0)
            assert not side[others * DIM : (others + 1) * DIM, column].any()


def test_principal_components_are_those_of_the_centred_keys():
    keys, _ = drawn()
    matrix, same = from_chunk("pca_per_head", keys[:, :1], None, 4)
    assert matrix is same
    expected = torch.linalg.svd(keys[0, 0] - keys[0, 0].mean(0)).Vh[:4].T
    torch.testing.assert_close((matrix.T @ expected).abs(), torch.eye(4), atol=1e-3, rtol=0)


def test_a_skew_keeps_first_what_queries_are_largest_in():
    """Summed over all of them, where the directions are ordered by the squares."""
    axes = torch.eye(4)
    asked = [9 * axes[0], *[3 * axes[1]] * 5, *[2 * axes[2]] * 2]
    chosen = from_chunk("skewed", torch.randn(1, 1, 8, 4), torch.stack(asked)[None, None], 2)[0]
    torch.testing.assert_close(chosen.abs(), axes[:, [1, 0]], atol=1e-4, rtol=0)


def test_channels_are_those_with_the_largest_product_of_norms():
    """Of two query heads that share a KV head both count; ties go to the lower channel."""
    keys = torch.tensor([[[[1.0, 4, 2, 2], [0, 3, 2, 2]]]])  # norms 1, 5, 2.8, 2.8
    query = torch.zeros(1, 2, 2, 4)
    query[0, :, 0] = torch.tensor([[3.0, 0, 1, 1], [4.0, 0.1, 0, 0]])  # norms 5, 0.1, 1, 1
    matrix, same = from_chunk("channels", keys, query, 3)
    assert matrix is same
    assert matrix.argmax(0).tolist() == [0, 2, 3] and matrix.sum(0).tolist() == [1, 1, 1]
    assert from_chunk("channels", keys, None, 2)[0].argmax(0).tolist() == [1, 2]


def test_the_newest_queries_choose_channels():
    """As many as ThinK's window has; those of padding do not count."""
    keys, query = drawn()
    query[:, :, -32:, 3] = 100
    query[:, :, :-32, 5] = 1e4
    first = from_chunk("channels", keys, query, 1, heads="each")[0].unflatten(0, (KV_HEADS, DIM))
    assert first.argmax(1).flatten().tolist() == [3, 3]
    valid = torch.ones(1, 200, dtype=torch.bool)
    valid[:, -32:] = False
    blind = from_chunk("channels", keys, query, 1, valid, heads="each")[0]
    assert blind.unflatten(0, (KV_HEADS, DIM)).argmax(1).flatten().tolist() == [0, 0]
