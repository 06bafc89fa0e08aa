"""The quality harness: its emulation chooses and answers as the engine does, its numbers add up."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from bench.quality.budget import Bytes
from bench.quality.document import Sample, Writer
from bench.quality.emulate import Emulation
from bench.quality.harness import REFERENCE
from bench.quality.measure import _Asking, tell, written
from bench.quality.methods import Resolver
from bench.quality.others import Full
from bench.quality.product import Product
from bench.quality.projections import Projections
from bench.quality.swap import Swap
from bench.quality.text import Texts
from bench.quality.view import View
from bench.quality.wording import ReferenceWording
from kvswap_torch import KVSwapCache, SwapConfig
from kvswap_torch.errors import UnsupportedModelError
from kvswap_torch.hf.families import model_parts
from tests.python.tiny_models import FAMILIES, has_native, prompt, tiny_model
from tests.selections import RELATIVE, assert_same_choice

TEXT = str(REFERENCE / "documents" / "python_logging.txt")
needs_native = pytest.mark.skipif(not has_native(), reason="kvswap_torch._C is not built")
ALIKE = 0.95  # the share of steps whose choice must be the same to the last group
# Of a score: sums in another order round to another level here and there, and one of seven shows.
ROUNDING = {"model": RELATIVE, "int8": 0.01, "int4": 0.05}
SMALL = {"groups_max": 12, "pages_max": 20}  # few of a short document's groups

pytestmark = pytest.mark.usefixtures("one_thread_throughout")


@pytest.fixture(scope="module")
def reference():
    """The reference model in fp32, and a document of 600 tokens with two samples."""
    model = AutoModelForCausalLM.from_pretrained(REFERENCE, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(REFERENCE)
    writer = Writer(tokenizer, ReferenceWording(), Texts(TEXT), ("needle", "turns"), 0)
    return model, writer.write(600, 0)


class Compared:
    """A method whose choices are compared with the engine's; it attends what the engine does.

    So a group at the threshold, which rounding decides, changes nothing that comes after it.

    Parameters
    ----------
    chosen
        The engine's groups: ``[layer][row]``.
    relative
        What rounding makes of a score: more, where it moves a row to another level.
    """

    def __init__(self, resolved, chosen: dict[int, list[list[int]]], relative: float):
        self.method, self.frame, self.relative = resolved.method, resolved.frame, relative
        self.expected = chosen
        self.same: dict[int, list[bool]] = {}

    def choose(self, view: View):
        scores = self.method._scores(view)
        mine = self.frame.best(scores, view)[0, 0]
        by = scores[0, 0].masked_fill(~self.frame.choosable(view), -torch.inf)
        theirs = torch.zeros_like(mine)
        for row, groups in enumerate(self.expected[view.layer]):
            theirs[row, groups] = True
        own = [row.nonzero().flatten().tolist() for row in mine]
        count, relative = self.frame.groups_max, self.relative
        self.same[view.layer] = [
            assert_same_choice(one, other, each, count, relative=relative)
            for one, other, each in zip(own, self.expected[view.layer], by, strict=True)
        ]
        return self.frame.columns(theirs[None, None], view)


def resolve(model, config, tokens, name="kvswap"):
    parts = model_parts(model)
    projections = Projections(model, parts, config, None, None)
    return Resolver(config, Bytes(model, parts.shape, tokens), projections).resolve(name)


def engine_run(model, config, path, document, ids):
    """The product: reads the document as one chunk, then token by token; choices and logits."""
    chosen: dict[int, list[list[int]]] = {}
    logits = []
    with torch.no_grad(), KVSwapCache(model, path, config) as cache:
        model(document[None], past_key_values=cache)
        for token in ids:
            outputs = model(token.view(1, 1), past_key_values=cache)
            logits.append(outputs.logits[0, -1])
            for layer in range(len(cache.parts.disk)):
                chosen.setdefault(layer, []).append(cache.driver.session.last_selection(layer)[0])
    return chosen, torch.stack(logits)


def compare_with_engine(model, config, path, document, ids):
    """Choices within rounding, nearly all of them to the last group; then logits."""
    expected, expected_logits = engine_run(model, config, path, document, ids)
    relative = ROUNDING[config.summary_dtype]
    compared = Compared(resolve(model, config, len(document)), expected, relative)
    with Emulation(model) as emulation:
        past = emulation.read(document)
        logits = emulation.follow(past, ids[None], compared, lambda *_: None, len(ids))[0]
    assert set(compared.same) == set(expected)
    for layer, steps in expected.items():
        same = compared.same[layer]
        assert sum(same) >= ALIKE * len(same), layer
        assert {len(step) for step in steps} == {config.groups_max}
    torch.testing.assert_close(logits, expected_logits, atol=2e-3, rtol=1e-3)


@needs_native
@pytest.mark.parametrize("dtype", ["int8", "int4", "model"])
def test_the_emulated_choice_is_the_engines(dtype, reference, tmp_path):
    """The row `kvswap` of the tables measures the product: same groups in each layer and step."""
    model, document = reference
    config = SwapConfig.load(REFERENCE / "kvswap.json")
    config = dataclasses.replace(config, model=None, summary_dtype=dtype, **SMALL)
    sample = document.samples[-1]  # of several turns: longer than the tail
    assert len(sample.ids) > config.tail_tokens + config.group_tokens
    compare_with_engine(model, config, tmp_path, document.ids, sample.ids[:-1])


@needs_native
def test_without_a_calibration_the_choice_is_the_engines_too(reference, tmp_path):
    model, document = reference
    config = SwapConfig(look_ahead=False, rank=16, **SMALL)
    compare_with_engine(model, config, tmp_path, document.ids, document.samples[0].ids[:-1])


@needs_native
@pytest.mark.parametrize("score", ["mass", "max_mass"])
def test_a_choice_by_mass_is_the_engines(score, reference, tmp_path):
    model, document = reference
    config = SwapConfig.load(REFERENCE / "kvswap.json")
    config = dataclasses.replace(config, model=None, score=score, **SMALL)
    sample = document.samples[-1]
    compare_with_engine(model, config, tmp_path, document.ids, sample.ids[:-1])


@needs_native
@pytest.mark.parametrize(("noise", "is_same"), [(1e-6, True), (0.05, False)])
def test_what_another_processors_sums_differ_by_is_the_same_choice(
    noise, is_same, tmp_path, monkeypatch
):
    """Matrix units add in another order; what differs by more is another method."""
    model = tiny_model("llama")
    ids = prompt(1, 160)["input_ids"][0]
    later = prompt(1, 60, seed=9)["input_ids"][0]
    usual, generator = Swap._scores, torch.Generator().manual_seed(0)

    def noisy(self, view):
        scores = usual(self, view)
        return scores * (1 + noise * torch.randn(scores.shape, generator=generator))

    monkeypatch.setattr(Swap, "_scores", noisy)
    config = SwapConfig(rank=8, group_tokens=2, groups_max=9, pages_max=12, tail_tokens=4)
    config = dataclasses.replace(config, score="mass", look_ahead=False)
    if is_same:
        compare_with_engine(model, config, tmp_path, ids, later)
    else:
        with pytest.raises(AssertionError, match="chosen by one alone"):
            compare_with_engine(model, config, tmp_path, ids, later)


@needs_native
@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_other_families_choose_as_the_engine(family, tmp_path):
    """Fast prediction with heads summed, and the generic one."""
    model = tiny_model(family)
    ids = prompt(1, 160)["input_ids"][0]
    later = prompt(1, 30, seed=9)["input_ids"][0]
    config = SwapConfig(rank=8, group_tokens=2, groups_max=9, pages_max=12, tail_tokens=4)
    compare_with_engine(model, config, tmp_path, ids, later)


@needs_native
@pytest.mark.parametrize("kind", ["pca_per_head", "skewed", "channels", "rope_pairs"])
def test_blocks_of_one_head_choose_as_the_engine(kind, tmp_path):
    """Which takes as many columns of them as it is told; also where a config has others."""
    model = tiny_model("llama")
    ids = prompt(1, 160)["input_ids"][0]
    later = prompt(1, 30, seed=9)["input_ids"][0]
    config = SwapConfig(rank=8, group_tokens=2, groups_max=9, pages_max=12, tail_tokens=4)
    blocks = dataclasses.replace(config, projection_kind=kind)
    compare_with_engine(model, blocks, tmp_path, ids, later)
    other = resolve(model, config, 160, f"kvswap:projection={kind}").method
    assert other == resolve(model, blocks, 160).method and other.pairs is None


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "gemma3"])
def test_the_full_cache_is_the_models_own(family):
    model = tiny_model(family)
    document = prompt(1, 50)["input_ids"][0]
    samples = prompt(3, 9, seed=4)["input_ids"]
    with Emulation(model) as emulation:
        past = emulation.read(document)
        actual = emulation.follow(past, samples, Full(), lambda *_: None, 9)
    assert model.config._attn_implementation == "sdpa"
    for ids, logits in zip(samples, actual, strict=True):
        cache = DynamicCache()
        with torch.no_grad():
            model(document[None], past_key_values=cache)
            expected = model(ids[None], past_key_values=cache).logits[0]
        torch.testing.assert_close(logits, expected)


@needs_native
def test_an_exact_question_is_what_a_long_chunk_does(reference, tmp_path):
    model, document = reference
    config = dataclasses.replace(SwapConfig.load(REFERENCE / "kvswap.json"), model=None, **SMALL)
    sample = document.samples[0]
    begin = sample.answers[0][0]
    assert begin > config.select_queries_max
    with torch.no_grad(), KVSwapCache(model, tmp_path, config) as cache:
        model(document.ids[None], past_key_values=cache)
        logits = [model(sample.ids[None, :begin], past_key_values=cache).logits[0, -1]]
        for token in sample.ids[begin:-1]:
            logits.append(model(token.view(1, 1), past_key_values=cache).logits[0, -1])
    method = _Asking(resolve(model, config, 600).method, [sample])
    with Emulation(model) as emulation:
        past = emulation.read(document.ids)
        ids = sample.ids[None, :-1]
        actual = emulation.follow(past, ids, method, lambda *_: None, len(logits))[0]
    torch.testing.assert_close(actual, torch.stack(logits), atol=2e-3, rtol=1e-3)


def test_a_model_with_windows_is_refused_by_name():
    with pytest.raises(UnsupportedModelError, match=r"Gemma3.* full attention, has it in 2 of 4"):
        Emulation(tiny_model("gemma3"))


@needs_native
@pytest.mark.parametrize("question", ["after", "inside"])
def test_the_product_is_measured_as_it_answers(question, reference, tmp_path):
    """With settings that cover the document it gives what the full cache gives, row by row."""
    model, document = reference
    covering = {"groups_max": "400", "pages_max": "400", "question": question}
    product = Product.named("product", covering, None)
    with Emulation(model) as emulation:
        told = tell(emulation, emulation.read(document.ids), document)
    measured = product.run(model, document, told)
    assert len(measured["samples"]) == len(document.samples)
    for sample, laid in zip(measured["samples"], document.samples, strict=True):
        assert (sample["task"], len(sample["answers"])) == (laid.task, len(laid.answers))
        for answer in sample["answers"]:
            assert answer["kl"] < 1e-4 and answer["agree"] == answer["tokens"]
    assert measured["memory_bytes"] > 0 and measured["ranks"]
    settings = {"groups_max": "1", "pages_max": "8", "rank": "1", "question": "inside"}
    narrow = Product.named("p", settings | {"tail_tokens": "4"}, None)
    answers = [a for s in narrow.run(model, document, told)["samples"] for a in s["answers"]]
    assert max(answer["kl"] for answer in answers) > 1e-3


def test_what_the_full_cache_writes_is_what_greedy_decoding_gives(reference):
    model, document = reference
    asked = Sample("summary", document.samples[0].ids[:12], (), to_write=5)
    with Emulation(model) as emulation:
        past = emulation.read(document.ids)
        whole = dataclasses.replace(document, samples=(asked, document.samples[0]))
        first, second = written(emulation, past, whole).samples
    assert second is document.samples[0] and first.answers == ((12, 17),)
    prompt_ids = torch.cat([document.ids, asked.ids])[None]
    expected = model.generate(
        prompt_ids,
        attention_mask=torch.ones_like(prompt_ids),
        max_new_tokens=5,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    assert first.ids[12:].tolist() == expected[0, -5:].tolist()
