"""A model, and its tokenizer, as every command loads them."""

from __future__ import annotations

import functools
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvswap_torch.cli.room import check_room
from kvswap_torch.errors import ConfigError, KVSwapError
from kvswap_torch.few_bits import BITS, check_format
from kvswap_torch.memory_size import parse_bytes
from kvswap_torch.saved_path import named

# Libraries that quantise weights -> the extra that installs them.
EXTRAS = {"torchao": "torchao", "bitsandbytes": "bitsandbytes"}
GGUF_SUFFIX = ".gguf"
MODEL = "a Hugging Face causal language model with its tokenizer"


def is_gguf(name: str) -> bool:
    """Whether a model's name is that of a GGUF file."""
    return name.endswith(GGUF_SUFFIX)


def device_of(name: Any) -> Any:
    """The torch device of that name.

    Raises
    ------
    ConfigError
        It is neither the CPU nor a CUDA device that is there.
    """
    import torch

    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise _wrong_device(name) from error
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type != "cuda":
        raise _wrong_device(name)
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (device.index or 0) >= there:
        sees = f"CUDA devices 0 to {there - 1}" if there else "no CUDA device"
        raise ConfigError(f"--device: must be there, but torch sees {sees}, got {str(name)!r}")
    return device


def _wrong_device(name: Any) -> ConfigError:
    return ConfigError(f"--device: must be cpu or cuda, or cuda:1, got {str(name)!r}")


def check_name(name: str, wanted: str) -> None:
    """That a model's name that can only be a path is one of a folder that is there.

    transformers asks its hub for any other name, and reports that the path is no such name.

    Raises
    ------
    ConfigError
        There is no such folder.
    """
    if is_gguf(name):
        return  # its own reader looks
    is_path = name.startswith(("/", ".", "~")) or name.count("/") > 1 or name == ""
    if is_path and not (name and Path(name).is_dir()):
        what = "not a folder" if name and Path(name).exists() else "not there"
        raise ConfigError(f"--model: must be {wanted}, got {name!r}, which is {what}")


def _place_of(name: str) -> tuple[str, dict[str, str]]:
    """As ``from_pretrained`` of configs and tokenizers takes it: of a GGUF file folder and name.

    Raises
    ------
    ConfigError, ImportError
        The file is none that can be loaded.
    """
    if not is_gguf(name):
        return name, {}
    from kvswap_torch.hf.gguf_file import read_header

    read_header(name)
    path = Path(name).absolute()
    return str(path.parent), {"gguf_file": path.name}


def load_config(name: str) -> Any:
    """A transformers model's config.

    Raises
    ------
    ConfigError
        When transformers cannot load it.
    """
    from transformers import AutoConfig

    return _stock(AutoConfig, name, "the folder or name of a Hugging Face model")


def _stock(auto: Any, name: str, wanted: str) -> Any:
    check_name(str(name), wanted)
    folder, file = _place_of(name)
    try:
        return auto.from_pretrained(folder, **file)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--model: must be {wanted}, got {name!r}: {error}") from error


def check_budget(name: str, dtype: str, weights: str | None, **arguments: Any) -> None:
    """That a `KVSwapCache` of these arguments has enough memory, before its model is loaded.

    Nothing is checked without ``kv_memory_bytes``.

    Raises
    ------
    BudgetError, ConfigError, UnsupportedModelError
        As the cache would, from the model's config.
    """
    if arguments.get("kv_memory_bytes") is None:
        return
    from kvswap_torch.hf.unloaded import computed_dtype, plan_cache, unloaded_model

    config = load_config(name)
    plan_cache(unloaded_model(config, computed_dtype(name, config, dtype, weights), weights),
               **arguments)  # fmt: skip


def check_saved_budget(
    saved: Path, kv_memory_bytes: int | str | None, max_context: int | None = None
) -> None:
    """That a saved cache can be opened with so much memory; its model is not needed.

    Raises
    ------
    BudgetError
    """
    if kv_memory_bytes is None:
        return
    import torch  # noqa: F401  loads the libraries that the module needs

    from kvswap_torch import _C

    memory = parse_bytes(kv_memory_bytes, "--kv-memory")
    _C.SavedCache(named(saved)).options(".", memory, max_context, 1, 0)


def load_model(
    name: str,
    dtype: str = "auto",
    device: Any = "cpu",
    *,
    say: Callable[[str], None] | None = None,
    wanted: str = MODEL,
    distributed: Any = None,
    weights: str | None = None,
    weights_memory: int | None = None,
    folder: str | Path | None = None,
) -> Any:
    """A transformers model, ready for inference.

    On the CPU its linear layers in half precision are ours (`kvswap_torch.half_linear`).

    Parameters
    ----------
    dtype
        ``auto`` (as it was saved), or a name such as ``float32``.
    say
        Is given a line where chunks are multiplied in fp32.
    wanted
        What `name` must be, for the error.
    distributed
        transformers' ``distributed_config``; each process then has its place already, and the
        products stay as they are.
    weights
        ``bf16``; ``int8`` or ``int4``, in which they are put one tensor after the other while they
        are loaded; None: as `dtype` says.
    weights_memory
        Most bytes of memory for weights: layers that do not fit are read from disk in each pass.
        None: all weights are in memory.
    folder
        On a disk, for weights that must be written again to be read so; None: the current one.

    Raises
    ------
    ConfigError
        When transformers cannot load it, its weights do not fit its config, there is no such
        device, its weights cannot be in that format or in this process's memory, or
        `weights_memory` is too small.
    StorageError
        `folder` lacks room.
    ImportError
        A library that its weights need is missing; names the extra that installs it.
    """
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    from kvswap_torch.half_linear import TOLD, replace_linear

    check_name(str(name), wanted)
    device = device_of(device)
    check_weights(name, dtype, device, weights, is_split=distributed is not None)
    if weights_memory is not None:
        check_on_disk(name, device, weights, is_split=distributed is not None)
    if device.type == "cpu" and distributed is None and not is_gguf(name):
        check_room(name, dtype, weights, weights_memory, load_config)
    logging.disable_progress_bar()  # it would stand above ours
    dtype = "bfloat16" if weights == "bf16" else dtype
    kind = dtype if dtype == "auto" else getattr(torch, dtype)
    plan = _plan(name, dtype, weights, weights_memory, say)
    split = {} if distributed is None else {"distributed_config": distributed}
    if weights in BITS:
        from kvswap_torch.hf.few_bit_loading import FewBitConfig

        split["quantization_config"] = FewBitConfig(weights)
    try:
        if is_gguf(name):
            from kvswap_torch.hf.gguf_file import load_gguf

            model = load_gguf(name, load_config(name), kind, **split)
        elif plan is not None:
            from kvswap_torch.hf.weights_memory import load_planned

            load = functools.partial(AutoModelForCausalLM.from_pretrained, name, dtype=kind)
            model = load_planned(load, plan, folder or ".")
        else:
            model = AutoModelForCausalLM.from_pretrained(name, dtype=kind, **split)
    except KVSwapError:
        raise
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ConfigError(f"--model: must be {wanted}, got {name!r}: {error}") from error
    if distributed is None:
        if plan is None:
            is_wide = replace_linear(model.to(device))
        else:
            from kvswap_torch.hf.weights_memory import make_ready

            is_wide = make_ready(model)
        if is_wide and say is not None:
            say(TOLD)
    return model.eval()


def _plan(
    name: str,
    dtype: str,
    weights: str | None,
    limit: int | None,
    say: Callable[[str], None] | None,
) -> Any:
    """Which layers are on disk; None: no layer is."""
    if limit is None:
        return None
    from kvswap_torch.hf.unloaded import computed_dtype, unloaded_model
    from kvswap_torch.hf.weights_memory import plan_weights, stored_as

    config = load_config(name)
    empty = unloaded_model(config, computed_dtype(name, config, dtype, weights))
    plan = plan_weights(empty, stored_as(name, config), limit)
    if say is not None:
        say("weights: all of them fit in --weights-memory" if plan is None else str(plan))
    return plan


def weights_memory_of(text: str | None) -> int | None:
    """Bytes of ``--weights-memory``; None: it was not given."""
    return None if text is None else parse_bytes(text, "--weights-memory")


def check_on_disk(name: str, device: Any, weights: str | None, is_split: bool = False) -> None:
    """That a model's layers can be read from disk in each pass.

    Raises
    ------
    ConfigError, ImportError
        They cannot; or the library that brings them is missing.
    """
    why = None
    if str(device) != "cpu":
        why = f"with --device {device}: layers on disk compute on the CPU"
    elif weights in BITS:
        why = f"with --weights {weights}: layers on disk are read as the checkpoint has them"
    elif is_gguf(name):
        why = "with a GGUF file, whose tensors are decoded while it is loaded"
    elif (method := _quantised_by(name)) is not None:
        why = f"with a model that is quantised by {method}: its layers are loaded whole"
    elif is_split:
        why = "where several processes run a model"
    if why is not None:
        raise ConfigError(f"--weights-memory: must be left out {why}, got {name}")
    from kvswap_torch.hf.weights_memory import check_accelerate

    check_accelerate("--weights-memory")


def check_weights(
    name: str, dtype: str, device: Any, weights: str | None, is_split: bool = False
) -> None:
    """That a model's weights can be in that format, and what they are in is known here.

    Raises
    ------
    ConfigError, ImportError
        As `load_model`.
    """
    check_format(weights, str(device))
    method = _quantised_by(name)
    if method in EXTRAS and importlib.util.find_spec(method) is None:
        raise ImportError(
            f"--model: {name} has weights quantised by {method}, which must be installed, and is "
            f"not; run: pip install 'kvswap_torch[{EXTRAS[method]}]'"
        )
    if is_gguf(name) and is_split:
        raise ConfigError(
            f"--model: must be a folder where several processes run a model, got {name}"
        )
    if weights is None:
        return
    if method is not None:
        raise ConfigError(
            f"--weights: must be left out with a model whose weights are quantised already, got "
            f"{weights} for {name}, which is quantised by {method}"
        )
    if weights == "bf16" and dtype not in ("auto", "bfloat16"):
        raise ConfigError(f"--weights bf16: must be left out with --dtype {dtype}")
    if weights in BITS and is_split:
        raise ConfigError(
            f"--weights {weights}: must be left out where several processes run a model"
        )


def _quantised_by(name: str) -> str | None:
    """The library, or method, that a model's config says its weights were quantised by."""
    try:
        config = json.loads((Path(name) / "config.json").read_text(encoding="utf-8"))
        return config["quantization_config"]["quant_method"]
    except (OSError, ValueError, LookupError, TypeError):
        return None  # none, or no config, which loading the model reports


def load_tokenizer(name: str, *, wanted: str = MODEL) -> Any:
    """Its tokenizer.

    Raises
    ------
    ConfigError
        When transformers cannot load it.
    """
    from transformers import AutoTokenizer

    return _stock(AutoTokenizer, name, wanted)
