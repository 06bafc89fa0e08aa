"""One of several processes that run one tiny model together; writes what it saw as JSON.

    torchrun --standalone --nproc-per-node N tests/python/parallel_worker.py TP PP FOLDER SCENARIO

The reference of every comparison is one process with a DynamicCache, which each rank runs beside.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.distributed import DistributedConfig

from kvswap_torch import KVSwapCache, SwapConfig
from kvswap_torch.hf.driver import Ahead
from kvswap_torch.hf.lookahead import captured_query
from tests.python import every_model
from tests.python.test_presets_generate import small
from tests.python.tiny_models import COVERING, TIGHT, greedy, prompt, tiny_model

# Layers and heads that two processes, or two times two, can share.
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 4},
    "qwen3": {"num_hidden_layers": 4},
    "phi3": {"num_hidden_layers": 2},
    "gemma3": {},
}
# Latent attention, whose heads share what each rank keeps: heads that are split, heads that stay
# whole on every rank, and heads that are split below an index of the model's own.
LATENT = {"deepseek2": "DeepseekV2", "deepseek3": "DeepseekV3", "deepseek32": "DeepseekV32"}


def _saved(family: str, folder: Path) -> Path:
    return folder / f"{family}-{os.environ['RANK']}"


class Pair:
    """A model of which this process has a part, and the whole of it."""

    def __init__(self, family: str, folder: Path, tensor: int, pipeline: int):
        saved = _saved(family, folder)
        self.whole = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32)
        config = DistributedConfig(tp_size=tensor, pp_size=pipeline)
        self.part = AutoModelForCausalLM.from_pretrained(
            saved, dtype=torch.float32, distributed_config=config
        )
        self.folder = folder

    def open(self, config: SwapConfig = COVERING, **arguments: Any) -> KVSwapCache:
        return KVSwapCache(self.part, path=self.folder, config=config, **arguments)

    def same(self, inputs: dict, **arguments: Any) -> bool:
        """Whether a new cache's tokens are those of one process."""
        expected = greedy(self.whole, inputs, **arguments)
        with self.open() as cache:
            return torch.equal(greedy(self.part, inputs, cache, **arguments), expected)


def plain(pair: Pair) -> bool:
    return pair.same(prompt(1, 23))


def padded(pair: Pair) -> bool:
    return pair.same(prompt(3, 21, padding=(0, 7, 3)))


def beams(pair: Pair) -> bool:
    return pair.same(prompt(2, 18, padding=(3, 0)), num_beams=3, tokens=8)


def chunks(pair: Pair) -> bool:
    return pair.same(prompt(2, 23, padding=(2, 0)), prefill_chunk_size=7)


def sampling(pair: Pair) -> bool:
    inputs, arguments = prompt(2, 20), {"do_sample": True, "top_k": 20}
    torch.manual_seed(5)
    expected = greedy(pair.whole, inputs, **arguments)
    torch.manual_seed(5)
    with pair.open() as cache:
        return torch.equal(greedy(pair.part, inputs, cache, **arguments), expected)


def turns_and_crop(pair: Pair) -> bool:
    """A second turn, then back to the first and another second one, where layers can go back.

    One process goes the same passes, by whose shapes an index chooses among equal scores.
    """
    first, later = prompt(1, 20), [prompt(1, 6, seed=seed)["input_ids"] for seed in (7, 8)]
    memory = DynamicCache(config=pair.whole.config)
    with pair.open() as cache:
        told = greedy(pair.part, first, cache)
        if not torch.equal(greedy(pair.whole, first, memory), told):
            return False
        read = cache.get_seq_length()
        for turn in later:
            ids = torch.cat([told, turn], 1)
            inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
            expected = greedy(pair.whole, inputs, memory)
            if not torch.equal(greedy(pair.part, inputs, cache), expected):
                return False
            if "sliding_attention" in cache.parts.kinds:
                return True
            for each in (cache, memory):
                each.crop(read - each.get_seq_length())
            if cache.get_seq_length() != read:
                return False
    return True


def choosing(pair: Pair) -> bool:
    """Where each rank chooses for its own heads, tokens may differ; all ranks agree in them."""
    inputs = prompt(2, 40, padding=(0, 5))
    with pair.open(TIGHT) as cache:
        tokens = greedy(pair.part, inputs, cache)
    told = [torch.empty_like(tokens) for _ in range(dist.get_world_size())]
    dist.all_gather(told, tokens)
    return all(torch.equal(each, tokens) for each in told)


def predicted_query(pair: Pair) -> bool:
    """The fast prediction from this rank's weights is what the attention itself computes."""
    seen = []
    with pair.open() as cache:
        look_ahead = cache._look_ahead
        predict = look_ahead.predict

        def both(layer, source, hidden, kwargs):
            query = predict(layer, source, hidden, kwargs)
            own = captured_query(
                cache.parts.mixers[layer], hidden, kwargs["position_embeddings"], kwargs
            )
            kv_heads = cache.parts.shape.kv_heads
            summed = own.unflatten(1, (kv_heads, -1)).sum(2) if look_ahead.summed else own
            seen.append(torch.allclose(query, summed, atol=1e-5))
            return query

        look_ahead.predict = both
        wants = cache.driver.wants_look_ahead
        cache.driver.wants_look_ahead = lambda *asked: (
            Ahead.PREDICTED if wants(*asked) else Ahead.NO
        )
        greedy(pair.part, prompt(1, 30), cache)
    return all(seen) and len(seen) > 0


def stats(pair: Pair) -> Any:
    with pair.open() as cache:
        greedy(pair.part, prompt(1, 20), cache)
        told, placement = cache.stats(), cache.parts.placement
        return {
            "ranks": told.ranks,
            "shown": placement.is_shared and told.ranks in str(told).replace("\n", " "),
            "layers": cache.parts.shape.layers,
            "kv_heads": cache.parts.shape.kv_heads,
            "identity_heads": cache.parts.identity.kv_heads,
        }


def stock(pair: Pair) -> bool:
    """transformers' own cache in memory, for what it gets wrong."""
    inputs = prompt(3, 21, padding=(0, 7, 3))
    cache = DynamicCache(config=pair.part.config)
    return torch.equal(greedy(pair.part, inputs, cache), greedy(pair.whole, inputs))


def heads(pair: Pair) -> list[int]:
    """Of this rank and of the whole model: attention heads, and what it keeps a token by."""
    with pair.open() as cache:
        parts = cache.parts
        return [parts.shape.heads, parts.shape.kv_heads, parts.identity.heads]


def system(pair: Pair, name: str) -> bool:
    """A preset: one process's tokens where everything fits, else all ranks' own agree."""
    inputs = prompt(2, 60, padding=(0, 5))
    with pair.open(small(name, pair.whole, 200)) as cache:
        if not torch.equal(greedy(pair.part, inputs, cache), greedy(pair.whole, inputs)):
            return False
    with pair.open(small(name, pair.whole, 4)) as cache:
        tokens = greedy(pair.part, inputs, cache)
        chose = cache.stats().bytes_read > 0
    told = [torch.empty_like(tokens) for _ in range(dist.get_world_size())]
    dist.all_gather(told, tokens)
    return chose and all(torch.equal(each, tokens) for each in told)


SYSTEMS = ("kvswap", "kvswap-paper", "dynakv", "arkv", "arkv-origin", "arkv-quant", "arkv-recall",
           "prkv", "prkv-auto")  # fmt: skip
EQUAL = (plain, padded, beams, chunks, sampling, turns_and_crop, choosing)


def _let_both_load() -> None:
    """transformers 5.23 splits heads of layers that a stage has given away, and fails to load."""
    from transformers.distributed import mixin
    from transformers.distributed.pipeline_parallel import PipelineIdentityLayer

    split = mixin.apply_tensor_parallelism

    def of_what_is_here(model: Any, mesh: Any, plan: dict[str, str]) -> Any:
        modules = {
            name
            for name, module in model.named_modules()
            if not isinstance(module, PipelineIdentityLayer)
        }
        here = modules | set(dict(model.named_parameters()))
        return split(model, mesh, {name: plan[name] for name in plan if name in here})

    mixin.apply_tensor_parallelism = of_what_is_here


def equal(tensor: int, pipeline: int, folder: Path) -> dict[str, Any]:
    told: dict[str, Any] = {}
    if tensor > 1 and pipeline > 1:
        _let_both_load()
    for family in (*SHAPES, *LATENT) if tensor * pipeline == 2 else ("llama", "deepseek2"):
        pair = Pair(family, folder, tensor, pipeline)
        for scenario in EQUAL:
            told[f"{family} {scenario.__name__}"] = scenario(pair)
        if family in LATENT:
            told.setdefault("heads", {})[family] = heads(pair)
        if family == "llama":
            told["llama predicted_query"] = predicted_query(pair)
            told["stats"] = stats(pair)
            told["stock"] = stock(pair)
            told |= {f"llama {name}": system(pair, name) for name in SYSTEMS}
    return told


def failing(scenario: str, tensor: int, pipeline: int, folder: Path) -> dict[str, Any]:
    """What a rank sees of another one's failure, and how soon."""
    rank = int(os.environ["RANK"])
    pair = Pair("llama", folder, tensor, pipeline)
    changes: dict[str, Any] = {}
    if rank == 1:
        changes = {
            "full disk": {"disk_quota_bytes": 24 << 10},
            "other settings": {"sink_tokens": 3},
        }.get(scenario, {})
    config = SwapConfig(**({"groups_max": 400, "pages_max": 400} | changes))
    began = time.monotonic()
    if scenario == "no folder" and rank == 1:
        pair.folder = folder / "missing"
    try:
        with pair.open(config) as cache:
            torch.manual_seed(rank if scenario == "seeds" else 0)
            began = time.monotonic()
            if scenario == "killed" and rank == 1:
                pair.part.register_forward_pre_hook(_Killer(5))
            inputs = prompt(1, 200)
            greedy(pair.part, inputs, cache, tokens=64, do_sample=scenario == "seeds")
    except Exception as error:
        told = {"type": type(error).__name__, "message": str(error)}
    else:
        told = {"type": None, "message": "nothing was raised"}
    told["seconds"] = time.monotonic() - began
    if scenario == "full disk" and rank == 1:
        time.sleep(5)  # it has caught its error and lives on; the others do not wait for it
    return told


class _Killer:
    def __init__(self, passes: int):
        self._left = passes

    def __call__(self, *_: Any) -> None:
        self._left -= 1
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    tensor, pipeline, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    scenario = sys.argv[4]
    for family, shape in SHAPES.items():
        # Before there are several ranks: then only the first one would write.
        tiny_model(family, **shape).save_pretrained(_saved(family, folder))
    for family, name in LATENT.items():
        every_model.build(name).save_pretrained(_saved(family, folder))
    if scenario == "equal":
        told = equal(tensor, pipeline, folder)
    else:
        told = failing(scenario, tensor, pipeline, folder)
    (folder / f"told-{os.environ['RANK']}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main()
