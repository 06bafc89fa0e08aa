"""How the published code of CAKE, CompressKV and ARKV divides tokens among layers.

By hand, from checked-out repositories, of which CompressKV's has CAKE too:

    python -m tests.oracles.divided --compresskv CompressKV --arkv ARKV

It writes `divided.json` beside this file, which `tests/python/test_oracles.py` compares with how
ours divides them. Numbers alone are stored.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import torch

from tests.oracles import arkv
from tests.oracles.repositories import cache_at, head_of, module_at, versions_of

CASES = 40
LAYERS = 12


def of_cake(folder: Path) -> Callable[..., list[int]]:
    """What its cache holds of each layer before the window, once all layers have come."""
    room = folder / "methods" / "cakekv"
    packages = {name: types.ModuleType(name) for name in ("methods", "methods.cakekv")}
    packages["methods.cakekv.utils"] = module_at(room / "utils.py")
    code = cache_at(room / "cake_cache.py", **packages)

    def tokens(preferences: list[float], before: int, average: int) -> list[int]:
        window, heads = 4, 1
        evict = code.CakeprefillKVCache(
            cache_size=average + window,
            window_size=window,
            num_heads=heads,
            num_layers=len(preferences),
            use_cascading=True,
        )
        cache = code.CakeCache()
        for layer, preference in enumerate(preferences):
            states = torch.zeros(1, heads, before + window, 1)
            cache.update(states, states, layer)
            cache.update_score(numpy.float32(preference), torch.rand(1, heads, before))
            cache.layer_budget.append(average)
            cache = evict(cache, before + window)
        return [keys.shape[2] - window for keys in cache.key_cache]

    return tokens


def of_compresskv(folder: Path) -> Callable[..., list[int]]:
    """What its capacities leave of each layer beside the window."""
    source = ast.parse((folder / "longbench" / "pred_compresskv.py").read_text())
    name = "error_aware_layer_budget_allocation"
    (one,) = (each for each in source.body if getattr(each, "name", "") == name)
    made: dict[str, Any] = {"np": numpy}
    exec(compile(ast.Module([one], []), name, "exec"), made)

    def tokens(shares: list[float], average: int, window: int = 8) -> list[int]:
        capacity = average + window
        given = made[name](shares, capacity * len(shares), 32, 3 * capacity)
        return [one - window for one in given]

    return tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--compresskv", type=Path, required=True, help="its repository")
    parser.add_argument("--arkv", type=Path, required=True, help="its repository")
    args = parser.parse_args()
    cake, compresskv = of_cake(args.compresskv), of_compresskv(args.compresskv)
    of_arkv = arkv.of_layers(args.arkv)
    rng = random.Random(0)
    told: dict[str, Any] = {
        "command": "python -m tests.oracles.divided",
        "commits": {"compresskv": head_of(args.compresskv), "arkv": head_of(args.arkv)},
        "versions": versions_of("torch", "numpy"),
        "cake": [],
        "compresskv": [],
        "arkv": [],
    }
    for case in range(CASES):
        average, before = rng.randint(30, 200), rng.randint(400, 900)
        spread = rng.choice([0.2, 1.0, 3.0])
        # As float32, which its preferences are.
        worth = [float(numpy.float32(rng.lognormvariate(0, spread))) for _ in range(LAYERS)]
        if case % 4 == 0:
            before = average + 20  # more than some layers can have
        told["cake"].append(
            {
                "preferences": worth,
                "limit": before,
                "average": average,
                "tokens": cake(worth, before, average),
            }
        )
        shares = [one / sum(worth) for one in worth]
        told["compresskv"].append(
            {"shares": shares, "average": average, "tokens": compresskv(shares, average)}
        )
        told["arkv"].append(
            {"worth": worth, "tokens": arkv.WINDOW + average}
            | of_arkv(worth, arkv.WINDOW + average)
        )
    path = Path(__file__).with_name("divided.json")
    path.write_text(json.dumps(told, separators=(",", ":")) + "\n")
    print(f"{path}: {CASES} cases of {LAYERS} layers")


if __name__ == "__main__":
    main()
