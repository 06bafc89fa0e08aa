"""``--tensor-parallel`` and ``--pipeline``: one model over the processes that torchrun started."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

from rich.console import Console

from kvswap_torch.errors import ConfigError


def distributed_config(tensor: int, pipeline: int) -> Any:
    """transformers' description of the split; None for one process.

    Parameters
    ----------
    tensor, pipeline
        Processes that share each layer's heads, and groups of processes that share the layers.

    Raises
    ------
    ConfigError
        When torchrun did not start as many processes, or accelerate is missing.
    """
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    wanted = tensor * pipeline
    if wanted != processes:
        raise ConfigError(
            "--tensor-parallel, --pipeline: their product must be the number of processes, got "
            f"{tensor} x {pipeline} with {processes}; start them with: torchrun --standalone "
            f"--nproc-per-node {wanted} -m kvswap_torch generate ..."
        )
    if wanted == 1:
        return None
    if importlib.util.find_spec("accelerate") is None:
        raise ConfigError(
            "--tensor-parallel, --pipeline: need the package accelerate, which is not installed; "
            "pip install 'kvswap_torch[distributed]'"
        )
    if tensor > 1 and pipeline > 1:
        raise ConfigError(
            "--tensor-parallel, --pipeline: one of them must be 1, since transformers cannot load "
            f"a model that splits both, got {tensor} and {pipeline}"
        )
    from transformers.distributed import DistributedConfig

    return DistributedConfig(tp_size=tensor, pp_size=pipeline)


def is_first() -> bool:
    """Whether this process is the one that talks to the user."""
    return int(os.environ.get("RANK", "0")) == 0


def quiet_console(console: Console) -> Console:
    """`console`, or one that says nothing where another process talks to the user."""
    return console if is_first() else Console(quiet=True)
