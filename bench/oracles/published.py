"""What the published code of Quest, Loki and InfiniGen chooses for the prompts of `models`.

By hand, from checked-out repositories, in the environment of `kvpress_kept` with `scikit-learn`:

    python -m bench.oracles.published --quest Quest --loki loki --infinigen InfiniGen

The newest query asks for tokens of the 128 first, which our tail has left; every query head is a KV
head, since the systems differ in how they join several. It writes `published.json` beside this
file, which `tests/python/test_oracles.py` compares with what our presets choose. Numbers alone are
stored.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers.modeling_utils import AttentionInterface

from bench.oracles import models

TOKENS = 160  # of the prompt
FAR = 128  # of them may be chosen
CHOSEN = 24  # tokens of each head
PAGES, PAGE = 3, 16  # of Quest
COLUMNS = 19  # of 64: InfiniGen's ratio of 0.3
MODELS = ("llama-mha", "qwen3-mha")


def module_at(path: Path, **beside: types.ModuleType) -> Any:
    """A published file as a module; `beside`: what it imports and does not need here."""
    sys.modules.update(beside)
    found = importlib.util.spec_from_file_location(path.stem, path)
    assert found is not None and found.loader is not None, f"{path}: no such file"
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


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


def head_of(folder: Path) -> str:
    told = subprocess.run(
        ["git", "-C", str(folder), "rev-parse", "HEAD"], capture_output=True, text=True, check=True
    )
    return told.stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    systems = {"quest": of_quest, "loki": of_loki, "infinigen": of_infinigen}
    for name in systems:
        parser.add_argument(f"--{name}", type=Path, required=True, help="its repository")
    folders = vars(parser.parse_args())
    ask = {name: system(folders[name]) for name, system in systems.items()}
    told: dict[str, Any] = {
        "command": "python -m bench.oracles.published",
        "commits": {name: head_of(folder) for name, folder in folders.items()},
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
