"""llama.cpp as a contender: the same weights as GGUF, its own KV cache filled with our K and V.

It is an optional peer: `make peers` builds the pinned `llama-cpp-python` from its sources for this
processor. A context's cache is filled by handing it a saved state of our own making, so no prefill
is needed; `fill` asks the context what it then holds.
"""

from __future__ import annotations

import ctypes
import os
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from bench.contenders import ROOM_TOKENS, SELECTED_TOKENS, chunks
from bench.shapes import Shape, make_config
from bench.side_by_side.plan import LLAMA, NO_LLAMA, Cell

F16, Q8_0 = 1, 8  # of ggml's types
Q8_BLOCK = 32
V_BLOCK = 64  # channels of V that are turned together; of K all of a head


class LlamaContender:
    """Steps as `bench.contenders.Contender` does: a token of every sequence.

    Raises
    ------
    ImportError
        llama.cpp, or what writes its files, is not installed.
    RuntimeError
        It does not take the model or the state.
    """

    def __init__(self, key: str, model: Any, cell: Cell):
        self.lib, self.name, self.shape, self.batch = load_library(), key, cell.shape, cell.batch
        self.type = Q8_0 if LLAMA[key] == "q8_0" else F16
        self.tokens = SELECTED_TOKENS if key == "llama_floor" else cell.context
        self.context = self._open(model, self.tokens + ROOM_TOKENS)
        self.rows = self.lib.llama_n_ctx(self.context)
        self.position, self.next = self.tokens, [7] * self.batch
        self.request = self.lib.llama_batch_init(self.batch, 0, 1)
        self.seconds: list[float] = []
        self._fill()

    @property
    def nbytes(self) -> int:
        """Of its KV cache, all rows that it has room for."""
        return 2 * self.shape.layers * self.rows * self._row_bytes

    @property
    def _row_bytes(self) -> int:
        width = self.shape.kv_heads * self.shape.head_dim
        return width * 2 if self.type == F16 else width // Q8_BLOCK * (2 + Q8_BLOCK)

    def step(self) -> None:
        self._request()
        began = time.perf_counter()
        result = self.lib.llama_decode(self.context, self.request)
        self.lib.llama_synchronize(self.context)
        self.seconds.append(time.perf_counter() - began)
        if result != 0:
            raise RuntimeError(f"llama_decode: must return 0, got {result}")
        self.position += 1
        self.next = [int(row.argmax()) for row in self.logits()]

    def logits(self) -> np.ndarray:
        """``[batch, vocabulary]`` f32 of the step before."""
        width = make_config(self.shape, 0).vocab_size
        rows = (self.lib.llama_get_logits_ith(self.context, row) for row in range(self.batch))
        return np.stack([np.ctypeslib.as_array(row, (width,)).copy() for row in rows])

    def close(self) -> None:
        self.lib.llama_batch_free(self.request)
        self.lib.llama_free(self.context)

    def about(self) -> dict[str, Any]:
        """What the numbers are of: version, compiler's choices, weights, KV type."""
        return {
            "llama_cpp_python": self.lib.__version__,
            "system": self.lib.llama_print_system_info().decode(),
            "weights": "BF16",
            "kv_type": LLAMA[self.name],
        }

    def _open(self, model: Any, tokens: int) -> Any:
        lib, parameters = self.lib, self.lib.llama_context_default_params()
        parameters.n_ctx = tokens * self.batch
        parameters.n_seq_max = parameters.n_batch = parameters.n_ubatch = self.batch
        parameters.n_threads = parameters.n_threads_batch = len(os.sched_getaffinity(0))
        parameters.type_k = parameters.type_v = self.type
        parameters.flash_attn_type = lib.LLAMA_FLASH_ATTN_TYPE_ENABLED
        parameters.kv_unified = False
        parameters.no_perf = True
        context = lib.llama_init_from_model(model, parameters)
        if not context:
            raise RuntimeError(f"llama.cpp refuses a context of {tokens} x {self.batch} tokens")
        return context

    def _request(self) -> None:
        self.request.n_tokens = self.batch
        for row in range(self.batch):
            self.request.token[row] = self.next[row]
            self.request.pos[row] = self.position
            self.request.n_seq_id[row] = 1
            self.request.seq_id[row][0] = row
            self.request.logits[row] = 1

    def _fill(self) -> None:
        begin = self._begin_of_a_state()
        states = states_of(self.shape, self.batch, self.tokens, self.type, begin)
        memory = self.lib.llama_get_memory(self.context)
        for sequence, state in enumerate(states):
            source = (ctypes.c_uint8 * len(state)).from_buffer(state)
            taken = self.lib.llama_state_seq_set_data(self.context, source, len(state), sequence)
            last = self.lib.llama_memory_seq_pos_max(memory, sequence)
            if (taken, last) != (len(state), self.tokens - 1):
                raise RuntimeError(
                    f"llama.cpp takes a state of {len(state)} bytes up to token {self.tokens - 1}, "
                    f"took {taken} up to {last}: its format is another in this version"
                )

    def _begin_of_a_state(self) -> bytes:
        """The magic number and a sequence, of a state that llama.cpp writes itself."""
        position, self.position = self.position, 0
        self.step()
        size = self.lib.llama_state_seq_get_size(self.context, 0)
        state = (ctypes.c_uint8 * size)()
        self.lib.llama_state_seq_get_data(self.context, state, size, 0)
        self.lib.llama_memory_clear(self.lib.llama_get_memory(self.context), True)
        self.position, self.next = position, [7] * self.batch
        self.seconds.clear()
        return bytes(state[:8])


def load_library() -> Any:
    try:
        import llama_cpp
    except ImportError as error:
        raise ImportError(f"{NO_LLAMA} ({error})") from error
    llama_cpp.llama_backend_init()
    return llama_cpp


def open_model(path: Path) -> Any:
    lib = load_library()
    parameters = lib.llama_model_default_params()
    parameters.n_gpu_layers = 0
    parameters.use_mmap = True
    model = lib.llama_model_load_from_file(str(path).encode(), parameters)
    if not model:
        raise RuntimeError(f"{path}: llama.cpp does not take this file")
    return model


def states_of(
    shape: Shape, batch: int, tokens: int, kind: int, begin: bytes
) -> Iterator[bytearray]:
    """Of each sequence: what `llama_state_seq_get_data` would write of `tokens` tokens.

    Which tokens there are, then every layer's keys and every layer's values, a row a token.
    """
    cells = np.zeros((tokens, 3), dtype=np.int32)
    cells[:, 0], cells[:, 1] = np.arange(tokens), 1
    for sequence in range(batch):
        sides: tuple[list[bytes], list[bytes]] = ([], [])
        for layer in range(shape.layers):
            pair = _rows(shape, batch, tokens, layer, sequence)
            for side, rows, block in zip(sides, pair, (shape.head_dim, V_BLOCK), strict=True):
                packed = q8_0(turned(rows, block)) if kind == Q8_0 else rows.tobytes()
                side.append(struct.pack("<iQ", kind, len(packed) // tokens) + packed)
        counts = struct.pack("<II", batch, tokens)
        layers = struct.pack("<II", 0, shape.layers)
        others = struct.pack("<I", 0) * (batch - 1)  # streams of other sequences are empty
        parts = (begin, counts, cells.tobytes(), layers, *sides[0], *sides[1], others)
        yield bytearray(b"".join(parts))


def _rows(
    shape: Shape, batch: int, tokens: int, layer: int, sequence: int
) -> tuple[np.ndarray, np.ndarray]:
    """A layer's keys and values of one sequence, ``[tokens, kv_heads * head_dim]`` f16 each."""
    sides: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    for pair in chunks(shape, batch, tokens, layer):
        for side, part in zip(sides, pair, strict=True):
            side.append(part[sequence].transpose(0, 1).flatten(1).half())
    keys, values = (torch.cat(side).numpy() for side in sides)
    return keys, values


def turned(rows: np.ndarray, block: int) -> np.ndarray:
    """Each block of channels times the normalised Walsh-Hadamard matrix of its size, f32.

    llama.cpp keeps K and V so where their cache is quantised, and turns queries and results.
    """
    matrix = np.ones((1, 1), dtype=np.float32)
    while len(matrix) < block:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]]) / np.float32(np.sqrt(2))
    return (rows.astype(np.float32).reshape(-1, block) @ matrix).reshape(rows.shape)


def q8_0(rows: np.ndarray) -> bytes:
    """ggml's Q8_0: of each 32 numbers an f16 scale, largest magnitude over 127, and 32 int8."""
    blocks = rows.astype(np.float32).reshape(-1, Q8_BLOCK)
    scales = np.abs(blocks).max(axis=1, keepdims=True) / 127
    steps = np.where(scales > 0, blocks / np.where(scales > 0, scales, 1), 0)
    packed = np.empty((len(blocks), 2 + Q8_BLOCK), dtype=np.uint8)
    packed[:, :2] = scales.astype(np.float16).view(np.uint8)
    packed[:, 2:] = np.rint(steps).astype(np.int8).view(np.uint8)
    return packed.tobytes()


def gguf_file(weights: Path, shape: Shape) -> Path:
    """The safetensors file's weights for llama.cpp, in bf16, norms in fp32; written when not there.

    Raises
    ------
    ImportError
        The package gguf is not installed.
    """
    path = weights.with_suffix(".gguf")
    if not path.exists():
        unfinished = path.with_suffix(".gguf.part")
        _write_gguf(unfinished, load_file(weights), shape)
        os.replace(unfinished, path)
    return path


def _write_gguf(path: Path, tensors: dict[str, torch.Tensor], shape: Shape) -> None:
    try:
        import gguf
    except ImportError as error:
        raise ImportError(f"{NO_LLAMA} ({error})") from error
    config = make_config(shape, 0)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(shape.layers)
    writer.add_context_length(1 << 20)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.feed_forward)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("none")
    for name, tensor in tensors.items():
        tensor = _paired(name, tensor, shape)
        if tensor.ndim == 1:
            writer.add_tensor(_gguf_name(name), tensor.float().numpy())
        else:
            raw = tensor.bfloat16().contiguous().view(torch.uint8).numpy()
            kind = gguf.GGMLQuantizationType.BF16
            writer.add_tensor(_gguf_name(name), raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _gguf_name(name: str) -> str:
    names = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    stem = name.removesuffix(".weight")
    if stem.startswith("model.layers."):
        layer, part = stem.removeprefix("model.layers.").split(".", 1)
        return f"blk.{layer}.{names[part]}.weight"
    return f"{names[stem]}.weight"


def _paired(name: str, tensor: torch.Tensor, shape: Shape) -> torch.Tensor:
    """Rows of queries and keys as llama.cpp turns them: neighbours, where ours are halves."""
    heads = {"q_proj": shape.heads, "k_proj": shape.kv_heads}
    part = name.split(".")[-2]
    if part not in heads:
        return tensor
    rows, width = tensor.shape
    split = tensor.view(heads[part], 2, rows // heads[part] // 2, width)
    return split.transpose(1, 2).reshape(rows, width)
