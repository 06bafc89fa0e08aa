"""Who is kept once a prompt and what followed it outgrow what is attended."""

from __future__ import annotations

import pytest
import torch

from kvswap_torch import _C
from tests.python.test_session import HEAD_DIM, HEADS, KV_HEADS, native, options


def few(directory, keeper: str, **changes) -> _C.TensorCache:
    """Attends the newest four and a kept one, or 14 where there are no more. A choice a step."""
    made = options(directory, rows="none", keeper=keeper, keep_tokens=1, keep_interval=1, **changes)
    made.keep_pool = 1 if keeper == "observed" else made.keep_pool
    made.layers = made.group_tokens = 1
    made.groups_max, made.tail_tokens, made.sink_tokens = 10, 4, 0
    return native(made)


def step(session: _C.TensorCache, begin: int, asked: list[int], size: float = 100.0) -> set[int]:
    """Adds a token for each that is asked for; whom the last of them sees.

    With a size of 0 it attends all that it sees alike, else the one that it asks for.
    """
    each = torch.eye(HEAD_DIM).expand(1, HEADS, -1, -1)
    session.begin_pass("prefill" if begin == 0 else "decode", None)
    own = each[:, :KV_HEADS, begin : begin + len(asked)].contiguous()
    session.append(0, own, own)
    output = session.attend(0, size * each[:, :, asked].contiguous(), 1.0)
    return set(output[0, -1, 0].nonzero().flatten().tolist())


@pytest.mark.parametrize(
    ("keeper", "window", "asked", "then", "kept"),
    [
        ("heavy", 2, [2] * 12, [5, 5, 5], 5),  # more queries than the prompt's two
        ("heavy", 2, [2] * 12, [5, 6, 7], 2),
        ("observed", 1, [2] * 12, [5, 5, 7], 7),  # the newest query alone
    ],
    ids=["h2o-steps", "h2o-prompt", "tova"],
)
@pytest.mark.parametrize("device", ["cpu", "host"])
def test_the_first_choice_goes_by_what_was_paid_while_all_fit(
    tmp_path, device, keeper, window, asked, then, kept
):
    """Of a prompt of 12 tokens each query attends one token alone, and so do those of steps."""
    session = few(tmp_path, device=device, keeper=keeper, keep_window=window)
    step(session, 0, asked)
    for i, token in enumerate(then):
        step(session, 12 + i, [token])
        assert session.counters()["tokens_kept"] == 0
    assert step(session, 15, [0], size=0.0) == {kept, 11, 12, 13, 14, 15}


@pytest.mark.parametrize("device", ["cpu", "host"])
def test_what_a_prompt_paid_its_newest_tokens_counts_once_they_are_older(tmp_path, device):
    session = few(tmp_path, "heavy", device=device, keep_window=3)
    step(session, 0, [2] * 17 + [2, 18, 18])
    for begin in range(20, 23):
        step(session, begin, [begin])
    assert step(session, 23, [0], size=0.0) == {18, 19, 20, 21, 22, 23}
