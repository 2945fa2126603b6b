"""API keys and the admin key: where they are configured, and which caller a request's key belongs to.

Owns:      the reading of both from settings, a file and the environment.
Never:     keeps, logs, shows or sends a key: what is kept is `KeyDigests`.
Invariant: comparisons take the same time wherever two keys differ, and whichever of several is the right one.

Without API keys every request has the same `Caller`, and only routes of the admin ask, if there is an admin key.
"""

import hashlib
import hmac
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deployments.settings.places import ROOT
from replicas.errors import InvalidConfig

KEYS_VARIABLE = "MANTA_API_KEYS"
KEY_VARIABLE = "MANTA_ADMIN_KEY"
KEY_LEN = 8  # characters, at least
SECRET = ("admin_key", "api_key_file")  # of the group ``router``
NAME_ROUNDS = 20_000  # about 10 ms: the name of a caller stands in log lines, and must not help to guess the key


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who sent a request, as far as its key says."""

    name: str = ""  # 16 hex digits made from its key, in its request ids and salts; "" without a key
    is_admin: bool = False


ANYBODY = Caller()


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """One key that is accepted."""

    digest: bytes = field(repr=False)  # SHA-256
    name: str  # of the caller


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyDigests:
    """All keys, as routers hold them."""

    api: tuple[ApiKey, ...] = ()
    admin: ApiKey | None = None

    @property
    def exist(self) -> bool:
        """Whether there is any: the admin's routes then ask for the admin key, whether that exists or not."""
        return bool(self.api) or self.admin is not None

    @property
    def guard(self) -> bytes | None:
        """The digest that the ports of metrics ask for. None: no key is needed; b"": no key is accepted."""
        return self.admin.digest if self.admin is not None else b"" if self.api else None

    def caller(self, headers: Mapping[str, str]) -> Caller | None:
        """Whose key ``headers`` hold; None where an API key is asked for and none of them is right."""
        if not self.exist:
            return ANYBODY
        given = [digest(key) for key in shown_keys(headers)]
        keys = self.api if self.admin is None else (self.admin, *self.api)
        right = [key for key in keys for each in given if hmac.compare_digest(each, key.digest)]  # all are compared
        if right:
            return Caller(name=right[0].name, is_admin=right[0] is self.admin)
        return None if self.api else ANYBODY


NO_KEYS = KeyDigests()


def digest(key: str) -> bytes:
    """White space around a key does not count: headers, files and shells add some."""
    return hashlib.sha256(key.strip().encode()).digest()


def shown_keys(headers: Mapping[str, str]) -> list[str]:
    """What a request shows as its key, in either of the two headers, or both."""
    scheme, _, bearer = headers.get("authorization", "").partition(" ")
    api_key = headers.get("x-api-key", "")
    return [key for key in (bearer if scheme.lower() == "bearer" else "", api_key) if key.strip()]


def read_keys(
    *, api_key_file: str | None, admin_key: str | None, environ: Mapping[str, str] = os.environ
) -> KeyDigests:
    """The keys of the settings and of the environment. Raises: InvalidConfig, which never repeats a key."""
    listed = [(key, KEYS_VARIABLE) for key in _split(environ.get(KEYS_VARIABLE, ""))]
    if api_key_file is not None:
        listed += [(key, f"router.api_key_file ({api_key_file})") for key in _of_file(api_key_file)]
    admin = (admin_key or environ.get(KEY_VARIABLE, "")).strip()
    for key, where in [*listed, *([(admin, f"router.admin_key, or {KEY_VARIABLE},")] if admin else [])]:
        if len(key) < KEY_LEN:
            raise InvalidConfig(f"{where} has a key of {len(key)} characters: each must have at least {KEY_LEN}")
    keys = sorted({key for key, _ in listed})
    if admin in keys:
        raise InvalidConfig("router.admin_key: is among the API keys, and whoever has it may do all: give another")
    return KeyDigests(api=tuple(_accepted(key) for key in keys), admin=_accepted(admin) if admin else None)


def _of_file(path: str) -> list[str]:
    file = next((each for each in (Path(path).expanduser(), ROOT / path) if each.is_file()), Path(path))
    try:
        lines = file.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidConfig(f"router.api_key_file: {path} cannot be read ({error}): give a file of keys") from error
    keys = [key for line in lines if not line.lstrip().startswith("#") for key in _split(line)]
    if not keys:
        raise InvalidConfig(f"router.api_key_file: {path} holds no key: write one a line, or leave the setting out")
    return keys


def _split(text: str) -> list[str]:
    return [key for key in re.split(r"[\s,]+", text) if key]


def _accepted(key: str) -> ApiKey:
    name = hashlib.pbkdf2_hmac("sha256", key.encode(), b"manta caller", NAME_ROUNDS, dklen=8).hex()
    return ApiKey(digest=digest(key), name=name)


def without_keys(args: Mapping[str, Any]) -> dict[str, Any]:
    """``args`` as every process may have them: with what `read_keys` reads left out."""
    router = {name: value for name, value in (args.get("router") or {}).items() if name not in SECRET}
    return {**args, "router": router} if "router" in args else dict(args)
