"""The quality harness measures the product as it answers, beside what the full cache answers."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench.quality.document import Writer
from bench.quality.harness import REFERENCE
from bench.quality.product import Product
from bench.quality.text import Texts
from bench.quality.told import tell
from bench.quality.wording import ReferenceWording
from kvswap_torch.errors import UnsupportedModelError
from tests.python.tiny_models import has_native, tiny_model

TEXT = str(REFERENCE / "documents" / "python_logging.txt")
needs_native = pytest.mark.skipif(not has_native(), reason="kvswap_torch._C is not built")

pytestmark = pytest.mark.usefixtures("one_thread_throughout")


@pytest.fixture(scope="module")
def reference():
    """The reference model in fp32, and a document of 600 tokens with two tasks."""
    model = AutoModelForCausalLM.from_pretrained(REFERENCE, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(REFERENCE)
    writer = Writer(tokenizer, ReferenceWording(), Texts(TEXT), ("needle", "turns"), 0)
    return model, writer.write(600, 0)


def test_the_full_cache_tells_what_one_pass_without_a_cache_gives(reference, monkeypatch):
    model, document = reference
    monkeypatch.setattr("bench.quality.told.CHUNK", 250)
    told = tell(model, document)
    assert sorted(told.rows) == list(range(len(document.samples)))
    for number, sample in enumerate(document.samples):
        with torch.inference_mode():
            ids = torch.cat([document.ids, sample.ids])
            logs = model(input_ids=ids[None], use_cache=False).logits[0].log_softmax(-1)
        begins = len(document.ids) - 1
        expected = torch.cat([logs[begins + a : begins + b] for a, b in sample.answers])
        torch.testing.assert_close(told.rows[number], expected, atol=2e-3, rtol=1e-3)
    for sample in told.scored(document):
        assert all(a["kl"] == 0 and a["agree"] == a["tokens"] for a in sample["answers"])


def test_a_model_with_windows_is_refused_by_name(reference):
    with pytest.raises(
        UnsupportedModelError, match=r"Gemma3.* full attention .*, has it in 2 of 4"
    ):
        tell(tiny_model("gemma3"), reference[1])


@needs_native
@pytest.mark.parametrize("question", ["after", "inside"])
def test_the_product_is_measured_as_it_answers(question, reference, tmp_path):
    """With settings that cover the document it gives what the full cache gives, row by row."""
    model, document = reference
    covering = {"groups_max": "400", "pages_max": "400", "question": question}
    product = Product.named("product", covering, None)
    told = tell(model, document)
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
