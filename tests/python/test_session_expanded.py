"""Latents that a prefill's chunk attends by expanded heads: what absorbed queries give.

Two sessions get the same passes. One attends long chunks by keys and values of every head, made
some tokens at a time; the other by queries that took the expansion in. They must answer alike up to
rounding, and choose, keep and drop the same afterwards.
"""

from __future__ import annotations

import pytest
import torch

from tests.python.test_session_one_side import HEADS, LAYERS, METHODS, opened

RANK, ROTARY, UNROTATED = 56, 8, 24
BATCH = 2
# Values narrower and wider than keys; a chunk alone; many blocks of what is on disk.
PASSES = (90, 1, 1, 3, 40, 1, 2, 57, 1)


class Both:
    """An absorbed session and one that expands, `by_torch` or by our kernel."""

    def __init__(self, directory, by_torch: bool, value: int, dtype: torch.dtype, changes: dict):
        dim = RANK + ROTARY
        self.absorbed, self.expanded = (
            opened(directory, 1, dim, dtype, **changes) for _ in range(2)
        )
        self.by_torch, self.dtype = by_torch, dtype
        self.generator = torch.Generator().manual_seed(value)
        self.weight = self.random(HEADS, UNROTATED + value, RANK)
        for layer in range(LAYERS if changes.get("ranks", [16]) else 0):
            if layer not in changes.get("exact_layers", []):
                pair = [self.random(dim, 16).float() for _ in range(2)]
                for session in (self.absorbed, self.expanded):
                    session.set_projection(layer, *pair)

    def random(self, *shape: int) -> torch.Tensor:
        return (0.3 * torch.randn(shape, generator=self.generator)).to(self.dtype)

    def forward(self, tokens: int, valid: torch.Tensor | None = None, terms: tuple = ()) -> None:
        kind = "prefill" if tokens > 4 else "decode"
        sessions = (self.absorbed, self.expanded)
        for session in sessions:
            session.begin_pass(kind, valid)
        for layer in range(LAYERS):
            keys = self.random(BATCH, 1, tokens, RANK + ROTARY)
            query = self.random(BATCH, HEADS, tokens, UNROTATED + ROTARY)
            plain, rotated = query[..., :UNROTATED], query[..., UNROTATED:]
            asked = torch.cat([plain @ self.weight[:, :UNROTATED], rotated], -1)
            outputs = [s.extend(layer, asked, keys, keys, 0.2, *terms) for s in sessions[:1]]
            if kind == "decode":
                outputs.append(self.expanded.extend(layer, asked, keys, keys, 0.2, *terms))
            outputs = [self.values(output) for output in outputs]
            if kind == "prefill":
                whole = (*terms, *(0.0, None)[len(terms) :])
                arguments = (layer, query, self.weight, UNROTATED, keys, 0.2, *whole)
                outputs.append(self.expanded.extend_expanded(*arguments, self.by_torch))
            expected, actual = outputs
            if valid is not None:
                expected, actual = (
                    torch.where(valid[..., None, None], each, 0.0) for each in outputs
                )
            assert expected.abs().max() > 0.01
            wide = 1e-5 if self.dtype == torch.float32 else 3e-2
            torch.testing.assert_close(actual, expected, rtol=wide, atol=wide)
            chosen = [session.last_selection(layer) for session in sessions]
            assert chosen[0] == chosen[1], (layer, tokens)

    def values(self, output: torch.Tensor) -> torch.Tensor:
        latents = output[..., :RANK].transpose(1, 2)
        return (latents @ self.weight[:, UNROTATED:].transpose(1, 2)).transpose(1, 2)


@pytest.fixture(params=[False, True], ids=["kernel", "torch"])
def by_torch(request) -> bool:
    return request.param


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("value", [16, 48], ids=["narrow", "wide"])
@pytest.mark.parametrize("method", [name for name in METHODS if name != "clusters"])
@pytest.mark.pairs
def test_as_absorbed(method, value, by_torch, tmp_path):
    both = Both(tmp_path, by_torch, value, torch.float32, METHODS[method])
    valid = torch.ones(BATCH, PASSES[0], dtype=torch.bool)
    valid[0, :19] = valid[1, 30:33] = False
    both.forward(PASSES[0], valid)
    for tokens in PASSES[1:]:
        both.forward(tokens)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(dtype, by_torch, tmp_path):
    both = Both(tmp_path, by_torch, 16, dtype, METHODS["boxes"])
    both.forward(60)
    both.forward(40)


@pytest.mark.usefixtures("one_thread")
def test_caps_and_sinks(by_torch, tmp_path):
    both = Both(tmp_path, by_torch, 16, torch.float32, METHODS["boxes"])
    for tokens in (60, 40):
        both.forward(tokens, terms=(2.0, torch.linspace(-1, 1, HEADS)))


def test_what_is_refused(tmp_path):
    both = Both(tmp_path, False, 16, torch.float32, METHODS["boxes"])
    session, keys = both.expanded, both.random(BATCH, 1, 9, RANK + ROTARY)
    query = both.random(BATCH, HEADS, 9, UNROTATED + ROTARY)

    def extend(query=query, weight=both.weight, keys=keys):
        return session.extend_expanded(0, query, weight, UNROTATED, keys, 0.2)

    session.begin_pass("prefill")
    for changes, why in (
        ({"query": query[..., :-1]}, "query must be .2, 6, 9, 32., got"),
        ({"weight": both.weight[:4]}, "weight must be .6, 24 . value, rank., got"),
        ({"weight": both.weight.half()}, "must have the keys' dtype"),
        ({"keys": keys[..., :-1]}, "keys must be"),
    ):
        with pytest.raises(ValueError, match=why):
            extend(**changes)
    session.begin_pass("decode")
    with pytest.raises(ValueError, match="must be called in a prefill, got a pass that decodes"):
        extend()
    two_sides = opened(tmp_path, 2, RANK + ROTARY, torch.float32, **METHODS["boxes"])
    two_sides.begin_pass("prefill")
    with pytest.raises(ValueError, match="must be of latents on the CPU .sides=1., got sides=2"):
        two_sides.extend_expanded(0, query, both.weight, UNROTATED, keys, 0.2)
