"""API keys and the admin key: where they are configured, and which caller a request's key identifies.

Owns:      the reading of both from settings, a file and the environment.
Never:     stores, logs, shows or sends a key; only `KeyDigests` are stored.
Invariant: a comparison takes the same time wherever two keys differ, and whichever of several keys matches.

Without API keys every request has the same `Caller`. If there is an admin key, only the admin's routes ask for it.
"""

import hashlib
import hmac
import os
import re
import secrets
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from deployments.places import ROOT
from replicas.errors import InvalidConfig

if TYPE_CHECKING:  # pydantic takes as long to load as all else of the command line
    from deployments.tenancy.tenants import TenantKey, TenantKeys

KEYS_VARIABLE = "MANTA_API_KEYS"
KEY_VARIABLE = "MANTA_ADMIN_KEY"
CacheIsolation = Literal["key", "tenant", "none"]
KEY_LEN = 8  # characters, at least
SECRET = ("admin_key", "api_key_file")  # of the group ``router``
GOOD_KEY_LEN = 20  # shorter ones warn: who reads log lines may search for the key that a caller's name was made from
NAME_ROUNDS = 20_000  # about 10 ms: a caller's name is in log lines and must not help to guess the key


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """The sender of a request, as far as its key identifies it."""

    name: str = ""  # 16 hex digits made from its key, in its request ids and salts; "" without a key
    is_admin: bool = False
    key: "TenantKey | None" = None  # of router.keys_file; None: its key is not from there

    @property
    def tenant(self) -> str:
        """The name of its tenant: a key that is not from router.keys_file is one by itself."""
        return self.name if self.key is None else self.key.of


ANYBODY = Caller()
CALLER: ContextVar[str] = ContextVar("caller", default="")  # name of the caller whose request this task answers


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """The digest of one accepted key, and the name of its caller."""

    digest: bytes = field(repr=False)  # SHA-256
    name: str  # of the caller


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyDigests:
    """The digests of all accepted keys, as routers hold them."""

    api: tuple[ApiKey, ...] = ()
    admin: ApiKey | None = None
    short: tuple[str, ...] = ()  # where a key has fewer than GOOD_KEY_LEN characters
    tenants: "TenantKeys | None" = None  # of router.keys_file, which may change while routers run

    def read_anew(self) -> "KeyDigests":
        """Return these with the keys that their file has now: it may have changed since the application was built.

        Raises: InvalidConfig.
        """
        return self if self.tenants is None else replace(self, tenants=_of_tenants(self.tenants.path))

    @property
    def exist(self) -> bool:
        """Whether any key exists. If so, the admin's routes ask for the admin key, even if there is none."""
        return self.asked or self.admin is not None

    @property
    def asked(self) -> bool:
        """Whether clients need an API key."""
        return bool(self.api) or self.tenants is not None

    @property
    def num(self) -> int:
        """The API keys that exist now, each of which is a caller of its own."""
        return len(self.api) + (0 if self.tenants is None else len(self.tenants.by_name))

    @property
    def guard(self) -> bytes | None:
        """The digest of the key for the metrics ports. None: no key is needed; b"": no key is accepted."""
        return self.admin.digest if self.admin is not None else b"" if self.asked else None

    def caller(self, headers: Mapping[str, str]) -> Caller | None:
        """Identify the caller by the key in ``headers``. Returns: None if an API key is required and none matches."""
        if not self.exist:
            return ANYBODY
        given = [digest(key) for key in shown_keys(headers)]
        keys = self.api if self.admin is None else (self.admin, *self.api)
        right = [key for key in keys for each in given if hmac.compare_digest(each, key.digest)]  # compares all of them
        if right:
            return Caller(name=right[0].name, is_admin=right[0] is self.admin)
        for each in given:
            if self.tenants is not None and (found := self.tenants.find(each)) is not None:
                return Caller(name=found.name, is_admin=found.admin, key=found)
        return None if self.asked else ANYBODY

    def named(self, name: str) -> Caller | None:
        """Return the caller ``name``, as of now. Returns: None if an API key is required and it has none any more."""
        for key in self.api if self.admin is None else (self.admin, *self.api):
            if key.name == name:
                return Caller(name=name, is_admin=key is self.admin)
        found = None if self.tenants is None else self.tenants.by_name.get(name)
        if found is not None:
            return Caller(name=name, is_admin=found.admin, key=found)
        return None if self.asked else Caller(name=name)


NO_KEYS = KeyDigests()


def new_key() -> str:
    """Make a random key of 32 characters."""
    return secrets.token_urlsafe(24)


def digest(key: str) -> bytes:
    """Hash a key, without the white space around it: headers, files and shells add some."""
    return hashlib.sha256(key.strip().encode()).digest()


def shown_keys(headers: Mapping[str, str]) -> list[str]:
    """List the keys in the two headers of a request that may hold one."""
    scheme, _, bearer = headers.get("authorization", "").partition(" ")
    api_key = headers.get("x-api-key", "")
    return [key for key in (bearer if scheme.lower() == "bearer" else "", api_key) if key.strip()]


def read_keys(
    *,
    api_key_file: str | None,
    admin_key: str | None,
    keys_file: str | None = None,
    environ: Mapping[str, str] = os.environ,
) -> KeyDigests:
    """Read the keys from the settings and the environment. Raises: InvalidConfig, whose text never contains a key."""
    listed = [(key, KEYS_VARIABLE) for key in _split(environ.get(KEYS_VARIABLE, ""))]
    if api_key_file is not None:
        listed += [(key, f"router.api_key_file ({api_key_file})") for key in _of_file(api_key_file)]
    admin = (admin_key or environ.get(KEY_VARIABLE, "")).strip()
    given = [*listed, *([(admin, f"router.admin_key, or {KEY_VARIABLE},")] if admin else [])]
    for key, where in given:
        if len(key) < KEY_LEN:
            raise InvalidConfig(f"{where} has a key of {len(key)} characters: each must have at least {KEY_LEN}")
    keys = sorted({key for key, _ in listed})
    if admin in keys:
        raise InvalidConfig(
            "router.admin_key: is also an API key, so that its client could do all that the admin can: give another one"
        )
    short = dict.fromkeys(where for key, where in given if len(key) < GOOD_KEY_LEN)
    admins = _accepted(admin) if admin else None
    tenants = None if keys_file is None else _of_tenants(keys_file)
    for key in [*keys, *([admin] if admin else [])]:
        if tenants is not None and (same := tenants.find(digest(key))) is not None:
            raise InvalidConfig(f"router.keys_file: {same.id} has a key that is given elsewhere too: use one place")
    return KeyDigests(api=tuple(_accepted(key) for key in keys), admin=admins, short=tuple(short), tenants=tenants)


def _of_tenants(path: str) -> "TenantKeys":
    from deployments.tenancy.tenants import TenantKeys

    return TenantKeys.read(path)


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
    """Copy ``args`` for all processes, without the settings that `read_keys` reads."""
    router = {name: value for name, value in (args.get("router") or {}).items() if name not in SECRET}
    return {**args, "router": router} if "router" in args else dict(args)
