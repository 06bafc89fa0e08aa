"""Two sessions that are given the same, in records of different forms, and must answer alike."""

from __future__ import annotations

import torch

from kvswap_torch import _C


class SessionPair:
    """The same calls to both, and numbers to call them with.

    dtype: of keys, values and queries; seed: of all that is drawn.
    """

    def __init__(self, sessions: list[_C.TensorCache], dtype: torch.dtype, seed: int):
        self.sessions, self.dtype = sessions, dtype
        self.generator = torch.Generator().manual_seed(seed)

    def random(self, *shape: int) -> torch.Tensor:
        return (0.3 * torch.randn(shape, generator=self.generator)).to(self.dtype)

    def all(self, name: str, *arguments) -> None:
        for session in self.sessions:
            getattr(session, name)(*arguments)

    def project(self, layers: int, rows: int, changes: dict) -> None:
        """Random projections of 16 columns, where `changes` of the settings leave any."""
        if not changes.get("ranks", [16]):
            return
        for layer in range(layers):
            if layer not in changes.get("exact_layers", []):
                pair = [self.random(rows, 16).float() for _ in range(2)]
                self.all("set_projection", layer, *pair)

    def fork(self) -> None:
        """From here on both are forks of what they were."""
        self.sessions = [session.fork() for session in self.sessions]

    def expect_same_choice(self, layer: int) -> None:
        one, other = (session.last_selection(layer) for session in self.sessions)
        assert one == other

    @staticmethod
    def of_valid(valid: torch.Tensor | None, *outputs: torch.Tensor) -> list[torch.Tensor]:
        """``[batch, tokens, heads, dim]`` each, zeros where a query is padding."""
        if valid is None:
            return list(outputs)
        return [torch.where(valid[..., None, None], output, 0.0) for output in outputs]
