"""What published code chooses of, or keeps of, the prompts of `models`.

By hand, from checked-out repositories, with `scikit-learn` beside what the project needs:

    python -m tests.oracles.published --quest Quest --loki loki --infinigen InfiniGen \\
        --shadowkv ShadowKV --arkv ARKV

The newest query asks for tokens of the 128 first, which our tail has left; every query head is a KV
head, since the systems differ in how they join several. It writes `published.json` beside this
file, which `tests/python/test_oracles.py` compares with what our presets choose. Numbers alone are
stored.
"""

from __future__ import annotations

import argparse
import json
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers.modeling_utils import AttentionInterface

from tests.oracles import arkv, models
from tests.oracles.repositories import head_of, module_at, versions_of

TOKENS = 160  # of the prompt
FAR = 128  # of them may be chosen
CHOSEN = 24  # tokens of each head
PAGES, PAGE = 3, 16  # of Quest
CHUNK, OUTLIERS = 8, 4  # of ShadowKV: tokens, and chunks of each head
KEPT = 80  # tokens of each head that ARKV leaves, its window among them
COLUMNS = 19  # of 64: InfiniGen's ratio of 0.3
MODELS = ("llama-mha", "qwen3-mha")


def queries_and_keys(name: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Of each layer after RoPE: ``[1, heads, TOKENS, HEAD_DIM]`` twice."""
    seen = []

    def take(module, query, key, value, mask, **others):
        seen.append((query, key))
        weights = query @ key.mT * query.shape[-1] ** -0.5 + torch.full(
            (TOKENS, TOKENS), -1e9
        ).triu(1)
        return (weights.softmax(-1) @ value).transpose(1, 2).contiguous(), None

    AttentionInterface.register("of_oracles", take)
    with torch.no_grad():
        models.model_of(name, "of_oracles")(models.prompt_of(name, TOKENS))
    return seen


def of_quest(folder: Path) -> Callable[[torch.Tensor, torch.Tensor], list[list[int]]]:
    """Pages that its attention does not mask out, of each head."""
    code = module_at(folder / "evaluation" / "quest_attention.py")
    code.apply_rotary_pos_emb = lambda query, keys, *others: (query, keys)  # they are turned
    masks: list[torch.Tensor] = []
    choose = code.local_heavy_hitter_mask

    def told(*arguments: Any) -> torch.Tensor:
        masks.append(choose(*arguments))
        return masks[-1]

    code.local_heavy_hitter_mask = told

    def pages(query: torch.Tensor, keys: torch.Tensor) -> list[list[int]]:
        heads, dim = query.shape[1], query.shape[3]
        one = query[:, :, -1:]
        itself = types.SimpleNamespace(
            layer_id=2,
            num_heads=heads,
            num_key_value_heads=heads,
            num_key_value_groups=1,
            head_dim=dim,
            hidden_size=heads * dim,
            chunk_size=PAGE,
            token_budget=PAGES * PAGE,
            q_proj=lambda hidden: one.transpose(1, 2).flatten(2),
            k_proj=lambda hidden: keys[:, :, FAR - 1 : FAR].transpose(1, 2).flatten(2),
            v_proj=lambda hidden: torch.zeros(1, 1, heads * dim),
            rotary_emb=lambda values, positions: (None, None),
            o_proj=lambda output: output,
        )
        before = keys[:, :, : FAR - 1]
        code.forward(
            itself,
            torch.zeros(1, 1, heads * dim),
            position_ids=torch.full((1, 1), FAR - 1),
            past_key_value=(before, torch.zeros_like(before)),
        )
        marked = masks.pop()[0, :, 0].unflatten(1, (-1, PAGE)).any(dim=2)
        return [torch.where(head)[0].tolist() for head in marked]

    return pages


def of_loki(folder: Path) -> Callable[[torch.Tensor, torch.Tensor], list[list[int]]]:
    """Tokens that its attention does not mask out, by a quarter of the components."""
    beside = types.ModuleType("methods")
    beside.LOGGER = None  # type: ignore[attr-defined]
    code = module_at(folder / "methods" / "pca_topk" / "utils.py", methods=beside)
    from sklearn.decomposition import PCA

    def tokens(query: torch.Tensor, keys: torch.Tensor) -> list[list[int]]:
        parts = [torch.from_numpy(PCA().fit(head.numpy()).components_).T for head in keys[0]]
        whole = torch.stack(parts)[None]
        rank = models.HEAD_DIM // 4
        far, one = keys[:, :, :FAR], query[:, :, -1:]
        args = types.SimpleNamespace()
        weights = one @ far.mT
        masked, _ = code.mask_attn_pca_topk(
            args, 2, weights, None, one, far, whole, whole[..., :rank], rank, CHOSEN
        )
        return [torch.where(head.isfinite())[0].tolist() for head in masked[0, :, 0]]

    return tokens


def of_infinigen(folder: Path) -> Callable[[torch.Tensor, torch.Tensor], list[list[int]]]:
    """Tokens that its speculation fetches: so many of each head, whatever they are paid."""
    room = folder / "speedup" / "infinigen" / "infinigen"
    names = ("skewing", "partial_weight_generation", "kv_selection")
    skewing, columns, selection = (module_at(room / f"{name}_controller.py") for name in names)

    def skewed(query: torch.Tensor, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        heads, dim = query.shape[1], query.shape[3]
        eye = torch.eye(heads * dim).half()  # the code multiplies halves
        asked, own = query.transpose(1, 2), keys.transpose(1, 2)
        turn, _ = skewing.skew(asked, own, eye.clone(), eye.clone(), heads, dim)
        return asked.flatten(2) @ turn.float().T, own.flatten(2) @ turn.float().T

    def tokens(query: torch.Tensor, keys: torch.Tensor) -> list[list[int]]:
        heads, dim = query.shape[1], query.shape[3]
        asked, own = skewed(query, keys)
        index = columns.partial_weight_index_generation(asked, heads, dim, 0.3)
        assert index.shape[2] == COLUMNS, index.shape
        far = own[0, :FAR].unflatten(1, (heads, dim))
        cache = columns.set_partial_cache(far, index, heads, dim)
        weight = columns.set_partial_weight(torch.eye(heads * dim), index, heads, dim)
        chosen = selection.speculate_attention(asked[:, -1:], weight, cache, heads, 1e9, CHOSEN)
        return [sorted(head.tolist()) for head in chosen[:, 0].T]

    return tokens


def of_shadowkv(folder: Path) -> Callable[[torch.Tensor, torch.Tensor], dict[str, Any]]:
    """Chunks of each head that stay since their mean fits them badly, and those it asks for."""
    beside = ("models", "models.tensor_op", "kernels")
    stubs = {name: types.ModuleType(name) for name in beside}
    stubs["models.tensor_op"].batch_gather_gemm_rotary_pos_emb_cuda = None  # type: ignore[attr-defined]
    stubs["kernels"].shadowkv = None  # type: ignore[attr-defined]
    code = module_at(folder / "models" / "kv_cache.py", **stubs)

    def chunks(query: torch.Tensor, keys: torch.Tensor) -> dict[str, Any]:
        heads, length, dim = keys.shape[1:]
        cache = object.__new__(code.ShadowKVCache)  # its own makes buffers on a GPU
        sizes = {"batch_size": 1, "num_layers": 2, "num_key_value_groups": 1}
        sizes |= {"num_key_value_heads": heads, "head_dim": dim, "chunk_size": CHUNK}
        sizes |= {"local_chunk": (length - FAR) // CHUNK, "outlier_chunk": OUTLIERS}
        sizes |= {"sparse_budget": CHOSEN, "device": "cpu", "dtype": keys.dtype, "kv_offset": 0}
        for name, size in sizes.items():
            setattr(cache, name, size)
        room = torch.zeros(2, 1, heads, 2 * length, dim)
        cache.v_cache_cpu, cache.k_cache_buffer, cache.v_cache_buffer = room, room, room.clone()
        cache.selected_chunk_idx = torch.zeros(2, 1, heads, CHOSEN // CHUNK, dtype=torch.long)
        cache.prefill_kv_cache(torch.zeros_like(keys), 0, keys)
        cache.get_retrieval_position_ids(0, query[:, :, -1:])
        landmarks = cache.k_landmark_idx[0, 0].tolist()
        return {
            "outliers": [sorted({*range(cache.chunks)} - {*head}) for head in landmarks],
            "chosen": [sorted(head) for head in cache.selected_chunk_idx[0, 0].tolist()],
        }

    return chunks


def of_arkv(folder: Path) -> Callable[[torch.Tensor, torch.Tensor], list[list[int]]]:
    return arkv.of_prompt(folder, KEPT)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    systems = {
        "quest": of_quest,
        "loki": of_loki,
        "infinigen": of_infinigen,
        "shadowkv": of_shadowkv,
        "arkv": of_arkv,
    }
    for name in systems:
        parser.add_argument(f"--{name}", type=Path, required=True, help="its repository")
    folders = vars(parser.parse_args())
    ask = {name: system(folders[name]) for name, system in systems.items()}
    told: dict[str, Any] = {
        "command": "python -m tests.oracles.published",
        "commits": {name: head_of(folder) for name, folder in folders.items()},
        "versions": versions_of("torch", "transformers", "scikit-learn"),
    }
    for name in MODELS:
        layers = queries_and_keys(name)
        told[name] = {
            system: [choose(*layer) for layer in layers] for system, choose in ask.items()
        }
    path = Path(__file__).with_name("published.json")
    path.write_text(json.dumps(told, separators=(",", ":")) + "\n")
    print(f"{path}: {', '.join(ask)}")


if __name__ == "__main__":
    main()
