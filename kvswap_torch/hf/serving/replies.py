"""What transformers' replies lack: tokens from a cache, stop texts, why an answer ended, usage."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from kvswap_torch.hf.serving.line import Turn
from kvswap_torch.hf.serving.refusal import error_reply
from kvswap_torch.hf.serving.stops import end_reply, tell_why


def whole(response: Any, turn: Turn) -> Any:
    """The reply that is no stream."""
    from fastapi.responses import JSONResponse

    content = json.loads(response.body)
    end_reply(content, turn)
    _tell(content, turn)
    return JSONResponse(content, response.status_code)


async def told(events: Any, turn: Turn, last_event: str) -> AsyncIterator[str]:
    """A stream's events, and the end that OpenAI's has."""
    async with aclosing(events):
        async for text in events:
            is_told = '"usage"' in text or '{"error": "' in text
            yield _tell_lines(text, turn) if is_told else text
    if last_event:
        yield last_event


def _tell_lines(text: str, turn: Turn) -> str:
    lines = []
    for line in text.split("\n"):
        if not line.startswith("data: {"):
            lines.append(line)
            continue
        content = json.loads(line.removeprefix("data: "))
        if isinstance(content.get("error"), str):
            content |= error_reply(content["error"])
        _tell(content, turn)
        alone = _usage_alone(content) if turn.tells_usage else None
        lines.append(f"data: {json.dumps(content)}")
        if alone is not None:
            lines += ["", f"data: {json.dumps(alone)}"]
    return "\n".join(lines)


def _usage_alone(content: dict[str, Any]) -> dict[str, Any] | None:
    """As ``include_usage`` has it: in an event of its own, without choices, after the last one."""
    if not content.get("choices") or not content.get("usage"):
        return None
    alone = content | {"choices": []}
    content["usage"] = None
    return alone


def _tell(content: dict[str, Any], turn: Turn) -> None:
    tell_why(content, turn)
    _tell_incomplete(content, turn)
    usage = content.get("usage") or (content.get("response") or {}).get("usage")
    if usage:
        name = "input_tokens_details" if "input_tokens" in usage else "prompt_tokens_details"
        usage.setdefault(name, {})["cached_tokens"] = turn.cached_tokens


def _tell_incomplete(content: dict[str, Any], turn: Turn) -> None:
    """A response that might have gone on is no completed one."""
    response = content.get("response", content)
    if response.get("object") != "response" or response.get("status") != "completed":
        return
    if not turn.is_cut:
        return
    response["status"] = "incomplete"
    response["incomplete_details"] = {"reason": "max_output_tokens"}
    for item in response.get("output", ()):
        if item.get("type") == "message":
            item["status"] = "incomplete"
    if content.get("type") == "response.completed":
        content["type"] = "response.incomplete"
