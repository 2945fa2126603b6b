"""Who may look: everybody, or, with an admin key, who shows it as a bearer token or has logged in with it.

Owns:      the check of both, and the form of the cookie: ``expires.mac``, made with the key and useless for finding it.
Never:     says how a key differs, logs one, or puts one into a cookie.
Invariant: comparisons take the same time wherever two values differ, and however long they are.
"""

import hashlib
import hmac
from collections.abc import Mapping

from deployments.settings.keys import digest

COOKIE = "manta_observatory"
LASTS_S = 12 * 3600  # a login


class AdminKey:
    """The key, or that there is none. White space around it does not count: headers, files and shells add some."""

    def __init__(self, key: str | None) -> None:
        self._digest = None if key is None else digest(key)

    @property
    def is_set(self) -> bool:
        return self._digest is not None

    def is_right(self, given: str) -> bool:
        """Whether ``given`` is the key."""
        return self._digest is not None and hmac.compare_digest(self._digest, digest(given))

    def admits(self, headers: Mapping[str, str], cookies: Mapping[str, str], now_s: float) -> bool:
        """Whether a request with these may see everything. ``now_s``: seconds since 1970."""
        if self._digest is None:
            return True
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            return self.is_right(given)
        return self._is_login(cookies.get(COOKIE, ""), now_s)

    def login(self, now_s: float) -> str:
        """A cookie's value for who has shown the key."""
        expires = str(int(now_s) + LASTS_S)
        return f"{expires}.{self._mac(expires)}"

    def _is_login(self, value: str, now_s: float) -> bool:
        expires, _, mac = value.partition(".")
        right = hmac.compare_digest(mac.encode(), self._mac(expires).encode())
        return right and expires.isdecimal() and int(expires) > now_s

    def _mac(self, expires: str) -> str:
        assert self._digest is not None, "there is no login without a key"
        return hmac.new(self._digest, b"manta observatory login " + expires.encode(), hashlib.sha256).hexdigest()

