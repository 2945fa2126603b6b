"""The file of keys with tenants (``router.keys_file``): what each key may do, and how much.

Owns:      the reading of the file, at the start and whenever it changes. Each router reads it on its own node.
Never:     holds a key: the file has their SHA-256. Drops keys that were valid because a new file is not. Reads a file
           that others than this user and root may write to: who can write it can be an admin.
Invariant: ``error`` says why the file as it is now is not in force; "" if it is.
Thread:    `refresh` on any, one at a time; a reader sees the keys of one file, old or new.

    - id: search-prod                # names the key in `manta key list`, and its requests
      sha256: 5e88...                # of the key: `manta key new` prints both
      tenant: search                 # by default the id; keys of one tenant share its weight and its figures
      weight: 2                      # of its share of the replicas when they are short
      limits: {requests: 600, input_tokens: 200000, output_tokens: 60000, choices: 32, context: 8192, n: 4}
      highest_priority: 0            # a higher one that a request asks for counts as this
      models: [tinyllama]            # by default every model
      admin: false
"""

import functools
import hashlib
import hmac
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, TypeAdapter, ValidationError

from kvtransfer.stores.folder import read_own
from replicas.errors import InvalidConfig

log = logging.getLogger("ray.serve")

NAME = r"^[A-Za-z0-9_.-]{1,64}$"  # of a key or a tenant
Name = Annotated[str, StringConstraints(pattern=NAME)]
OTHERS, NOBODY = "others", "-"
TAKEN = {
    OTHERS: "metrics call the rest of the tenants so",
    NOBODY: "manta key usage calls requests without a key so",
}
Number = Annotated[int, Field(ge=1, le=1 << 53)]
HINT_LEN = 8  # bytes of a digest by which a key is looked up; the whole digest is then compared in constant time
MOST_KEYS = 10_000


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class KeyLimits(_Entry):
    """What one key may use; None: as much as it likes."""

    requests: Number | None = None  # a minute
    input_tokens: Number | None = None  # prompt tokens that no cache had, a minute
    output_tokens: Number | None = None  # a minute
    choices: Number | None = None  # that run or wait at once; None: router.max_choices_per_key
    context: Number | None = None  # tokens of a prompt and its longest answer
    n: Number | None = None  # choices of one request

    @functools.cached_property
    def a_minute(self) -> tuple[int | None, int | None, int | None]:
        """Those that tenancy/quotas.py keeps, in its order."""
        return (self.requests, self.input_tokens, self.output_tokens)


class TenantKey(_Entry):
    """One entry of the file."""

    id: Name
    sha256: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")] = Field(repr=False)
    tenant: Name | None = None
    weight: Annotated[float, Field(gt=0, le=1000)] = 1.0
    limits: KeyLimits = KeyLimits()
    highest_priority: Annotated[int, Field(ge=-1000, le=1000)] = 1000
    models: Annotated[tuple[str, ...] | None, Field(strict=False)] = None
    admin: bool = False

    @property
    def of(self) -> str:
        """The name of its tenant."""
        return self.tenant or self.id

    @functools.cached_property
    def name(self) -> str:
        """The name of its caller: 16 hex digits that stay when the key of this id is replaced."""
        return hashlib.sha256(f"manta key {self.id}".encode()).hexdigest()[:16]


_FILE = TypeAdapter(list[TenantKey])


@dataclass(slots=True)
class TenantKeys:
    """The keys of one file, as they are in force."""

    path: str = ""  # "": there is no file
    error: str = ""
    by_name: Mapping[str, TenantKey] = field(default_factory=dict)  # of the caller
    _by_hint: Mapping[bytes, tuple[bytes, TenantKey]] = field(default_factory=dict)  # and its whole digest
    _stamp: tuple[int, ...] = ()  # of the file that was looked at last

    @staticmethod
    def read(path: str) -> "TenantKeys":
        """Read the file for the first time. Raises: InvalidConfig."""
        keys = TenantKeys(str(Path(path).expanduser().absolute()))
        keys._stamp, found = keys._look(), parsed(keys.path)
        keys._take(found)
        return keys

    @property
    def tenants(self) -> Sequence[str]:
        """The names of all tenants, in the order of the file."""
        return list(dict.fromkeys(key.of for key in self.by_name.values()))

    def find(self, digest: bytes) -> TenantKey | None:
        """Return the key with this SHA-256."""
        whole, key = self._by_hint.get(digest[:HINT_LEN], (b"", None))
        return key if hmac.compare_digest(whole, digest) else None

    def refresh(self) -> None:
        """Read the file if it has changed; one that cannot be used leaves the keys as they are."""
        try:
            stamp = self._look()
            if stamp == self._stamp:
                return
            self._stamp = stamp
            self._take(parsed(self.path))
        except InvalidConfig as error:
            if str(error) != self.error:
                log.error("%s: the %d keys from before stay in force", error, len(self.by_name))
            self.error, self._stamp = str(error), ()  # it is read again: chmod changes nothing of what is looked at
            return
        self.error = ""
        log.warning("router.keys_file: %s has changed: %d keys are in force", self.path, len(self.by_name))

    def _look(self) -> tuple[int, ...]:
        try:
            stat = Path(self.path).stat()
        except OSError as error:
            raise _unreadable(self.path, error) from error
        return (stat.st_ino, stat.st_mtime_ns, stat.st_size)

    def _take(self, keys: Sequence[TenantKey]) -> None:
        by_digest = ((bytes.fromhex(key.sha256), key) for key in keys)
        self._by_hint = {digest[:HINT_LEN]: (digest, key) for digest, key in by_digest}
        self.by_name = {key.name: key for key in keys}


def parsed(path: str) -> list[TenantKey]:
    """Read and check a file of keys. Raises: InvalidConfig, which names the entry."""
    try:
        content: Any = yaml.safe_load(read_own(path).decode())
        keys = _FILE.validate_python(content)
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(path, error) from error
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise InvalidConfig(f"router.keys_file: {path}: entry {where or 0}: {first['msg']}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # a date that is none is a ValueError
        raise InvalidConfig(f"router.keys_file: {path} is no YAML: {' '.join(str(error).split())}") from error
    if not 1 <= len(keys) <= MOST_KEYS:
        raise InvalidConfig(f"router.keys_file: {path} has {len(keys)} keys: it must have 1 to {MOST_KEYS:,}")
    for what in ("id", "sha256"):
        seen: set[str] = set()
        for key in keys:
            if getattr(key, what) in seen:
                raise InvalidConfig(f"router.keys_file: {path}: {key.id} has the {what} of another entry")
            seen.add(getattr(key, what))
    weights: dict[str, float] = {}
    for key in keys:
        if key.of in TAKEN:
            raise InvalidConfig(
                f"router.keys_file: {path}: {key.id} is of a tenant {key.of!r}: {TAKEN[key.of]}; give it another name"
            )
        if weights.setdefault(key.of, key.weight) != key.weight:
            raise InvalidConfig(f"router.keys_file: {path}: the keys of tenant {key.of} differ in their weight")
    return keys


def _unreadable(path: str, error: Exception) -> InvalidConfig:
    return InvalidConfig(f"router.keys_file: {path} cannot be read ({error})")
