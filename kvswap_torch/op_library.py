"""The compiled ops as torch has them: loaded once, with their shapes for tracing."""

from __future__ import annotations

import torch

from kvswap_torch.native import require_library

torch.ops.load_library(require_library())

from kvswap_torch import op_fakes  # noqa: E402,F401  the ops must be there first

compiled = torch.ops.kvswap_torch
