"""What a server logs, for people or as JSON: a line each, on standard error."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from rich.console import Console
from rich.logging import RichHandler

LogFormat = Literal["text", "json"]
_LOGGERS = ("kvswap_torch", "uvicorn.error", "asyncio")


class JsonLines(logging.Formatter):
    """A record as one line of JSON: time, level, who, what; of a request its numbers by name."""

    def format(self, record: logging.LogRecord) -> str:
        moment = time.gmtime(record.created)
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", moment) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        if request := getattr(record, "request", None):
            line["request"] = request
        return json.dumps(line)


@contextmanager
def log_to_stderr(form: LogFormat) -> Iterator[None]:
    """Log requests, left-out saved caches, a full store, clients' troubles, while it is open.

    Afterwards the loggers are as they were: a command that ran inside a program leaves it silent.
    """
    if form == "json":
        handler: logging.Handler = logging.StreamHandler()
        handler.setFormatter(JsonLines())
    else:
        console = Console(stderr=True, soft_wrap=True)
        handler = RichHandler(console=console, show_path=False, markup=False, highlighter=None)
    requests = logging.getLogger("kvswap_torch.hf.serving")
    level = requests.level
    requests.setLevel(logging.INFO)
    for name in _LOGGERS:
        logging.getLogger(name).addHandler(handler)
    try:
        yield
    finally:
        requests.setLevel(level)
        for name in _LOGGERS:
            logging.getLogger(name).removeHandler(handler)
