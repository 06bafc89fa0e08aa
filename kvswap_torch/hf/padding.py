"""Which columns are padding: what masks said, and that they do not change their mind."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class Padding:
    """Validity of every column of every sequence; nothing is kept while all are valid.

    A forward pass calls `declare`, and `commit` once its columns are stored, so that a pass that
    failed leaves no trace.
    """

    def __init__(self) -> None:
        self._valid: torch.Tensor | None = None  # [batch, columns] bool; None: all valid
        # Of the pass under way: columns before it, new columns, their validity (None: all valid).
        self._declared: tuple[int, int, torch.Tensor | None] = (0, 0, None)

    def declare(
        self, columns: int, batch: int, tokens: int, mask: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Checks `mask` ``[batch, columns + tokens]`` and returns its new part.

        Returns
        -------
        Tensor or None
            ``[batch, tokens]`` bool; None when all new columns are valid.

        Raises
        ------
        ValueError
            A mask of another shape, or one that contradicts an earlier one.
        """
        if mask is None:
            if self._valid is not None:
                raise ValueError(
                    "attention_mask: must be passed again, since earlier columns were declared as "
                    "padding, got None; pass the mask of the whole text, padding included"
                )
            self._declared = (columns, tokens, None)
            return None
        if mask.dim() != 2:
            raise ValueError(
                "attention_mask: layers on disk attend causally with padding at most, got a mask "
                f"of shape {tuple(mask.shape)}; pass a mask [batch, tokens] or none, and for text "
                "no token_type_ids"
            )
        if tuple(mask.shape) != (batch, columns + tokens):
            raise ValueError(
                f"attention_mask: must cover the {columns} columns in the cache and the {tokens} "
                f"new ones, {[batch, columns + tokens]}, got {list(mask.shape)}"
            )
        past, new = mask[:, :columns].bool(), mask[:, columns:].bool()
        same = past.all() if self._valid is None else torch.equal(past, self._valid[:, :columns])
        if not same:
            raise ValueError(
                "attention_mask: must say of earlier columns what it said when they came, but some "
                "have changed between valid and padding; crop() them away first, or reset()"
            )
        if new.all():
            self._declared = (columns, tokens, None)
            return None
        self._declared = (columns, tokens, new.clone())
        return self._declared[2]

    def commit(self) -> None:
        """The declared columns are stored now."""
        columns, tokens, new = self._declared
        if new is not None and self._valid is None:
            self._valid = torch.ones(len(new), columns, dtype=torch.bool, device=new.device)
        if self._valid is not None:
            if new is None:
                new = torch.ones(
                    len(self._valid), tokens, dtype=torch.bool, device=self._valid.device
                )
            self._valid = torch.cat([self._valid, new], 1)

    @property
    def valid(self) -> torch.Tensor | None:
        """``[batch, columns]`` bool; None: all are."""
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
        columns, _, new = self._declared
        if new is not None and columns < end:
            valid[:, columns:] = new[:, : end - columns]
        return valid[:, begin:]

    @property
    def newest(self) -> torch.Tensor | None:
        """``[batch, tokens]``: validity of the columns declared last; None: all valid."""
        return self._declared[2]

    def crop(self, columns: int) -> None:
        if self._valid is not None:
            self._valid = self._valid[:, :columns]
            if self._valid.all():
                self._valid = None

    def select(self, indices: Sequence[int]) -> None:
        if self._valid is not None:
            self._valid = self._valid[torch.as_tensor(indices, dtype=torch.long)]
