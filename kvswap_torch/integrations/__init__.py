"""Doors from other programs: ``generate(custom_generate=...)``, few-bit weights, evaluations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvswap_torch.errors import ConfigError


def generate_folder() -> str:
    """The folder that ``model.generate(custom_generate=...)`` takes, to open a cache by itself.

    ::

        model.generate(
            **inputs, max_new_tokens=200, custom_generate=generate_folder(), trust_remote_code=True,
            kv_path="/fast/disk", kv_memory_bytes="256MiB",
        )

    Everything but the names of `kvswap_torch.integrations.generating.generate` is ``generate()``'s
    own. transformers runs no code of a folder without ``trust_remote_code=True``.
    """
    return str(Path(__file__).resolve().parent / "generate")


def few_bits(weights: str) -> Any:
    """What ``from_pretrained(quantization_config=...)`` takes, for linear layers in few bits.

    ::

        model = AutoModelForCausalLM.from_pretrained("DIR", quantization_config=few_bits("int4"))

    Weights are put in that format one tensor after the other while they are loaded, on the CPU.

    Parameters
    ----------
    weights
        ``int8`` or ``int4``; see `kvswap_torch.few_bits`.

    Raises
    ------
    ConfigError
        There is no such format, or the processor has no instructions for it.
    """
    from kvswap_torch.few_bits import BITS, check_format
    from kvswap_torch.hf.few_bit_loading import FewBitConfig

    check_format(weights)
    if weights not in BITS:
        raise ConfigError(f"few_bits: must be one of {', '.join(BITS)}, got {weights!r}")
    return FewBitConfig(weights)


def load_gguf(path: str | Path, weights: str | None = None, dtype: Any = "auto") -> Any:
    """A transformers model of a GGUF file, each tensor dequantised when its turn comes.

    Parameters
    ----------
    path
        The file. Its tokenizer is ``AutoTokenizer.from_pretrained(folder, gguf_file=name)``.
    weights
        ``int8`` or ``int4``: linear layers have so few bits again; None: they have `dtype`.
    dtype
        ``auto``: bf16, or the file's own type where it has no blocks.

    Raises
    ------
    ConfigError
        The file is damaged, cut short or of an unknown architecture.
    ImportError
        The package gguf is missing; names the extra.
    """
    from kvswap_torch.hf import gguf_file

    named = {} if weights is None else {"quantization_config": few_bits(weights)}
    return gguf_file.load_gguf(path, dtype=dtype, **named).eval()


def load_on_disk(
    name: str | Path,
    weights_memory: int | str,
    dtype: Any = "auto",
    folder: str | Path = ".",
) -> Any:
    """A transformers model on the CPU whose weights take at most so much memory.

    As many layers as fit are in memory. The others are read from disk in each forward pass, one
    ahead of the layer that computes; `CacheStats.weights_bytes_read` counts them.

    Parameters
    ----------
    name
        Folder of a model, or its name on the hub.
    weights_memory
        Most bytes of memory for weights, buffers for layers on disk included: an int, or like
        ``"6GiB"``. If all weights fit, they are in memory.
    dtype
        Of weights, as ``from_pretrained`` takes it; ``auto``: as they were saved.
    folder
        On a disk. Checkpoints whose tensors are not the model's (most mixtures of experts, files
        that are not safetensors) are written there again; the copy is gone with the model.

    Raises
    ------
    ConfigError
        `weights_memory` is too small, and names the least; or the model's weights are in few bits,
        or it is a GGUF file, or no folder.
    OSError, ValueError
        transformers cannot load it.
    StorageError
        `folder` lacks room.
    UnsupportedModelError
        Its KV cache cannot be on disk either.
    ImportError
        The package accelerate is missing; names the extra.
    """
    from kvswap_torch.hf.weights_memory import load_within
    from kvswap_torch.memory_size import parse_bytes

    return load_within(str(name), parse_bytes(weights_memory, "weights_memory"), dtype, folder)
