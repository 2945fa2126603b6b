"""The groups of settings about replicas, adapters and KV transfers, and the spellings of values that are accepted.

Owns:      the base class of all groups, which is frozen and refuses unknown names; the values of vLLM, SGLang and YAML
           that are translated to ours before the checks, so that the code sees the spelling of replicas/config.py only.
Never:     repeats a default of the engine (replicas/config.py) or of KV transfers (kvtransfer/types.py). Shows the
           transfer token or the store's key: `without_secrets` leaves them out.
"""

import dataclasses
import os
import re
import secrets
from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_type_hints

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetPydanticSchema,
    SecretStr,
    StringConstraints,
    field_validator,
    model_validator,
    with_config,
)
from typing_extensions import TypedDict  # pydantic's own; typing's has what it needs from Python 3.12 on

from deployments.settings.settings_file import shown
from kvtransfer.types import TransferSettings, Verify
from replicas.config import AdapterLimits, CacheConfig, Device, ParallelConfig, SchedulerConfig

DTYPES: Mapping[str, str | None] = {
    "fp32": "float32", "float": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16",
    "fp8_e4m3": "fp8", "auto": None,
}  # fmt: skip


_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?(?:([kKMGT])(i?))?B?")


def in_bytes(size: str) -> int | str:
    """Read a size as Kubernetes writes them: GB or G are powers of 1,000, GiB or Gi of 1,024; anything else is kept."""
    found = _SIZE.fullmatch(size.strip())
    if found is None:
        return size
    power = 0 if found[2] is None else "KMGT".index(found[2].upper()) + 1
    return int(float(found[1]) * (1024 if found[3] else 1000) ** power) if power or "." not in found[1] else size


def _dtype(value: Any) -> Any:
    return DTYPES.get(value, value) if isinstance(value, str) else value


def _quantization(value: Any) -> Any:
    return "none" if value is None else value


def _cache(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if "kv_cache_dtype" in value:
        if "kv_dtype" in value:
            raise ValueError("kv_dtype and kv_cache_dtype are both given, but are the same setting; leave one out")
        value = {"kv_dtype" if name == "kv_cache_dtype" else name: each for name, each in value.items()}
    return {**value, "kv_dtype": _dtype(value["kv_dtype"])} if "kv_dtype" in value else value


def _scheduler(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    # in YAML a bare ``on`` is True
    names = ("overlap", "priorities", "speculation")
    flags = {name: value[name] for name in names if isinstance(value.get(name), bool)}
    return {**value, **{name: "on" if is_on else "off" for name, is_on in flags.items()}}


DTYPE_NAMES = BeforeValidator(_dtype)
QUANTIZATION_NAMES = BeforeValidator(_quantization)
CACHE_NAMES = BeforeValidator(_cache)
SCHEDULER_NAMES = BeforeValidator(_scheduler)


# errors are logged with their cause, and the input may contain a secret
_GROUP = ConfigDict(extra="forbid", hide_input_in_errors=True)
for _engines in (CacheConfig, SchedulerConfig, ParallelConfig):
    with_config(_GROUP)(_engines)


class Settings(BaseModel):
    """The base of all groups of settings: frozen, and unknown names are refused."""

    model_config = ConfigDict(**_GROUP, frozen=True, protected_namespaces=())


class AutoscalingSettings(Settings):
    """The range and the rule of autoscaling. Bounds and delays are Ray Serve's, under its names."""

    min_replicas: int = 1  # fewest replicas
    max_replicas: int = Field(default=2, ge=1)  # most replicas
    initial_replicas: int | None = None  # replicas at the start; by default min_replicas
    # more replicas start when computing the waiting prompt tokens would take longer than this
    ttft_objective_s: float = Field(default=5.0, gt=0)
    # more replicas start when requests hold more than this share of the KV pools
    pool_high: float = Field(default=0.85, gt=0, le=1)
    # more replicas start when requests take more than this share of the running slots
    running_high: float = Field(default=0.9, gt=0, le=1)
    # replicas stop when the rest would be loaded to at most this share of the three limits above
    slack: float = Field(default=0.7, gt=0, le=1)
    # how long the need for more replicas must last before they start
    upscale_delay_s: float = Field(default=10.0, ge=0)
    downscale_delay_s: float = Field(default=300.0, ge=0)  # how long fewer replicas must suffice before some stop
    metrics_interval_s: float = Field(default=1.0, gt=0)  # how often a replica reports its load to Ray Serve
    look_back_period_s: float = Field(default=5.0, gt=0)  # time over which Ray Serve averages the reports

    @model_validator(mode="after")
    def _averaged(self) -> "AutoscalingSettings":
        if self.look_back_period_s <= self.metrics_interval_s:
            raise ValueError(
                f"look_back_period_s ({self.look_back_period_s}) must exceed metrics_interval_s "
                f"({self.metrics_interval_s})"
            )
        return self

    @field_validator("min_replicas", "initial_replicas")
    @classmethod
    def _at_least_one(cls, value: int | None) -> int | None:
        if value is not None and value < 1:
            raise ValueError(
                "must be at least 1: without a replica the routers answer 503 themselves, and Ray Serve would never "
                "see a request for which to start one"
            )
        return value

    @model_validator(mode="after")
    def _ordered(self) -> "AutoscalingSettings":
        if self.min_replicas > self.max_replicas:
            raise ValueError(f"min_replicas ({self.min_replicas}) exceeds max_replicas ({self.max_replicas})")
        return self


class ReplicaSettings(Settings):
    """The group ``replicas``: how many there are, and what each may use."""

    # number of replicas; auto: on CPUs 2 if cores and memory suffice, else 1; with gpus as many as the cluster's GPUs,
    # and the cores beside them, hold
    count: int | Literal["auto"] = "auto"
    cpus: float = Field(default=1.0, gt=0)  # CPUs that Ray reserves for each rank; also its number of compute threads
    gpus: float = Field(default=0.0, ge=0)  # GPUs of each rank; 0: it computes on the CPU, even on a machine with GPUs
    autoscaling: AutoscalingSettings | None = None  # replaces count by a range that follows the load
    health_period_s: float = Field(default=2.0, gt=0)  # how often Ray Serve asks a replica for its health
    health_timeout_s: float = Field(default=30.0, gt=0)  # how long Ray Serve waits for the answer
    # how long a replica that is removed may take to finish its requests
    drain_timeout_s: float = Field(default=120.0, ge=0)
    # share of drain_timeout_s in which it may push what it has cached to the host tiers of the others; 0: not at all
    push_share: float = Field(default=0.5, ge=0, lt=1)
    # how long a new replica is filled with the prefixes that others use most before it is used; 0: not at all
    fill_s: float = Field(default=2.0, ge=0)

    @property
    def device(self) -> Device:
        """The device that a replica computes on."""
        return "cuda" if self.gpus else "cpu"

    @property
    def num_threads(self) -> int:
        """The compute threads of each rank."""
        return max(1, int(self.cpus))

    @field_validator("count", mode="before")
    @classmethod
    def _auto_or_some(cls, count: Any) -> Any:
        if count != "auto" and (not isinstance(count, int) or isinstance(count, bool) or count < 1):
            raise ValueError(f"must be auto, or a whole number of 1 or more, not {shown(count)}")
        return count

    @field_validator("gpus")
    @classmethod
    def _whole(cls, gpus: float | None) -> float | None:
        return _check_gpus(gpus)


def _check_gpus(gpus: float | None) -> float | None:
    if gpus is not None and gpus > 1 and gpus != int(gpus):
        raise ValueError(f"must be a whole number, or a part of one GPU, below 1, not {gpus:g}")
    return gpus


# any of cache's settings, each checked by itself
_CACHE_HINTS = get_type_hints(CacheConfig, include_extras=True)
_SomeOfCache = with_config(_GROUP)(TypedDict("_SomeOfCache", _CACHE_HINTS, total=False))  # type: ignore[operator]


class RoleSettings(Settings):
    """The settings of one role that replace those of ``replicas``, ``parallel`` and ``cache``."""

    # number of replicas of the role; by default replicas.count, and 1 where that is auto
    count: int | None = Field(default=None, ge=1)
    autoscaling: AutoscalingSettings | None = None  # replaces the role's count; by default replicas.autoscaling
    cpus: float | None = Field(default=None, gt=0)  # CPUs of each rank of the role; by default replicas.cpus
    gpus: float | None = Field(default=None, ge=0)  # GPUs of each rank of the role; by default replicas.gpus
    tp: int | None = Field(default=None, ge=1)  # ranks of each replica of the role; by default parallel.tp
    # settings of cache that differ for the role; page_size and kv_dtype must be the same for both
    cache: Annotated[dict[str, Any], GetPydanticSchema(lambda _, schema_of: schema_of(_SomeOfCache)), CACHE_NAMES] = (
        Field(default_factory=dict)
    )

    @field_validator("gpus")
    @classmethod
    def _whole(cls, gpus: float | None) -> float | None:
        return _check_gpus(gpus)

    @model_validator(mode="after")
    def _one_way(self) -> "RoleSettings":
        if self.count is not None and self.autoscaling is not None:
            raise ValueError("count and autoscaling are both given; leave one out")
        return self


_PART = r"\.*[A-Za-z0-9_@+=-][A-Za-z0-9._@+=-]*"  # no ".." or the like
ADAPTER_NAME, LONGEST_NAME = rf"^{_PART}(/{_PART})*$", 128
AdapterName = Annotated[str, StringConstraints(pattern=ADAPTER_NAME, max_length=LONGEST_NAME)]


class AdapterSettings(Settings):
    """The group ``adapters``: fine-tunes (LoRA) of the model, of which a request names one."""

    # folder of each adapter by the name that requests use; every node has it at this path
    names: dict[AdapterName, str] = Field(default_factory=dict)
    # absolute folders below which adapters may be loaded while Manta runs (POST /v1/load_lora_adapter); by default
    # nowhere
    roots: tuple[Annotated[str, StringConstraints(pattern="^/")], ...] = ()
    # absolute folder in which the names that are loaded so are kept; all routers share it
    names_folder: str | None = Field(default=None, pattern="^/")
    max_rank: int = Field(default=64, ge=1)  # an adapter of a higher rank is refused
    max_bytes: int = Field(default=1 << 30, ge=1024)  # one whose file is larger is refused
    # memory of each replica for adapters, beside cache.device_memory_bytes; on a GPU out of its memory for weights and
    # pool; those used least recently make room
    host_bytes: int = Field(default=1 << 30, ge=1024)

    @property
    def served(self) -> AdapterLimits | None:
        """What replicas serve; None where no request can name an adapter."""
        return self.limits if self.names or self.roots else None

    @property
    def limits(self) -> AdapterLimits:
        return AdapterLimits(
            max_rank=self.max_rank, max_bytes=max(self.max_bytes, self.host_bytes), host_bytes=self.host_bytes
        )

    @model_validator(mode="after")
    def _both_or_neither(self) -> "AdapterSettings":
        if bool(self.roots) != (self.names_folder is not None):
            raise ValueError("roots and names_folder belong together: give both, or leave both out")
        return self


TOKEN_VARIABLE = "MANTA_TRANSFER_TOKEN"
TOKEN_LEN = 16  # characters, at least
_DEFAULT: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(TransferSettings)}


def _yaml_off(value: Any) -> Any:
    return "off" if value is False else value  # in YAML a bare ``off`` is False


class TransferGroup(Settings):
    """The group ``transfer``: KV transfers between prefill and decode replicas, and fetches between any."""

    # whether a replica gets cached pages from another one where that is quicker than computing them
    fetch: Literal["auto", "off"] = "off"
    # which prompts are handed over: those for which it costs less, or always all that can be
    disaggregation: Literal["conditional", "always"] = "conditional"
    # pages whose digest the receiver checks; by default all between CPUs, last (of each write) where a role has GPUs
    verify: Annotated[Verify | None, BeforeValidator(_yaml_off)] = None
    transport: Literal["auto", "tcp"] = "auto"  # auto: shared memory on one host, else what UCX finds; tcp: TCP only
    # address on which replicas listen for each other; auto: the address of their node
    host: str = Field(default="auto", min_length=1)
    # secret that replicas show each other; by default MANTA_TRANSFER_TOKEN, else a new one at each start
    token: SecretStr | None = None
    # how long a prefill replica waits for the decode replica's row and pages, its queue included
    open_timeout_s: float = Field(default=_DEFAULT["open_timeout_s"], gt=0)
    # how long a decode replica waits for the next page before it computes the prompt itself
    room_timeout_s: float = Field(default=_DEFAULT["room_timeout_s"], gt=0)
    # how long a replica waits for the answer to a call
    call_timeout_s: float = Field(default=_DEFAULT["call_timeout_s"], gt=0)
    heartbeat_s: float = Field(default=_DEFAULT["heartbeat_s"], gt=0)  # time between two heartbeats of a replica
    # the KV transfers of a replica fail after this many missed heartbeats
    heartbeat_misses: int = Field(default=_DEFAULT["heartbeat_misses"], ge=1)
    # with TP: a replica is replaced if the transfer port of one of its ranks is silent for this long
    rank_timeout_s: float = Field(default=_DEFAULT["rank_timeout_s"], gt=0)
    pages_per_write: int = Field(default=_DEFAULT["pages_per_write"], ge=1)  # pages in one write

    @field_validator("token")
    @classmethod
    def _long_enough(cls, token: SecretStr | None) -> SecretStr | None:
        if token is not None and len(token.get_secret_value()) < TOKEN_LEN:
            raise ValueError(f"must have at least {TOKEN_LEN} characters, here or in {TOKEN_VARIABLE}")
        return token

    def of_engine(self, node_address: str) -> TransferSettings:
        """Make the settings of an engine on the node with this address, after `with_secrets` and `resolved`."""
        assert self.token is not None, "build gives the replicas a token"
        given = {name: getattr(self, name) for name in _DEFAULT if name not in ("host", "token")}
        given["verify"] = self.verify or Verify.ALL
        host = node_address if self.host == "auto" else self.host
        return TransferSettings(host=host, token=self.token.get_secret_value().encode(), **given)

    def resolved(self, *, on_gpus: bool, max_wait_s: float) -> "TransferGroup":
        """Fill in what both sides must agree on, and have each wait for longer than the other may queue.

        Args: on_gpus: at least one side has its pages on a GPU. max_wait_s: the longest queue that a router allows.
        """
        waits = {name: max(getattr(self, name), 1.5 * max_wait_s) for name in ("open_timeout_s", "room_timeout_s")}
        return self.model_copy(update={"verify": self.verify or (Verify.LAST if on_gpus else Verify.ALL), **waits})

    def shown(self) -> dict[str, Any]:
        """Write the settings without the secret."""
        return self.model_dump(mode="json", exclude={"token"})


STORE_KEY_VARIABLE = "MANTA_STORE_KEY"
HIDDEN = ("token", "store_key")  # of any group: what is never shown


def with_secrets(args: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Add the cluster's secrets to ``args``: from the settings, the environment, or, the transfer token, a new one.

    The result must be parsed, since a secret of the environment has not been checked.
    """
    secret_of = {"cache": ("store_key", environ.get(STORE_KEY_VARIABLE))}
    transfer = args.get("transfer")
    if args.get("mode") == "disaggregated" or (isinstance(transfer, Mapping) and transfer.get("fetch") == "auto"):
        secret_of["transfer"] = ("token", environ.get(TOKEN_VARIABLE) or secrets.token_hex(32))
    given = dict(args)
    for group, (name, secret) in secret_of.items():
        own = given.get(group) or {}
        if secret and isinstance(own, Mapping) and not own.get(name):  # the check of the settings reports others
            given[group] = {**own, name: secret}
    return given


def without_secrets(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Copy ``settings`` without the secrets of any group in them."""
    return {
        name: without_secrets(value) if isinstance(value, Mapping) else value
        for name, value in settings.items()
        if name not in HIDDEN
    }
