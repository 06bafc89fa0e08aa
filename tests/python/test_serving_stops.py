"""Answers end before their stop text, and are sampled at a temperature, as OpenAI's are."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvswap_torch.hf.serving.line import Turn
from kvswap_torch.hf.serving.stops import EndedQueue, end_before, end_reply
from tests.python.serving_process import Served, make_model
from tests.python.test_serving import send


class Reasoning(str):
    __slots__ = ()


END = object()


def turn_with(stops: list[str]) -> Turn:
    turn = Turn()
    turn.stops = tuple(stops)
    return turn


def through(pieces: list[Any], stops: list[str]) -> list[Any]:
    """What a stream gives until `END`, half of it asked for without waiting."""

    async def take() -> list[Any]:
        queue: asyncio.Queue = asyncio.Queue()
        for piece in (*pieces, END):
            queue.put_nowait(piece)
        ended, given = EndedQueue(queue, turn_with(stops)), []
        while not given or given[-1] is not END:
            given.append(ended.get_nowait() if len(given) % 2 else await ended.get())
        with pytest.raises(asyncio.QueueEmpty):
            ended.get_nowait()
        return given[:-1]

    return asyncio.run(take())


letters = st.text("ab", max_size=4)


@given(st.lists(letters, max_size=6), st.lists(letters.filter(bool), min_size=1, max_size=3))
def test_a_stream_ends_where_its_text_does(pieces: list[str], stops: list[str]) -> None:
    assert "".join(through(pieces, stops)) == end_before("".join(pieces), stops)


def test_only_what_may_begin_a_stop_text_is_held_back() -> None:
    assert through(["one ", "two", " st", "ay ", "st"], ["stop"]) == [
        *("one ", "two", " ", "stay ", "st"),
    ]


def test_each_kind_of_text_is_one_of_its_own() -> None:
    call = {"name": "look"}
    told = through([Reasoning("I s"), Reasoning("t"), "op", call, "it stops", "more"], ["stop"])
    assert told == ["I ", "st", "op", call, "it "]
    assert [type(each) for each in told] == [Reasoning, Reasoning, str, dict, str]


def test_the_first_of_them_ends_a_reply() -> None:
    assert end_before("one two three", ["three", "two"]) == "one "
    reply = {"choices": [{"text": "a.b"}, {"message": {"content": None}}]}
    end_reply(reply, turn_with(["."]))
    assert reply == {"choices": [{"text": "a"}, {"message": {"content": None}}]}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("model")
    make_model(folder)
    served = Served(folder)
    served.start(store=str(tmp_path_factory.mktemp("store")))
    yield served
    served.close()


def answer(served: Served, **asked: Any) -> tuple[str, str]:
    """Text and why it ended."""
    body = {"prompt": "xyz" * 20, "max_tokens": 20, "temperature": 0} | asked
    path = "/v1/chat/completions" if "messages" in asked else "/v1/completions"
    if "messages" in asked:
        del body["prompt"]
    status, told = send(served, "POST", path, body)
    assert status == 200, told
    lines = [line.removeprefix("data: ") for line in told.splitlines() if line]
    events = [json.loads(line) for line in lines if line != "[DONE]"]
    choices = [event["choices"][0] for event in events]
    said = [each.get("delta") or each.get("message") or each for each in choices]
    text = "".join(each.get("text") or each.get("content") or "" for each in said)
    return text, choices[-1]["finish_reason"]


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("asked", [{}, {"messages": [{"role": "user", "content": "hello"}]}])
def test_an_answer_ends_before_its_stop_text(
    tiny: Served, is_streamed: bool, asked: dict[str, Any]
) -> None:
    whole, why = answer(tiny, **asked)
    assert why == "length"
    stop = whole[8:11]
    told = answer(tiny, stop=["never said", stop], stream=is_streamed, **asked)
    assert told == (whole[: whole.find(stop)], "stop")
    told = answer(tiny, stop=stop, stream=is_streamed, **asked)
    assert told == (whole[: whole.find(stop)], "stop")
    assert answer(tiny, stop=[], stream=is_streamed, **asked) == (whole, "length")


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_stop_text_at_the_last_allowed_token_is_why_it_ends(
    tiny: Served, is_streamed: bool
) -> None:
    whole, why = answer(tiny)
    last = whole[-1]
    told = answer(
        tiny, stop=last, stream=is_streamed, max_tokens=len(whole[: whole.find(last)]) + 1
    )
    assert (why, told) == ("length", (whole[: whole.find(last)], "stop"))


def test_a_temperature_samples(tiny: Served) -> None:
    first = answer(tiny, temperature=2.0, seed=1)
    assert first == answer(tiny, temperature=2.0, seed=1)
    assert first != answer(tiny, temperature=2.0, seed=2)
    assert first != answer(tiny)


@pytest.mark.parametrize("stop", [5, "", ["a", ""], ["a", 1], {}])
def test_a_stop_text_is_one(tiny: Served, stop: Any) -> None:
    status, told = send(tiny, "POST", "/v1/completions", {"prompt": "x", "stop": stop})
    assert status == 400 and "stop must be a text or texts, none empty" in told
