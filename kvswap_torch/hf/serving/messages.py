"""Histories, as clients send them back, made into what a chat template takes: no word is lost.

A text stays as it came; parts of one are put together without anything between. Keys that stand for
nothing (``tool_calls`` of null or of an empty list, as `model_dump` writes them) are left out, so
that a template sees the message that was meant.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from kvswap_torch.hf.serving.refusal import RefusedError, shown

_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
_NO_WORDS = ("assistant", "tool")  # roles whose message may be without any
_PASSED = ("name", "tool_call_id", "reasoning_content")


def of_chat(messages: Any) -> list[dict[str, Any]]:
    """What a template takes, of a chat's ``messages``.

    Raises
    ------
    RefusedError
        They are none, or not of text.
    """
    return [
        _message(each, f"messages[{i}]") for i, each in enumerate(_listed(messages, "messages"))
    ]


def of_response(given: Any, instructions: str | None) -> list[dict[str, Any]]:
    """What a template takes, of a response's ``input`` and ``instructions``.

    Raises
    ------
    RefusedError
        They are none, or not of text.
    """
    if isinstance(given, str):
        messages = [{"role": "user", "content": given}]
    else:
        items = _listed(given, "input")
        is_flat = all("role" not in each and str(each.get("type")) in _PARTS for each in items)
        messages = (
            [{"role": "user", "content": _text(items, "input")}] if is_flat else _items(items)
        )
    before = [{"role": "system", "content": instructions}] if instructions else []
    return before + messages


def _listed(given: Any, field: str) -> list[dict[str, Any]]:
    if not isinstance(given, list) or not all(isinstance(each, dict) for each in given):
        raise RefusedError(400, f"{field} must be a list of messages, each a JSON object")
    if not given:
        raise RefusedError(400, f"{field} must hold a message, and is empty")
    return given


def _message(given: Mapping[str, Any], where: str) -> dict[str, Any]:
    role = given.get("role")
    if not isinstance(role, str) or not role:
        raise RefusedError(400, f"{where} must have a role, a text; got {shown(role)}")
    for name in ("audio", "function_call"):
        if given.get(name) is not None:
            raise RefusedError(
                400, f"{where} must be without {name}: this server has no such thing"
            )
    calls = _calls(given.get("tool_calls"), where)
    text = _content(given, role, where)
    message: dict[str, Any] = {"role": role, "content": text}
    for name in _PASSED:
        value = given.get(name)
        if value is None:
            continue
        if not isinstance(value, str):
            raise RefusedError(400, f"{where}.{name} must be a text, got {shown(value)}")
        message[name] = value
    if calls:
        message["tool_calls"] = calls
    return message


def _content(given: Mapping[str, Any], role: str, where: str) -> str:
    content, refusal = given.get("content"), given.get("refusal")
    if refusal is not None and not isinstance(refusal, str):
        raise RefusedError(400, f"{where}.refusal must be a text, got {shown(refusal)}")
    if content is None:
        if refusal is None and role not in _NO_WORDS:
            raise RefusedError(400, f"{where}.content must be a text, and is not there")
        return refusal or ""
    return _text(content, f"{where}.content") + (refusal or "")


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RefusedError(400, f"{where} must be a text, or parts of one; got {shown(content)}")
    texts = []
    for i, part in enumerate(content):
        name = part.get("type") if isinstance(part, dict) else None
        if not isinstance(name, str) or name not in _PARTS:
            raise RefusedError(
                400, f"{where}[{i}] must be text: no images, no sound; got {shown(name)}"
            )
        text = part.get(_PARTS[name])
        if not isinstance(text, str):
            raise RefusedError(400, f"{where}[{i}].{_PARTS[name]} must be a text")
        texts.append(text)
    return "".join(texts)


def _calls(given: Any, where: str) -> list[dict[str, Any]]:
    if given is None:
        return []
    if not isinstance(given, list):
        raise RefusedError(400, f"{where}.tool_calls must be a list, got {shown(given)}")
    return [_call(each, f"{where}.tool_calls[{i}]") for i, each in enumerate(given)]


def _call(given: Any, where: str) -> dict[str, Any]:
    function = given.get("function") if isinstance(given, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise RefusedError(400, f"{where} must be a function's, with its name")
    called = {"name": name, "arguments": _arguments(function.get("arguments"), where)}
    call: dict[str, Any] = {"type": "function", "function": called}
    if isinstance(given.get("id"), str):
        call["id"] = given["id"]
    return call


def _arguments(given: Any, where: str) -> Any:
    """An object where it is one, since templates write it as JSON; what a model garbled stays."""
    if given is None or given == "":
        return {}
    if isinstance(given, dict):
        return given
    if not isinstance(given, str):
        raise RefusedError(400, f"{where}.function.arguments must be a text of JSON")
    try:
        value = json.loads(given)
    except (ValueError, RecursionError):
        return given
    return value if isinstance(value, dict) else given


# A response's items.


def _items(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    reasoning: list[str] = []
    for i, item in enumerate(items):
        where, name = f"input[{i}]", item.get("type")
        if name == "reasoning":
            reasoning += [_reasoning(item, where)]
            continue
        if "role" in item and name in (None, "message"):
            messages.append(_message(item, where))
        elif name == "function_call":
            call = _call({"id": item.get("call_id"), "function": item}, where)
            if not messages or messages[-1]["role"] != "assistant" or reasoning:
                messages.append({"role": "assistant", "content": ""})
            messages[-1].setdefault("tool_calls", []).append(call)
        elif name == "function_call_output":
            text = _text(item.get("output"), f"{where}.output")
            messages.append(
                {"role": "tool", "content": text, "tool_call_id": str(item.get("call_id", ""))}
            )
        else:
            raise RefusedError(
                400, f"{where} must be a message, a function_call, its output or reasoning; got "
                f"{shown(name)}"
            )  # fmt: skip
        if reasoning and messages[-1]["role"] == "assistant":
            messages[-1]["reasoning_content"] = "".join(reasoning)
        reasoning = []
    return messages


def _reasoning(item: Mapping[str, Any], where: str) -> str:
    parts = item.get("content") or []
    texts = [part.get("text") if isinstance(part, dict) else None for part in parts]
    if not isinstance(parts, list) or not all(isinstance(text, str) for text in texts):
        raise RefusedError(400, f"{where}.content must be parts of text")
    return "".join(texts)  # type: ignore[arg-type]
