"""What a cache obeys: `SwapConfig`, its blocks of settings, its file."""

from __future__ import annotations

from kvswap_torch.config.blocks import (
    Audit,
    Clusters,
    Memory,
    Prefetch,
    Selection,
    Storage,
    Summary,
)
from kvswap_torch.config.json_file import CONFIG_VERSION
from kvswap_torch.config.nested import PATHS
from kvswap_torch.config.retention import (
    ARKV,
    CAKE,
    H2O,
    POLICIES,
    CompressKV,
    KeyOutliers,
    RecentOnly,
    Retention,
    SnapKV,
    UserRetention,
)
from kvswap_torch.config.solution import ModelIdentity, Solution
from kvswap_torch.config.swap_config import SOLVABLE, SwapConfig

__all__ = [
    "ARKV",
    "CAKE",
    "CONFIG_VERSION",
    "H2O",
    "PATHS",
    "POLICIES",
    "SOLVABLE",
    "Audit",
    "Clusters",
    "CompressKV",
    "KeyOutliers",
    "Memory",
    "ModelIdentity",
    "Prefetch",
    "RecentOnly",
    "Retention",
    "Selection",
    "SnapKV",
    "Solution",
    "Storage",
    "Summary",
    "SwapConfig",
    "UserRetention",
]
