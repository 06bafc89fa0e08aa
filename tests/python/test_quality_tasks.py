"""How the quality harness asks: in plain words, through a chat template, about the text itself."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from bench.quality.document import Document, Sample
from bench.quality.harness import check_length
from bench.quality.tasks.of_text import quotes
from bench.quality.tasks.questions import ASKED_MAX, load, questions
from bench.quality.text import CODE, Texts
from bench.quality.wording import ChatWording, PlainWording
from tools.reference_model.documents import FOLDER, SOURCES, load_source
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


def test_a_quote_is_of_a_line_that_begins_like_no_other():
    words = [f"word{number}" for number in range(13)]
    twice = "The same five words here " + " ".join(words)
    document = "\n".join(
        [twice, twice, "short line", *(f"Line {i} " + " ".join(words) for i in "abc")]
    )
    quoted = quotes(np.random.default_rng(0), PlainWording(), document)
    assert [round(6 * depth) for _, depth in quoted] == [3, 4, 5]
    for turn, depth in quoted:
        line = document.split("\n")[round(6 * depth)]
        assert line.startswith(turn.begun + turn.answer) and turn.begun in turn.prompt
        assert len(turn.begun.split()) == 5 and len(turn.answer.split()) == 8


@pytest.mark.parametrize("name", SOURCES)
def test_every_answer_stands_once_in_what_its_document_is_drawn_from(name):
    text = load_source(name)
    drawn_from = Texts(str(FOLDER / f"{name}.txt")).draw(np.random.default_rng(0), 100_000)
    assert set(load()) == set(SOURCES) and len(load()[name]) > ASKED_MAX
    for known in load()[name]:
        assert text.count(known.fact) == 1 and known.answer.strip() in known.fact
        assert known.begun and known.question.endswith("?")
    there = [known.fact in drawn_from for known in load()[name]]
    assert sum(there) > 0.9 * len(there)


def test_what_a_document_holds_is_asked_all_over_it():
    text = load_source(SOURCES[0])
    asked = questions(PlainWording(), text)
    depths = [depth for _, depth in asked]
    assert len(asked) == ASKED_MAX and depths == sorted(depths) and depths[-1] - depths[0] > 0.4
    known = load()[SOURCES[0]][0]
    place = text.index(known.fact)
    ((turn, depth),) = questions(PlainWording(), text[place - 50 : place + 50])
    assert turn.prompt == f"Question: {known.question}\nAnswer:" and turn.begun == known.begun
    assert turn.answer == known.answer and depth == 0.5
    with pytest.raises(ValueError, match="must hold facts that are asked for, and holds none"):
        questions(PlainWording(), "Nothing of it.")


def test_code_is_this_pythons_own_and_fitting_takes_other_modules():
    rng = np.random.default_rng(0)
    drawn, fitted = (Texts(CODE).draw(rng, 30_000, fitted) for fitted in (False, True))
    assert "def " in drawn and "def " in fitted and drawn != fitted


def test_a_sample_that_was_written_has_it_as_its_answer():
    asked = Sample("summary", torch.tensor([1, 2]), (), to_write=3)
    sample = asked.written(torch.tensor([7, 8, 9]))
    assert sample.ids.tolist() == [1, 2, 7, 8, 9] and sample.answers == ((2, 5),)
    assert sample.to_write == 0


def test_more_than_a_model_was_made_for_is_not_measured():
    asked = Sample("summary", torch.arange(10), (), to_write=20)
    document = Document(100, 0, torch.arange(95), (asked,))
    config = SimpleNamespace(max_position_embeddings=125, rope_parameters={"rope_type": "default"})
    check_length(document, config)
    config.max_position_embeddings = 124
    with pytest.raises(ValueError, match="at most the 124 tokens .* come to 125; ask for 94"):
        check_length(document, config)
    config.rope_parameters = {"rope_type": "yarn"}
    check_length(document, config)
