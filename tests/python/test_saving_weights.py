"""A saved cache of other weights is refused, and the tensor named: whatever changed, wherever."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from kvswap_torch import ConfigError, KVSwapCache
from kvswap_torch.hf import weights_digest
from kvswap_torch.hf.families import model_parts
from kvswap_torch.hf.weights_digest import weights_of
from tests.python.saved_child import ROOT
from tests.python.saved_conversation import filled, goes_on
from tests.python.saved_manifest import resigned
from tests.python.test_saved_files import copied
from tests.python.test_serving_reuse import Desk, in_memory, text
from tests.python.tiny_models import FAMILIES, has_native, tiny_model

pytestmark = [
    pytest.mark.skipif(not has_native(), reason="kvswap_torch._C is not built"),
    pytest.mark.usefixtures("one_thread"),
]


def saved_by(model: Any, folder: Path, tokens: int = 48) -> Path:
    cache, _ = filled(model, folder, tokens=tokens)
    with cache:
        cache.save(folder / "a")
    return folder / "a"


def without_weights(saved: Path) -> Path:
    """As an earlier kvswap_torch wrote it."""
    with resigned(saved) as manifest:
        del manifest["facts"]["weights"]
    return saved


def layer_of(model: Any, index: int) -> nn.Module:
    return model.model.layers[index]


CHANGES: dict[str, tuple[Callable[[Any], torch.Tensor], str]] = {
    "embedding": (lambda m: m.model.embed_tokens.weight, "embed_tokens.weight"),
    "first key": (lambda m: layer_of(m, 0).self_attn.k_proj.weight, "layers.0.self_attn.k_proj"),
    "last value": (lambda m: layer_of(m, -1).self_attn.v_proj.weight, "self_attn.v_proj.weight"),
    "inner mlp": (lambda m: layer_of(m, 1).mlp.down_proj.weight, "layers.1.mlp.down_proj.weight"),
    "norm": (lambda m: layer_of(m, 1).input_layernorm.weight, "layers.1.input_layernorm.weight"),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_changed_tensor_is_named(
    family: str, change: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """By little, which hides in bf16's rounding; in gemma3 layer 1 is on disk, 0 slides."""
    model = tiny_model(family, dtype=dtype)
    saved = saved_by(model, tmp_path)
    other = copy.deepcopy(model)
    chosen, name = CHANGES[change]
    with torch.no_grad():
        weight = chosen(other)
        weight.add_(weight.abs().max().clamp_min(0.5) * 0.02)
    with pytest.raises(ConfigError, match=f"1 of its weights is not .*{name}"):
        KVSwapCache.open(other, saved, path=tmp_path)
    KVSwapCache.open(other, saved, path=tmp_path, probe=False).close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        KVSwapCache.open(model, saved, path=tmp_path).close()


def test_what_decides_no_key_may_change(tmp_path: Path) -> None:
    """The output layer, where it is not the embedding too."""
    model = tiny_model("llama")
    saved = saved_by(model, tmp_path)
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    KVSwapCache.open(model, saved, path=tmp_path).close()
    tied = tiny_model("llama", tie_word_embeddings=True)
    digest = weights_of(model_parts(tied)).tensors
    assert "embed_tokens.weight" in digest and not any("lm_head" in name for name in digest)


def test_the_last_layers_values_decide_the_answer(tmp_path: Path) -> None:
    """What a served cache of an untuned model would answer is neither model's."""
    model = tiny_model("llama")
    saved = saved_by(model, tmp_path, tokens=120)
    tuned = copy.deepcopy(model)
    with torch.no_grad():
        for name in ("q_proj", "v_proj"):
            weight = getattr(layer_of(tuned, -1).self_attn, name).weight
            low = torch.randn(weight.shape[0], 4), torch.randn(4, weight.shape[1])
            weight.add_(low[0] @ low[1] * 0.1)
    with pytest.raises(ConfigError, match="2 of its weights are not .*q_proj.*v_proj"):
        KVSwapCache.open(tuned, saved, path=tmp_path)


@pytest.mark.parametrize("kind", ["keys", "values"])
@pytest.mark.parametrize("layer", [0, 1])
def test_without_a_digest_keys_and_values_are_compared(
    layer: int, kind: str, tmp_path: Path
) -> None:
    """On disk (1) and, as far as the window has not moved on, in memory (0)."""
    model = tiny_model("gemma3", sliding_window=64)
    saved = without_weights(saved_by(model, tmp_path))
    attention = layer_of(model, layer).self_attn
    projection = attention.k_proj if kind == "keys" else attention.v_proj
    with torch.no_grad():
        # Turned, since keys are normed here.
        projection.weight.copy_(projection.weight.flip(0))
    with (
        pytest.raises(ConfigError, match=f"{kind} of its first tokens differ by .* layer {layer}"),
        pytest.warns(RuntimeWarning, match="does not say which weights"),
    ):
        KVSwapCache.open(model, saved, path=tmp_path)


def test_one_without_a_digest_is_opened_with_one_warning_until_it_is_saved(tmp_path: Path) -> None:
    saved = copied("covering", tmp_path)
    model = tiny_model("llama")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with KVSwapCache.open(model, saved, path=tmp_path) as cache:
            cache.save(tmp_path / "again")
    assert sum("does not say which weights" in str(each.message) for each in said) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        KVSwapCache.open(model, tmp_path / "again", path=tmp_path).close()


def test_another_version_s_digests_are_none(tmp_path: Path) -> None:
    model = tiny_model("llama")
    saved = saved_by(model, tmp_path)
    with resigned(saved) as manifest:
        manifest["facts"]["weights"]["version"] = 2
    with pytest.warns(RuntimeWarning, match="does not say which weights"):
        KVSwapCache.open(model, saved, path=tmp_path).close()


@pytest.mark.parametrize("family", FAMILIES)
def test_every_parameter_is_represented(family: str) -> None:
    model = tiny_model(family)
    parts = model_parts(model)
    before = weights_of(parts)
    assert before == weights_of(parts)
    output = {id(p) for p in model.get_output_embeddings().parameters()}
    for name, parameter in model.named_parameters():
        if id(parameter) in output:
            continue
        with torch.no_grad():
            kept = parameter.clone()
            parameter.view(-1)[-1] += 1
            assert weights_of(parts).differences(before.facts()) == [name.removeprefix("model.")]
            parameter.copy_(kept)
    assert before == weights_of(parts)


def test_of_a_large_tensor_rows_anywhere_are_seen() -> None:
    """A changed row, of a matrix in any layout, is among what is looked at."""
    for weight in (torch.randn(512, 700), torch.randn(700, 512).T):
        looked = weights_digest._looked_at
        before = looked(weight)
        assert len(before) == 4 * weights_digest.PIECES * weights_digest.PIECE_ELEMENTS
        assert torch.equal(before, looked(weight.clone().contiguous()))
        seen = 0
        for row in range(0, 512, 8):
            weight[row : row + 8] += 1
            seen += not torch.equal(before, looked(weight))
            before = looked(weight)
        assert seen == 64


def test_another_process_finds_the_same() -> None:
    program = """
import json
from kvswap_torch.hf.families import model_parts
from kvswap_torch.hf.weights_digest import weights_of
from tests.python.tiny_models import tiny_model
print(json.dumps(weights_of(model_parts(tiny_model("gemma3"))).facts()))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert json.loads(done.stdout) == weights_of(model_parts(tiny_model("gemma3"))).facts()


class Adapted(nn.Module):
    """What PEFT puts in the place of a linear layer, as far as its names go."""

    def __init__(self, base: nn.Linear, scale: float = 2.0) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.ModuleDict({"one": nn.Linear(base.in_features, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"one": nn.Linear(2, base.out_features, bias=False)})
        self.scaling, self.merged_adapters = {"one": scale}, []
        self.active_adapters, self.disable_adapters = ["one"], False

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        out = self.base_layer(states)
        if self.disable_adapters or not self.active_adapters or self.merged_adapters:
            return out
        return out + self.lora_B["one"](self.lora_A["one"](states)) * self.scaling["one"]


def test_an_adapter_counts_while_it_is_at_work(tmp_path: Path) -> None:
    model = tiny_model("llama")
    saved = saved_by(model, tmp_path)
    attention = layer_of(model, -1).self_attn
    attention.v_proj = adapter = Adapted(attention.v_proj)

    def refused(words: str) -> None:
        with pytest.raises(ConfigError, match=words):
            KVSwapCache.open(model, saved, path=tmp_path)

    refused("v_proj.lora_A.one.weight")
    adapter.disable_adapters = True
    KVSwapCache.open(model, saved, path=tmp_path).close()
    adapter.disable_adapters, adapter.active_adapters = False, []
    KVSwapCache.open(model, saved, path=tmp_path).close()
    adapter.active_adapters = ["one"]
    with torch.no_grad():
        added = adapter.lora_B["one"].weight @ adapter.lora_A["one"].weight
        adapter.base_layer.weight.add_(added * 2.0)
    adapter.merged_adapters = ["one"]
    refused("layers.2.self_attn.v_proj.weight")


def test_an_adapter_s_scale_counts(tmp_path: Path) -> None:
    model = tiny_model("llama")
    attention = layer_of(model, 0).self_attn
    attention.v_proj = Adapted(attention.v_proj)
    saved = saved_by(model, tmp_path)
    KVSwapCache.open(model, saved, path=tmp_path).close()
    attention.v_proj.scaling["one"] = 1.0
    with pytest.raises(ConfigError, match="layers.0.self_attn.v_proj.*scaling of adapters"):
        KVSwapCache.open(model, saved, path=tmp_path)


class Quantised(torch.Tensor):
    """A weight in two plain tensors, as torchao's are."""

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scales: torch.Tensor) -> Quantised:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes: torch.Tensor, scales: torch.Tensor) -> None:
        self.codes, self.scales = codes, scales

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scales"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].codes, args[0].scales)
        raise NotImplementedError(func)


def test_all_that_a_quantised_weight_is_made_of_counts() -> None:
    model = tiny_model("llama")
    codes, scales = torch.arange(32 * 64).reshape(32, 64).to(torch.int8), torch.ones(32)
    projection = layer_of(model, 1).mlp.up_proj
    projection.weight = nn.Parameter(Quantised(codes, scales), requires_grad=False)
    parts = model_parts(model)
    before = weights_of(parts).facts()
    for part, name in ((codes, "codes"), (scales, "scales")):
        part[-1] += 1
        assert weights_of(parts).differences(before) == [f"layers.1.mlp.up_proj.weight.{name}"]
        part[-1] -= 1
    assert weights_of(parts).differences(before) == []


def test_what_lies_elsewhere_is_not_compared() -> None:
    model = tiny_model("llama")
    whole = weights_of(model_parts(model))
    layer_of(model, 1).mlp.to("meta")
    part = weights_of(model_parts(model))
    assert [name for name, digest in part.tensors.items() if digest is None]
    assert part.differences(whole.facts()) == whole.differences(part.facts()) == []


def test_experts_by_the_thousand_are_one_each_layer() -> None:
    names = {
        f"layers.{i}.mlp.experts.{k}.up.weight": f"{i}{k}" for i in range(9) for k in range(600)
    }
    few = weights_digest._fewer(names | {"norm.weight": "a"})
    assert list(few) == [f"layers.{i}.mlp.experts.*.up.weight" for i in range(9)] + ["norm.weight"]
    changed = weights_digest._fewer(names | {"layers.3.mlp.experts.77.up.weight": "b"})
    assert [name for name in changed if changed[name] != few[name]] == [
        "layers.3.mlp.experts.*.up.weight"
    ]


def test_a_saved_cache_says_it_again_after_a_fork_and_a_turn(tmp_path: Path) -> None:
    model = tiny_model("gemma3")
    cache, out = filled(model, tmp_path)
    with cache, cache.fork() as fork:
        expected = goes_on(model, cache, out)
        fork.save(tmp_path / "a")
    with KVSwapCache.open(model, tmp_path / "a", path=tmp_path) as opened:
        assert goes_on(model, opened, out) == expected
        opened.save(tmp_path / "b")
    KVSwapCache.open(model, tmp_path / "b", path=tmp_path).close()


def test_a_served_store_of_the_model_before_its_tune_is_not_used(tmp_path: Path) -> None:
    """The model was replaced in its place: the first answer is the new one's."""
    model = tiny_model("llama")
    with Desk(model, tmp_path / "store") as desk:
        desk.ask(text(60, 1))
    tuned = copy.deepcopy(model)
    with torch.no_grad():
        weight = layer_of(tuned, -1).self_attn.v_proj.weight
        weight.add_(torch.randn(weight.shape[0], 4) @ torch.randn(4, weight.shape[1]) * 0.15)
    with Desk(tuned, tmp_path / "store") as desk:
        assert desk.ask(text(60, 1)) == in_memory(tuned, text(60, 1))
        assert desk.cached == 0
    with Desk(model, tmp_path / "store") as desk:
        assert desk.ask(text(60, 1)) == in_memory(model, text(60, 1))
        assert desk.cached == 59
