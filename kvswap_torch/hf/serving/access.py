"""Who may ask: keys, whose caches belong to whom, and what a server may be called."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Sequence

from kvswap_torch.hf.serving.refusal import RefusedError, shown

_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[0-9a-z._-]+)(:[0-9]{1,5})?")


class Access:
    """Decides from a request's headers.

    Parameters
    ----------
    keys
        Who has one of them may ask; none: anybody who reaches the server.
    hosts
        What requests may call the server; none: anything. A page of another site that a browser on
        this machine shows could otherwise ask a server that listens on localhost.
    shares
        Whether all keys go on from one another's caches.
    """

    def __init__(self, keys: Sequence[str], hosts: Sequence[str], shares: bool) -> None:
        self._keys = [(key.encode(), "" if shares else owner_of(key)) for key in keys]
        self._hosts = [host.lower() for host in hosts]

    def check_host(self, headers: dict[bytes, bytes]) -> None:
        """Raises a `RefusedError` where it is not the server's."""
        if not self._hosts:
            return
        given = headers.get(b"host", b"").decode("latin-1")
        match = _HOST.fullmatch(given.lower())
        if match is None or match[1] not in self._hosts:
            known = " or ".join(self._hosts)
            raise RefusedError(403, f"the server is {known}, got {shown(given)}")

    def owner(self, headers: dict[bytes, bytes]) -> str:
        """Whose caches a request may go on from; raises a `RefusedError` where it has no key."""
        if not self._keys:
            return ""
        scheme, _, key = headers.get(b"authorization", b"").strip().partition(b" ")
        given = key.strip() if scheme.lower() == b"bearer" else b""
        owners = [owner for each, owner in self._keys if hmac.compare_digest(given, each)]
        if not given or not owners:
            raise RefusedError(
                401, "Authorization must be Bearer and one of the server's API keys",
                "invalid_api_key",
            )  # fmt: skip
        return owners[0]


def owner_of(key: str) -> str:
    """The name of the folder in the store that has the caches of a key; says nothing of it."""
    return "key-" + hashlib.blake2b(key.encode(), digest_size=8, person=b"kvswap store").hexdigest()
