"""Models in GGUF files: each tensor is dequantised when its turn to be loaded comes.

What the file says of the model, and which tensor is which, is read by transformers; blocks are
decoded by the `gguf` package. What is loaded is a model of transformers like any other, whose
linear layers may have few bits again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvswap_torch.errors import ConfigError

MISSING = (
    "--model: a GGUF file needs the package gguf, which must be installed, and is not; run: pip "
    "install 'kvswap_torch[gguf]'"
)


def read_header(name: str | Path) -> Any:
    """A `gguf.GGUFReader` of a whole file of an architecture that transformers knows.

    Raises
    ------
    ConfigError
        The file is missing, none of GGUF, cut short, or of another architecture.
    ImportError
        The package is missing; names the extra.
    """
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise ImportError(MISSING) from error
    from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES

    path = Path(name)
    if not path.is_file():
        raise ConfigError(f"--model: must be a GGUF file, got {path}, which is not there")
    size = path.stat().st_size
    try:
        reader = GGUFReader(path)
        ends = [int(tensor.data_offset) + int(tensor.n_bytes) for tensor in reader.tensors]
        architecture = bytes(reader.fields["general.architecture"].parts[-1]).decode()
    except (ValueError, IndexError, KeyError, OverflowError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--model: must be a whole GGUF file, got {path} of {size:,} bytes, which is damaged "
            f"or cut short ({error}); copy it again"
        ) from error
    if (needed := max(ends, default=0)) > size:
        raise ConfigError(
            f"--model: must be a whole GGUF file, got {path} of {size:,} bytes, whose tensors end "
            f"at {needed:,}; copy it again"
        )
    known = {each.replace("_", "") for each in GGUF_SUPPORTED_ARCHITECTURES}
    if architecture.replace("-", "").replace("_", "") not in known:
        raise ConfigError(
            f"--model: must be of an architecture that transformers reads from GGUF, got {path} of "
            f"{architecture!r}; take the model's own folder"
        )
    return reader


class LazyTensor:
    """One tensor of a file as transformers' loader takes those of safetensors: read when asked."""

    def __init__(self, tensor: Any, processed: Any):
        self._tensor, self._processed = tensor, processed
        self.shape = torch.Size(int(size) for size in reversed(tensor.shape))

    def __getitem__(self, index: Any) -> torch.Tensor:
        from gguf import dequantize

        values = dequantize(self._tensor.data, self._tensor.tensor_type)
        made = self._processed(values, self._tensor.name)
        return torch.from_numpy(np.require(made, requirements=["C", "W", "O"]))[index]

    def get_shape(self) -> list[int]:
        return list(self.shape)

    def get_dtype(self) -> str:
        return "F32"


def stored_dtype(name: str | Path) -> torch.dtype:
    """What ``dtype="auto"`` comes to: the file's type of 16 bits, or fp32; of blocks bf16."""
    types = {tensor.tensor_type.name for tensor in read_header(name).tensors}
    if types <= {"F32"}:
        return torch.float32
    return torch.float16 if types <= {"F32", "F16"} else torch.bfloat16


def load_gguf(
    name: str | Path, config: Any = None, dtype: torch.dtype | str = "auto", **named: Any
) -> Any:
    """A model of a file.

    Parameters
    ----------
    config
        As transformers reads it from the file; None: it is read here.
    dtype
        Of the weights, unless they have few bits.
    named
        Goes to ``from_pretrained``.

    Raises
    ------
    ConfigError, ImportError
        As `read_header`; and where the file lacks a tensor.
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import (
        TENSOR_PROCESSORS,
        TensorProcessor,
        get_gguf_hf_weights_map,
    )

    reader = read_header(name)
    dtype = stored_dtype(name) if dtype == "auto" else dtype
    if config is None:
        path = Path(name).absolute()
        config = AutoConfig.from_pretrained(str(path.parent), gguf_file=path.name)
    architecture = bytes(reader.fields["general.architecture"].parts[-1]).decode()
    processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=config.to_dict())
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config, dtype=dtype)
    names = get_gguf_hf_weights_map(empty, processor)

    def processed(values: Any, tensor_name: str) -> Any:
        made = processor.process(weights=values, name=tensor_name, tensor_key_mapping=names,
                                 parsed_parameters={"tensors": {}})  # fmt: skip
        return made.weights

    tensors = {
        names[tensor.name]: LazyTensor(tensor, processed)
        for tensor in reader.tensors
        if tensor.name in names
    }
    shared = set(getattr(empty, "all_tied_weights_keys", None) or ())
    missing = sorted({each for each, _ in empty.named_parameters()} - tensors.keys() - shared)
    if missing:
        raise ConfigError(
            f"--model: must have all of the model's tensors, got {Path(name)} without {missing[0]}"
            f"{f' and {len(missing) - 1} others' if missing[1:] else ''}"
        )
    model = type(empty).from_pretrained(
        None, config=config, state_dict=tensors, dtype=dtype, **named
    )
    model.config._name_or_path = str(Path(name).absolute())
    return model
