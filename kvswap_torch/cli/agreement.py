"""How far a cache on disk agrees with the full one, answer by answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvswap_torch.errors import CorruptionError, KVSwapError, StorageError

if TYPE_CHECKING:
    from kvswap_torch.cli.conversation import Conversation


@dataclass(frozen=True)
class Agreement:
    """Two answers to one question.

    Parameters
    ----------
    first_difference
        Tokens of the answers before the first that differs; None: none does.
    on_disk, in_memory
        That token's text in each answer; None where none differs or the answer had ended.
    log_likelihood_on_disk, log_likelihood_in_memory
        Of the full cache's answer, given all before it, in nats, by each cache; None where a
        cache cannot be cropped back to the document (sliding windows, recurrent states).
    """

    first_difference: int | None
    on_disk: str | None
    in_memory: str | None
    log_likelihood_on_disk: float | None
    log_likelihood_in_memory: float | None


def agreements(disk: Conversation, memory: Conversation, document_tokens: int) -> list[Agreement]:
    """Of each turn of two conversations that asked the same; both caches end where they were asked.

    The full cache's answers are read by both caches once more, a token at a time: so many decoding
    steps as they have tokens.
    """
    scores = [_scores(each, memory, document_tokens) for each in (disk, memory)]
    compared = []
    for index, (ours, theirs) in enumerate(zip(disk.turns, memory.turns, strict=True)):
        place = first_difference(ours.answer_ids, theirs.answer_ids)
        compared.append(
            Agreement(
                place,
                _text(disk, ours.answer_ids, place),
                _text(memory, theirs.answer_ids, place),
                *(score[index] for score in scores),
            )
        )
    return compared


def first_difference(ours: list[int], theirs: list[int]) -> int | None:
    """Index of the first token that differs, the shorter one's end included; None: none does."""
    if ours == theirs:
        return None
    same = (a == b for a, b in zip(ours, theirs, strict=False))
    return next(
        (index for index, equal in enumerate(same) if not equal), min(len(ours), len(theirs))
    )


def _scores(
    reader: Conversation, answered: Conversation, document_tokens: int
) -> list[float] | list[None]:
    try:
        return reader.log_likelihoods(answered.turns, document_tokens)
    except (StorageError, CorruptionError):
        raise
    except (KVSwapError, ValueError, NotImplementedError):
        return [None] * len(answered.turns)


def _text(conversation: Conversation, ids: list[int], place: int | None) -> str | None:
    if place is None or place >= len(ids):
        return None
    return conversation.tokenizer.decode(ids[place : place + 1])
