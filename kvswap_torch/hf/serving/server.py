"""``kvswap serve``: a model behind OpenAI's API, and the process that it runs in."""

from __future__ import annotations

import asyncio
import dataclasses
import ipaddress
import logging
import signal
import socket
import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvswap_torch.errors import ConfigError
from kvswap_torch.hf.families import model_parts
from kvswap_torch.hf.serving import front, seam
from kvswap_torch.hf.serving import reuse as reuse_module
from kvswap_torch.hf.serving.access import Access
from kvswap_torch.hf.serving.connections import Connections, protocol
from kvswap_torch.hf.serving.counts import Counts
from kvswap_torch.hf.serving.front import Front
from kvswap_torch.hf.serving.health import Health
from kvswap_torch.hf.serving.idle_check import IdleCheck
from kvswap_torch.hf.serving.limits import (
    BACKLOG,
    HEAD_SECONDS,
    Limits,
    connections_of_process,
)
from kvswap_torch.hf.serving.line import Line
from kvswap_torch.hf.serving.reuse import CacheOptions, PrefixReuse
from kvswap_torch.hf.serving.store import CacheStore
from kvswap_torch.hf.serving.troubles import OnceAMinute

logger = logging.getLogger(__name__)
# Of a model's own generation settings: each has a cache, or sequences, of its own, or begins again
# with the whole prompt.
ALONE: dict[str, Any] = {
    "num_beams": 1,
    "num_return_sequences": 1,
    "use_cache": True,
    "cache_implementation": None,
    "prompt_lookup_num_tokens": None,
    "assistant_early_exit": None,
    "use_mtp": None,
}
_AT_THE_END = {
    "requests": "requests",
    "refusals": "refused",
    "generated_tokens": "tokens of answers",
    "saves": "caches saved",
}
_HOSTS = ("localhost", "127.0.0.1", "[::1]")
# What clients can make happen as often as they want.
_LOGGERS = ("asyncio", "uvicorn.error", front.__name__, reuse_module.__name__)
GRACE_SECONDS = 5  # for clients that take nothing, once nothing is answered any more


@dataclass(frozen=True)
class ServerOptions:
    """Where a server listens, and for whom.

    Parameters
    ----------
    name
        What requests call the model.
    store, store_limit_bytes
        Where caches are saved, and how much disk space they may take.
    host, port
        0: a free port.
    keys
        API keys; without one, only this machine is listened to.
    shares_store
        Whether all keys go on from one another's caches; else each has its own.
    queue
        Requests that may wait beside the one that runs.
    answer_seconds
        Longest time from a request's turn to the end of its answer.
    has_page
        Whether there is a page at ``/``.
    """

    name: str
    store: Path
    store_limit_bytes: int
    host: str = "localhost"
    port: int = 8000
    keys: Sequence[str] = ()
    shares_store: bool = False
    queue: int = 64
    answer_seconds: float = 3600.0
    has_page: bool = True


def is_local(host: str) -> bool:
    """Whether only this machine can reach that address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class Server:
    """A model that is served until a signal ends it.

    Raises
    ------
    ConfigError
        The address is not this machine's own and there are no keys, or it is taken.
    KVSwapError
        No cache can be opened with these options.
    """

    def __init__(self, model: Any, tokenizer: Any, options: ServerOptions, caches: CacheOptions):
        if not is_local(options.host) and not options.keys:
            raise ConfigError(
                f"serve: --api-key-file must be given to listen on {options.host}, which others "
                "can reach"
            )
        seam.names()
        self._began = time.monotonic()
        self._connections = Connections(connections_of_process())
        self.counts = Counts()
        parts = model_parts(model)
        self.store = CacheStore(options.store, options.store_limit_bytes, parts, self.counts)
        context = caches.max_context or getattr(parts.config, "max_position_embeddings", None)
        if caches.kv_memory_bytes is not None:  # what is promised must have a place
            caches = dataclasses.replace(caches, max_context=context)
        bounds = Limits(context or 1 << 30, options.answer_seconds)
        reuse = PrefixReuse(model, self.store, caches, self.counts)
        reuse.try_opening()
        _generate_alone(model)
        answers = seam.Answers(model, tokenizer, options.name, reuse, bounds, self.counts)
        self._finish = answers.finish
        self._line = Line(options.queue)
        self._check = IdleCheck(self._line, self.store, self.counts, answers.submit)
        hosts = () if options.keys else (*_HOSTS, _bracketed(options.host))
        access = Access(options.keys, hosts, options.shares_store)
        folders = {"the store": options.store, "the folder for records": caches.path}
        health = Health(self._line, self.counts, folders, lambda: len(self._connections))
        self.app = Front(
            answers, options.name, self._line, self.counts, access, health, bounds, options.has_page
        )
        self._socket = _listen(options.host, options.port)

    @property
    def is_reading(self) -> bool:
        """Whether a thread still reads a saved cache; nothing is lost when it ends."""
        return self._check.is_reading

    @property
    def address(self) -> str:
        host, port = self._socket.getsockname()[:2]
        return f"http://{_bracketed(host)}:{port}"

    def close(self) -> None:
        """Waits for what is being saved, frees cache and port. `run` does it."""
        self._finish()
        self._socket.close()

    def _said_at_the_end(self) -> str:
        seconds, counts = int(time.monotonic() - self._began), self.counts
        hours, minutes = divmod(seconds // 60, 60)
        done = ", ".join(f"{counts[name]:.0f} {what}" for name, what in _AT_THE_END.items())
        return f"serve: ended after {hours} h {minutes} min {seconds % 60} s: {done}"

    def run(self, started: Callable[[], None] = lambda: None) -> None:
        """Answers until SIGTERM or Ctrl-C: the running answer ends with its step, and is saved."""
        import uvicorn

        line, idle_check = self._line, self._check

        class Loop(uvicorn.Server):
            def handle_exit(self, sig: int, frame: Any) -> None:
                is_again = self.should_exit
                line.ending.set()
                super().handle_exit(sig, frame)
                self.force_exit |= is_again

            async def startup(self, sockets: Any = None) -> None:
                await super().startup(sockets)
                self.checking = asyncio.ensure_future(idle_check.run())
                started()

            async def shutdown(self, sockets: Any = None) -> None:
                line.close()
                self.checking.cancel()
                while line.running and not self.force_exit:
                    await asyncio.sleep(0.05)
                await super().shutdown(sockets)

        config = uvicorn.Config(
            self.app,
            http=protocol(self._connections),
            ws="none",
            loop="asyncio",
            backlog=BACKLOG,
            log_config=None,  # as all else is logged
            log_level=logging.WARNING,
            lifespan="off",
            proxy_headers=False,
            server_header=False,
            timeout_graceful_shutdown=GRACE_SECONDS,
            timeout_keep_alive=int(HEAD_SECONDS),
        )
        # uvicorn raises its signals once more at the end, for whom it finds here.
        before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)}
        filtered = OnceAMinute()
        loggers = [logging.getLogger(name) for name in _LOGGERS]
        try:
            for each in loggers:
                each.addFilter(filtered)
            for each in before:
                signal.signal(each, _ignore)
            Loop(config).run(sockets=[self._socket])
        finally:
            self.close()
            logger.info("%s", self._said_at_the_end())
            for each in loggers:
                each.removeFilter(filtered)
            for each, handler in before.items():
                signal.signal(each, handler)


def _generate_alone(model: Any) -> None:
    """A model's own generation settings may ask for what no request may."""
    config = deepcopy(model.generation_config)
    changed = {
        name: only
        for name, only in ALONE.items()
        if getattr(config, name, None) not in (None, only)
    }
    if not changed:
        return
    logger.warning("serve: of the model's generation settings these are set: %s", changed)
    for name, only in changed.items():
        setattr(config, name, only)
    model.generation_config = config


def _bracketed(host: str) -> str:
    """As it stands in an address."""
    return f"[{host}]" if ":" in host else host


def _ignore(number: int, frame: Any) -> None:
    """Not `SIG_IGN`: children would inherit that."""


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family, backlog=128)
    except OSError as error:
        raise ConfigError(
            f"serve: --host and --port must be an address that is free, got {host}:{port}: "
            f"{error.strerror or error}"
        ) from error
