"""`SwapConfig`: every decision the cache obeys, and the file it is kept in.

The tuner writes such a file and the cache reads it; nothing else connects the two. A file holds the
settings in blocks, the name of a projection file next to it, the model it is for, and one solution
per (batch, context) pair (KVSwap, appendix A.4).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvswap_torch.config import flat, json_file
from kvswap_torch.config.blocks import (
    Audit,
    Clusters,
    Memory,
    Prefetch,
    Selection,
    Storage,
    Summary,
)
from kvswap_torch.config.constraints import check_constraints
from kvswap_torch.config.derived import ConfigFacts
from kvswap_torch.config.fields import documented, plain
from kvswap_torch.config.json_file import CONFIG_VERSION
from kvswap_torch.config.model_check import check_model
from kvswap_torch.config.nested import (
    BLOCKS,
    OPTIONAL,
    PATHS,
    block_from,
    changed,
    default_score,
    mapping_of,
)
from kvswap_torch.config.retention import Retention
from kvswap_torch.config.solution import (
    ModelIdentity,
    Solution,
    adopt_plain_values,
    check_solutions,
)
from kvswap_torch.errors import ConfigError

if TYPE_CHECKING:
    from kvswap_torch.preset.definition import Shape

NOT_SOLVABLE = (
    "selection.heads",
    "summary.projection_file",
    "storage.max_disk_bytes",
    "storage.verify_checksums",
    "storage.io_timeout_seconds",
    "storage.wipe_on_close",
)
#: What a solution may set: a setting by its path, or a block that may be absent.
SOLVABLE = (*(path for path in PATHS if path not in NOT_SOLVABLE), *OPTIONAL)


@documented
@dataclass(frozen=True)
class SwapConfig(ConfigFacts):
    """What the tuner decides and the cache obeys. Checked on construction, then immutable.

    A block may be passed as a mapping, as a file has it: ``SwapConfig(summary={"rank": 16})``.
    """

    summary: Summary = plain(Summary(), "what stays in memory of the keys, to rank groups by")
    selection: Selection = plain(Selection(), "which tokens a step attends")
    prefetch: Prefetch = plain(Prefetch(), "reads for the next layer")
    memory: Memory = plain(Memory(), "pages of records in memory")
    storage: Storage = plain(Storage(), "how records are stored, read and written")
    retention: Retention | None = plain(
        None, "a policy, such as `SnapKV`: tokens that stay in memory. None: no retained tokens"
    )
    clusters: Clusters | None = plain(None, "clusters of similar keys. None: runs of tokens")
    audit: Audit | None = plain(None, "samples of what was not selected. None: none")
    model: ModelIdentity | None = plain(None, "the model it is for; None: any")
    provenance: Mapping[str, Any] = plain(dict, "how it was found: free-form, never interpreted")
    solutions: tuple[Solution, ...] = plain((), "one solution per (batch, context) pair")
    version: int = plain(CONFIG_VERSION, "of the file format")

    source: Path | None = field(default=None, compare=False, repr=False, kw_only=True)

    def __post_init__(self) -> None:
        for name in BLOCKS:
            object.__setattr__(self, name, block_from(name, getattr(self, name)))
        if self.selection.score is None:
            score = default_score(self.summary.kind)
            selection = dataclasses.replace(self.selection, score=score)
            object.__setattr__(self, "selection", selection)
        adopt_plain_values(self)
        if self.version != CONFIG_VERSION or type(self.version) is not int:
            raise ConfigError(
                f"version: this kvswap_torch reads version {CONFIG_VERSION}, got "
                f"{self.version!r}; write the config again with its tuner or update kvswap_torch"
            )
        check_constraints(self)
        check_solutions(self.solutions, SOLVABLE, self._with)

    def with_settings(self, settings: Mapping[str, Any]) -> SwapConfig:
        """A config with other settings, by their paths: ``{"selection.top_k_groups": 128}``.

        A block that is absent is made where one of its settings is named; ``{"retention": None}``
        takes one away. Another ``retention.policy`` starts from that policy's defaults.

        Raises
        ------
        ConfigError
            For a path that no setting has, or a value out of range.
        """
        made = changed(mapping_of(self), settings)
        blocks: dict[str, Any] = {
            name: made.get(name, None if name in OPTIONAL else {}) for name in BLOCKS
        }
        return dataclasses.replace(self, **blocks)

    def check_model(self, identity: ModelIdentity) -> None:
        """Refuses another model's config.

        Raises
        ------
        ConfigError
            Naming each thing that differs; also for a rank that the model's keys are too narrow
            for, one rank a layer for another number of layers, or a layer that it does not have.
        """
        check_model(self, identity)

    @classmethod
    def preset(
        cls,
        name: str,
        settings: Mapping[str, Any] | None = None,
        *,
        shape: Shape | None = None,
        **overrides: Any,
    ) -> SwapConfig:
        """A published system's settings, plain ones; `kvswap_torch.presets()` lists them.

        Parameters
        ----------
        settings
            In the place of the preset's, by their paths: ``{"selection.top_k_groups": 128}``.
        shape
            What settings follow from; None: that of ``model``, or of a Llama of 8B parameters.
            ``KVSwapCache(preset=)`` knows its model, and its disk.
        overrides
            ``model``, a `ModelIdentity`.

        Raises
        ------
        ConfigError
            Unknown, or without a part or a setting that it needs; for an override that is no
            setting, that would make another method of it, or that its method does not have.
        """
        from kvswap_torch.preset.definition import Shape
        from kvswap_torch.preset.registry import find

        chosen = find(name)
        if isinstance(settings, Shape):  # as it was called with before version 2
            settings, shape = None, settings
        if shape is None:
            shape = Shape.of(overrides.get("model"))
        return chosen.config(cls, shape, {**(settings or {}), **overrides})

    @classmethod
    def load(cls, path: str | Path) -> SwapConfig:
        """Reads a config file, of version 2 or 1.

        Raises
        ------
        ConfigError
            Missing file, corrupt JSON, unknown field or version, or a value out of range; names the
            file, the field and what came.
        """
        return json_file.load(cls, Path(path))

    def save(self, path: str | Path, full: bool = False) -> SwapConfig:
        """Writes the config whole or not at all; equal configs give equal bytes.

        Parameters
        ----------
        full
            Every setting; otherwise what differs from its default.

        Returns
        -------
        SwapConfig
            The same config, knowing its file.
        """
        json_file.save(self, Path(path), full)
        return dataclasses.replace(self, source=Path(path))


flat.install(SwapConfig)
