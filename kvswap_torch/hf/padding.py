"""Which positions are padding: what masks say, and that padding never becomes valid."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class Padding:
    """Validity of every position of every sequence; nothing is kept while all are valid.

    What was valid may become padding in a later pass, as behind an answer that ended before others
    of its batch. What came as padding was never summarised, and cannot become valid.

    A forward pass calls `begin`, `declare`, and `commit` once its positions are stored; `take_back`
    after a pass that failed leaves no trace of it.
    """

    def __init__(self) -> None:
        self._valid: torch.Tensor | None = None  # [batch, positions] bool; None: all valid
        self._before: torch.Tensor | None = None  # the same when the pass under way began
        # Of the pass under way: positions before it, new ones, their validity (None: all valid).
        self._declared: tuple[int, int, torch.Tensor | None] = (0, 0, None)

    def begin(self) -> None:
        """A pass begins."""
        self._before = self._valid

    def take_back(self) -> None:
        """It has failed: what it declared was never said."""
        self._valid = self._before

    def declare(
        self, positions: int, batch: int, tokens: int, mask: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Checks `mask` ``[batch, positions + tokens]`` and parts it.

        Returns
        -------
        tuple
            ``[batch, positions]`` bool, where some of these are padding from now on; None: they are
            what they were. ``[batch, tokens]`` bool; None: all new positions are valid.

        Raises
        ------
        ValueError
            A mask of another shape, or one that contradicts an earlier one.
        """
        if mask is None:
            if self._valid is not None:
                raise ValueError(
                    "attention_mask: must be passed again, since earlier positions were declared "
                    "as padding, got None; pass the mask of the whole text, padding included"
                )
            self._declared = (positions, tokens, None)
            return None, None
        if mask.dim() != 2:
            raise ValueError(
                "attention_mask: layers on disk attend causally with padding at most, got a mask "
                f"of shape {tuple(mask.shape)}; pass a mask [batch, tokens] or none, and for text "
                "no token_type_ids"
            )
        if tuple(mask.shape) != (batch, positions + tokens):
            raise ValueError(
                f"attention_mask: must cover the {positions} positions in the cache and the "
                f"{tokens} new ones, {[batch, positions + tokens]}, got {list(mask.shape)}"
            )
        past, new = mask[:, :positions].bool(), mask[:, positions:].bool()
        held = torch.ones_like(past) if self._valid is None else self._valid.to(past.device)
        held = held[:, :positions]
        if held.shape != past.shape:
            raise ValueError(
                f"attention_mask: must have a row for each of the cache's {len(held)} sequences, "
                f"got {len(past)}"
            )
        # One transfer from a device, which is waited for once.
        facts = torch.stack([(past & ~held).any(), (past != held).any(), new.all()])
        comes_back, is_narrower, is_whole = facts.tolist()
        if comes_back:
            raise ValueError(
                "attention_mask: what was padding when it came must stay padding, but some of the "
                f"{positions} positions in the cache are valid now; pass the mask that they came "
                "with, or crop() them away first"
            )
        narrowed = past.clone() if is_narrower else None
        if narrowed is not None:
            self._valid = narrowed
        self._declared = (positions, tokens, None if is_whole else new.clone())
        return narrowed, self._declared[2]

    def commit(self) -> None:
        """The declared positions are stored now."""
        positions, tokens, new = self._declared
        if new is not None and self._valid is None:
            self._valid = torch.ones(len(new), positions, dtype=torch.bool, device=new.device)
        if self._valid is not None:
            if new is None:
                new = torch.ones(
                    len(self._valid), tokens, dtype=torch.bool, device=self._valid.device
                )
            self._valid = torch.cat([self._valid, new], 1)

    @property
    def valid(self) -> torch.Tensor | None:
        """``[batch, positions]`` bool; None: all are."""
        return self._valid

    def restore(self, valid: torch.Tensor | None) -> None:
        """Of a cache that goes on from another one."""
        self._valid = None if valid is None else valid.clone()

    def between(self, batch: int, begin: int, end: int) -> torch.Tensor:
        """``[batch, end - begin]`` bool, of the pass under way too."""
        valid = torch.ones(batch, end, dtype=torch.bool)
        if self._valid is not None:
            held = min(end, self._valid.shape[1])
            valid[:, :held] = self._valid[:, :held]
        positions, _, new = self._declared
        if new is not None and positions < end:
            valid[:, positions:] = new[:, : end - positions]
        return valid[:, begin:]

    @property
    def newest(self) -> torch.Tensor | None:
        """``[batch, tokens]``: validity of the positions declared last; None: all valid."""
        return self._declared[2]

    def crop(self, positions: int) -> None:
        if self._valid is not None:
            self._valid = self._valid[:, :positions]
            if self._valid.all():
                self._valid = None

    def select(self, indices: Sequence[int]) -> None:
        if self._valid is not None:
            self._valid = self._valid[torch.as_tensor(indices, dtype=torch.long)]
