"""How the quality harness asks: in plain words, through a chat template, about the text itself."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from bench.quality.document import Document, Sample
from bench.quality.harness import check_length
from bench.quality.wording import ChatWording, PlainWording
from tools.reference_model.forms import Words
from tools.reference_model.tasks import SKILLS


@pytest.mark.parametrize("skill", SKILLS)
def test_in_plain_words_what_is_begun_and_the_rest_make_the_answer(skill):
    plain, rng = PlainWording(), np.random.default_rng(4)
    task = plain.draw(rng, skill, Words(), None)
    turn = plain.turn(task)
    assert not turn.prompt.endswith(" ") and turn.answer.startswith(" ")
    assert turn.prompt.endswith("Answer:") and plain.put(turn, 0).endswith(turn.begun)
    assert f" {turn.begun}{turn.answer}".endswith(f" {task.question.answer}")
    if skill in ("pair", "list", "values"):
        assert turn.begun and turn.begun + turn.answer == task.question.answer


def test_in_plain_words_all_records_are_asked_for_at_once():
    plain, rng = PlainWording(), np.random.default_rng(4)
    tasks = [plain.draw(rng, "record", Words(), None) for _ in range(3)]
    turn = plain.records(tasks)
    assert turn.begun + turn.answer == "; ".join(task.question.answer for task in tasks)


class Chatty:
    """A tokenizer with a chat template, as far as a wording needs it."""

    chat_template = "some"

    def apply_chat_template(self, turns, tokenize, add_generation_prompt):
        text = "".join(f"<{turn['role']}>{turn['content']}</>" for turn in turns)
        return text + "<assistant>"


def test_a_chat_asks_through_the_models_template_for_numbers_of_six_digits():
    wording, rng, words = ChatWording(Chatty()), np.random.default_rng(4), Words()
    assert wording.opening == "<user>"
    form = wording.form(rng, "needle")
    tasks = [wording.draw(rng, "same", words, form) for _ in range(len(form.names))]
    assert {task.question.key for task in tasks} == set(form.names)
    turn = wording.turn(tasks[0])
    assert tasks[0].facts[0] == f"{turn.begun}{turn.answer}." and len(turn.answer) == 7
    assert wording.put(turn, 0) == f"\n\n{turn.prompt}</><assistant>{turn.begun}"
    assert wording.put(turn, 1) == f"</><user>{turn.prompt}</><assistant>{turn.begun}"
    with pytest.raises(ValueError, match="the model's folder has none; use plain"):
        ChatWording(object())


def test_more_than_a_model_was_made_for_is_not_measured():
    asked = Sample("turns", torch.arange(30), ())
    document = Document(100, 0, torch.arange(95), (asked,))
    config = SimpleNamespace(max_position_embeddings=125, rope_parameters={"rope_type": "default"})
    check_length(document, config)
    config.max_position_embeddings = 124
    with pytest.raises(ValueError, match="at most the 124 tokens .* come to 125; ask for 94"):
        check_length(document, config)
    config.rope_parameters = {"rope_type": "yarn"}
    check_length(document, config)
