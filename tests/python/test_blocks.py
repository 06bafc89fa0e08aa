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


@pytest.mark.parametrize("kind", ["pca_per_head", "skewed", "channels", "rope_pairs"])
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


@pytest.mark.parametrize(
    ("kind", "at_once"), [("pca_per_head", 1), ("skewed", 1), ("channels", 1), ("rope_pairs", 2)]
)
def test_columns_take_turns_and_blocks_are_each_heads_own(kind, at_once):
    keys, query = drawn()
    together = from_chunk(kind, keys, query, 6 * at_once, heads="all")
    apart = from_chunk(kind, keys, query, 3 * at_once, heads="each")
    for side, own_side in zip(together, apart, strict=True):
        for column in range(6 * at_once):
            turn, one = divmod(column, at_once)
            head, others = turn % KV_HEADS, 1 - turn % KV_HEADS
            rows = slice(head * DIM, (head + 1) * DIM)
            expected = own_side[rows, turn // KV_HEADS * at_once + one]
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


def pairs_of(rotary: int) -> list[tuple[int, int]]:
    """Halves of what is turned, then halves of what is not."""
    apart, beside = rotary // 2, (DIM - rotary) // 2
    turned = [(i, i + apart) for i in range(apart)]
    return turned + [(rotary + i, rotary + i + beside) for i in range(beside)]


@pytest.mark.parametrize("rotary", [None, 4, DIM])
@pytest.mark.parametrize("asked", [True, False])
def test_pairs_are_those_that_add_most_to_products(rotary, asked):
    """By the squares of what they add, over the newest 32 queries of both heads and all keys."""
    keys, query = drawn()
    made = from_chunk("rope_pairs", keys, query if asked else None, 6, heads="each", rotary=rotary)
    pairs = pairs_of(rotary or DIM)
    for head, matrix in enumerate(made[0].unflatten(0, (KV_HEADS, DIM))):
        energies = []
        for pair in pairs:
            own = keys[0, head][:, pair]
            shared = query[0, 3 * head : 3 * head + 3, -32:][..., pair].flatten(0, 1)
            energies.append((shared @ own.T if asked else own).square().sum())
        best = torch.stack(energies).topk(3).indices.tolist()
        assert matrix.argmax(0).tolist() == [channel for i in best for channel in pairs[i]]
        assert matrix.sum(0).tolist() == [1] * 6
    assert torch.equal(*made)


def test_equal_pairs_go_to_the_lower_and_single_channels_are_refused():
    keys, query = torch.ones(1, 2, 40, DIM), torch.ones(1, 2, 40, DIM)
    chosen = from_chunk("rope_pairs", keys, query, 6)[0].argmax(0).tolist()
    # Two heads of 16 channels in turn.
    assert chosen == [0, 8, 16, 24, 1, 9]
    with pytest.raises(ValueError, match="rank must be even, since rope_pairs takes both .* got 5"):
        from_chunk("rope_pairs", keys, query, 5)
    for odd in (3, 18, -2):
        with pytest.raises(ValueError, match=f"rotary must be even and 2 to 16, got {odd}"):
            from_chunk("rope_pairs", keys, query, 4, rotary=odd)
