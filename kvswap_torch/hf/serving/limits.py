"""What one client may take, all in one place.

docs/serving.md has the table, and test_serving_limits.py a test for each.
"""

from __future__ import annotations

import resource
from dataclasses import dataclass

from kvswap_torch.errors import ConfigError

HEAD_SECONDS = 10.0  # from the connection, or the last answer, to a request's whole head
BODY_SECONDS = 120.0  # from a request's head to the end of its body
PATIENCE_SECONDS = 60.0  # for a client that sends or takes nothing, while others wait
LINGER_SECONDS = 2.0  # what a refused client still sends is read and dropped that long
LINGER_BYTES = 4 << 20  # and so much of it at most

CHECK_SECONDS = 60.0  # between two saved caches that are read again while nothing is asked

STOP_TEXTS_MAX = 4
STOP_BYTES_MAX = 256
BIASES_MAX = 1024
ANSWERS_MAX = 16  # to one prompt
PROMPTS_MAX = 128  # of one request; all its answers together are no more
LOGPROBS_MAX = 20
LOGPROB_VALUES_MAX = 500_000  # of all tokens of a reply
NESTING_MAX = 100  # levels of a request's JSON
SHOWN_MAX = 80  # characters of what came, in an error
REQUEST_ID_MAX = 4096

BODY_BYTES_LEAST = 256 << 10  # of a request, whatever the context
BODY_BYTES_MOST = 64 << 20
BODY_BYTES_TOKEN = 96  # of JSON, for each token of the context: 16 of text, each an escape of six
TEXT_BYTES_TOKEN = 16  # a prompt with more for each token of the context is counted first
PIECE_BYTES = 64 << 10  # in pieces of so many
VALUES_MAX = 50_000  # of a request's JSON, beside one for each token of the context
BODIES_BYTES = 64 << 20  # of all requests that are read or wait; one of any size may always

CONNECTIONS_MAX = 512
CONNECTIONS_LEAST = 8
BACKLOG = 64  # that the kernel may have accepted for us at once
FILES = 64  # descriptors for caches, saves and what else a process has open


@dataclass(frozen=True)
class Limits:
    """What depends on the model and on options.

    Parameters
    ----------
    max_context
        Tokens of the longest prompt and answer.
    answer_seconds
        Longest time from a request's turn to the end of its answer.
    """

    max_context: int
    answer_seconds: float

    @property
    def body_bytes(self) -> int:
        """Of one request."""
        wanted = BODY_BYTES_LEAST + BODY_BYTES_TOKEN * self.max_context
        return min(wanted, BODY_BYTES_MOST)

    @property
    def values(self) -> int:
        """Of one request's JSON."""
        return min(VALUES_MAX + self.max_context, BODY_BYTES_MOST // 2)


def connections_of_process() -> int:
    """As many as descriptors allow, beside files and those that are about to be accepted.

    Raises
    ------
    ConfigError
        Too few are left.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return CONNECTIONS_MAX
    free = soft - FILES - BACKLOG
    if free < CONNECTIONS_LEAST:
        raise ConfigError(
            f"serve: a process must be allowed {FILES + BACKLOG + CONNECTIONS_LEAST} open files "
            f"(ulimit -n), got {soft}"
        )
    return min(free, CONNECTIONS_MAX)
