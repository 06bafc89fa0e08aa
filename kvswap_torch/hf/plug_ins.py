"""The plug-ins of one cache: which configs they go with, and the session that asks them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvswap_torch.config import Summary, SwapConfig
from kvswap_torch.errors import ConfigError
from kvswap_torch.hf.attended_session import AttendedSession
from kvswap_torch.hf.families import ModelParts
from kvswap_torch.hf.padding import Padding
from kvswap_torch.hf.scored_session import ScoredSession
from kvswap_torch.hf.session import Session
from kvswap_torch.hf.valued_session import ValuedSession
from kvswap_torch.plug_ins import (
    CacheShape,
    GroupScores,
    TokenScores,
    notes_bytes,
    sees_attention,
    told_bytes,
)


@dataclass(frozen=True)
class PlugIns:
    """`KVSwapCache`'s parameters of the same names; None: the engine's own."""

    group_scores: GroupScores | None = None
    token_scores: TokenScores | None = None

    def config(self, config: SwapConfig | None, parts: ModelParts) -> SwapConfig | None:
        """The config of a cache with these.

        Raises
        ------
        ConfigError
            Settings and plug-ins that do not belong together, what is no plug-in, or a model that
            several processes run.
        """
        for name, kind in (("group_scores", GroupScores), ("token_scores", TokenScores)):
            plug_in = getattr(self, name)
            if plug_in is not None and not isinstance(plug_in, kind):
                raise ConfigError(
                    f"{name}: must be an object of a class made from kvswap_torch.plug_ins."
                    f"{kind.__name__}, got {plug_in!r}"
                )
            if plug_in is not None and parts.placement.is_shared:
                raise ConfigError(
                    f"{name}: must be used with a model that one process runs, got one of several"
                )
        if config is None and self.group_scores is not None:
            config = SwapConfig(summary=Summary(kind="user"))
        has = config or SwapConfig()
        policy = None if has.retention is None else has.retention.POLICY
        if parts.index_topk and (self.group_scores is not None or self.token_scores is not None):
            raise ConfigError(
                f"group_scores and token_scores: must be left out, since the index of {parts.name} "
                "says which tokens are attended"
            )
        if not parts.index_topk:
            _check("group_scores", self.group_scores, "summary.kind", has.summary.kind)
        _check("token_scores", self.token_scores, "retention.policy", policy)
        return config

    def nbytes(self, batch: int, tokens: int) -> int:
        """What they keep, by their own word; what tokens are worth, the session keeps."""
        groups = 0 if self.group_scores is None else told_bytes(self.group_scores, batch, tokens)
        return groups + notes_bytes(self.token_scores, batch, tokens)

    @property
    def are_none(self) -> bool:
        """Whether the engine decides alone."""
        return self.group_scores is None and self.token_scores is None

    @property
    def sees_attention(self) -> bool:
        """Whether steps must be weighed for one of them."""
        return sees_attention(self.token_scores)

    def check_free(self) -> None:
        """`group_scores` are one cache's, whose text they know.

        Raises
        ------
        ConfigError
            Another open cache has it.
        """
        owner = _OWNERS.get(id(self.group_scores), lambda: None)()
        if owner is not None and owner.is_open:
            raise ConfigError(
                "group_scores: must be of one open cache, and another one has them; give each an "
                "object of its own, or close the other first"
            )

    def refuse_leaving(self, call: str) -> None:
        """A saved cache or a fork would have the groups, and nothing to choose them by.

        Raises
        ------
        ValueError
            There are `group_scores`.
        """
        if self.group_scores is not None:
            raise ValueError(
                f"{call}: summary.kind must not be 'user' by group_scores, since what scores them "
                "is not saved; to_dynamic() copies the cache"
            )

    def belong_to(self, owner: Any) -> None:
        """`owner` has `group_scores` while its `is_open` holds; it keeps them alive."""
        for key in [key for key, known in _OWNERS.items() if known() is None]:
            del _OWNERS[key]
        if self.group_scores is not None:
            _OWNERS[id(self.group_scores)] = weakref.ref(owner)

    def open(self, config: SwapConfig, parts: ModelParts) -> None:
        """Tells them what they are used for."""
        layers = parts.shape.layers
        shape = CacheShape(
            layers=layers,
            exact_layers=tuple(i for i in range(layers) if config.is_exact(i)),
            heads=parts.shape.heads,
            kv_heads=parts.shape.kv_heads,
            head_dim=parts.shape.head_dim,
            group_tokens=config.selection.group_tokens,
            heads_apart=config.selection.heads == "per_head",
            dtype=parts.dtype,
            device=parts.device,
        )
        for plug_in in (self.group_scores, self.token_scores):
            if plug_in is not None:
                plug_in.open(shape)

    def wrap(
        self, session: Session, config: SwapConfig, room: int | None, padding: Callable[[], Padding]
    ) -> Session:
        """The session, asking them; arguments as `ScoredSession`'s."""
        if self.token_scores is not None:
            asked = (session, self.token_scores, config)
            sees = self.sees_attention
            session = AttendedSession(*asked, room, self.nbytes) if sees else ValuedSession(*asked)
        if self.group_scores is not None:
            session = ScoredSession(session, self.group_scores, config, room, padding)
        return session


# By an id, which is nobody else's while its owner lives: who has the object.
_OWNERS: dict[int, weakref.ref[Any]] = {}


def _check(name: str, plug_in: Any, setting: str, word: str | None) -> None:
    if plug_in is None and word == "user":
        raise ConfigError(
            f"{name}: must be given where {setting} is user, got None; pass an object made from "
            f"the classes of kvswap_torch.plug_ins, or another {setting}"
        )
    if plug_in is not None and word != "user":
        block, field = setting.split(".")
        raise ConfigError(
            f"{name}: must come with {setting}='user' in the config, got {setting}={word!r}; "
            f"say SwapConfig({block}={{{field!r}: 'user', ...}})"
        )
