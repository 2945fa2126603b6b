"""The ``args`` of serve_config.yaml: every setting of the application, checked before anything starts.

Owns:      names, defaults and checks of the application's settings. Those of the engine are the dataclasses of
           replicas/config.py themselves, so that the two cannot drift.
Never:     fills in what depends on the machine (capacity.py, replicas.config.resolve).
"""

import copy
import dataclasses
from typing import Annotated, Any, Literal

from pydantic import Field, SecretStr, ValidationError, field_validator, model_validator

from deployments.settings.groups import (
    CACHE_NAMES,
    DTYPE_NAMES,
    QUANTIZATION_NAMES,
    SCHEDULER_NAMES,
    AutoscalingSettings,
    ReplicaSettings,
    RoleSettings,
    Settings,
    TransferGroup,
)
from deployments.settings.keys import SECRET, KeyDigests, read_keys
from deployments.settings.settings_file import nearest, sentences, setting_of
from replicas.config import Attention, CacheConfig, DType, ParallelConfig, ProductSetting, Quantization, SchedulerConfig
from replicas.errors import InvalidConfig
from routing.policies import POLICIES


class ModelSettings(Settings):
    path: str = Field(min_length=1)  # folder (relative to the project's root) or hub id
    revision: str | None = Field(default=None, min_length=1)  # of a hub id: branch, tag or commit; None: main
    served_name: str | None = None  # as requests name it; None: the last part of the path
    dtype: Annotated[DType | None, DTYPE_NAMES] = None  # None: float32 on CPU, the checkpoint's on GPU
    quantization: Annotated[Quantization, QUANTIZATION_NAMES] = "none"  # int8: on CPU, products in int8
    products: ProductSetting = "auto"  # fp32 on CPU: own, blas for steps of many rows, or what is measured as faster
    context_len: int | None = Field(default=None, ge=1)  # None: the model's own

    @property
    def name(self) -> str:
        return self.served_name or self.path.rstrip("/").rsplit("/", 1)[-1]


class RouterSettings(Settings):
    policy: str = "estimated_ttft"
    count: int = Field(default=1, ge=1)  # routers; each is an HTTP ingress
    cpus: float = Field(default=0.0, ge=0)
    max_body_bytes: int = Field(default=4 << 20, ge=1024)
    body_timeout_s: float = Field(default=60.0, gt=0)  # a body that is not complete by then is answered with 408
    max_tries: int = Field(default=3, ge=1)  # replicas that one request may be sent to, one after the other
    retry_wait_s: float = Field(default=30.0, ge=0)  # how long a request whose replica died waits for another one
    report_period_s: float = Field(default=0.1, gt=0, le=10)  # how often replicas send cache events and statistics
    hang_timeout_s: float = Field(default=4.0, gt=0)  # a replica silent for this long is left (docs/routing.md)
    max_wait_s: float = Field(default=120.0, gt=0)  # longer queues, as estimated, are answered with 429
    decisions_kept: int = Field(default=1000, ge=1)  # most recent requests, for GET /route/{rid}; 0.5 KB a replica each
    api_key_file: str | None = None  # keys that clients show, one a line; beside those of MANTA_API_KEYS
    admin_key: SecretStr | None = None  # None: MANTA_ADMIN_KEY, or none
    cache_isolation: Literal["key", "none"] = "key"  # key: requests of different API keys share no cached prefix
    allowed_hosts: tuple[str, ...] = ()  # names in Host beside the loopback's, where that is served without API keys
    cors_origins: tuple[str, ...] = ()  # of web pages that may call, such as http://localhost:3000; "*": all

    @field_validator("policy")
    @classmethod
    def _known(cls, policy: str) -> str:
        if policy not in POLICIES:
            raise ValueError(f"{policy!r} is unknown{nearest(policy, POLICIES)}; allowed: {', '.join(POLICIES)}")
        return policy

    def known_keys(self) -> KeyDigests:
        """With those of the environment here. Raises: InvalidConfig."""
        given = None if self.admin_key is None else self.admin_key.get_secret_value()
        return read_keys(api_key_file=self.api_key_file, admin_key=given)

    def shown(self) -> dict[str, Any]:
        """As anyone may see it."""
        return self.model_dump(mode="json", exclude=set(SECRET))


class ObservabilitySettings(Settings):
    metrics: bool = True  # each replica and router serves its own on a port of its own
    metrics_port: int = Field(default=0, ge=0, le=65535)  # 0: any that is free; processes of one node cannot share one
    ttft_objective_s: float = Field(default=2.0, gt=0)  # finished requests are counted as met or missed, for alerts
    itl_objective_s: float = Field(default=0.1, gt=0)  # of a request's mean
    otlp_endpoint: str | None = Field(default=None, pattern=r"^https?://")  # None: OTEL_EXPORTER_OTLP_ENDPOINT, or off
    trace_ratio: float = Field(default=0.01, ge=0, le=1)  # of requests that come without a traceparent
    log_format: Literal["text", "json"] = "text"


class AppConfig(Settings):
    """All settings of the application, by group."""

    model: ModelSettings
    replicas: ReplicaSettings = ReplicaSettings()
    router: RouterSettings = RouterSettings()
    cache: Annotated[CacheConfig, CACHE_NAMES] = CacheConfig()
    scheduler: Annotated[SchedulerConfig, SCHEDULER_NAMES] = SchedulerConfig()
    parallel: ParallelConfig = ParallelConfig()
    attention: Attention = "auto"
    cuda_graphs: bool = True
    mode: Literal["unified", "disaggregated"] = "unified"  # disaggregated: prefill and decode on different replicas
    prefill: RoleSettings = RoleSettings()
    decode: RoleSettings = RoleSettings()
    transfer: TransferGroup = TransferGroup()
    observability: ObservabilitySettings = ObservabilitySettings()

    @model_validator(mode="after")
    def _of_its_mode(self) -> "AppConfig":
        if self.mode == "unified":
            given = [name for name in ("prefill", "decode", "transfer") if name in self.model_fields_set]
            if given:
                raise ValueError(
                    f"{', '.join(given)}: given, but mode is unified; set mode: disaggregated, or leave them out"
                )
            return self
        if self.router.policy != "estimated_ttft":
            raise ValueError(
                f"router.policy = {self.router.policy!r} with mode: disaggregated, where pairs of replicas are chosen "
                "by pd_pair; leave router.policy out"
            )
        for name in ("page_size", "kv_dtype"):
            mine, theirs = (
                role.cache.get(name, getattr(self.cache, name)) for role in (self.prefill, self.decode)
            )
            if mine != theirs:
                raise ValueError(
                    f"prefill.cache.{name} = {mine!r} and decode.cache.{name} = {theirs!r}; pages are handed over as "
                    f"they are, so that both need one {name}: set cache.{name}"
                )
        if self.transfer.room_timeout_s <= self.router.max_wait_s:
            raise ValueError(
                f"transfer.room_timeout_s = {self.transfer.room_timeout_s:g} must exceed router.max_wait_s = "
                f"{self.router.max_wait_s:g}: a decode replica waits while its prompt is in the prefill replica's "
                "queue, which the router allows to be so long; raise the first or lower the second"
            )
        return self


def parse(args: dict[str, Any]) -> AppConfig:
    """The settings. Raises: InvalidConfig with a sentence for every setting that is wrong, why, and what is allowed."""
    config, problems = examine(args)
    if problems or config is None:
        raise InvalidConfig(*problems)
    return config


def examine(args: dict[str, Any]) -> tuple[AppConfig | None, list[str]]:
    """The settings, and a sentence for each that is wrong; those have their defaults, or there are no settings."""
    try:
        return AppConfig.model_validate(args), []
    except ValidationError as error:
        problems = sentences(error, allowed=_allowed)
    try:
        return AppConfig.model_validate(_without(args, [setting_of(problem) for problem in problems])), problems
    except ValidationError:
        return None, problems


def _without(args: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """``args`` without the settings of these dotted names."""
    left = copy.deepcopy(args)
    for name in names:
        *groups, last = name.split(".")
        inner: Any = left
        for group in groups:
            inner = inner.get(group) if isinstance(inner, dict) else None
        if isinstance(inner, dict):
            inner.pop(last, None)
    return left


def _allowed(group: str) -> list[str]:
    """Settings that ``group`` knows."""
    kind = _GROUPS.get(group, AppConfig)
    return list(kind.model_fields) if issubclass(kind, Settings) else [each.name for each in dataclasses.fields(kind)]


_GROUPS: dict[str, type[Any]] = {
    "": AppConfig,
    "model": ModelSettings,
    "replicas": ReplicaSettings,
    "replicas.autoscaling": AutoscalingSettings,
    "router": RouterSettings,
    "cache": CacheConfig,
    "scheduler": SchedulerConfig,
    "parallel": ParallelConfig,
    "prefill": RoleSettings,
    "prefill.cache": CacheConfig,
    "prefill.autoscaling": AutoscalingSettings,
    "decode": RoleSettings,
    "decode.cache": CacheConfig,
    "decode.autoscaling": AutoscalingSettings,
    "transfer": TransferGroup,
    "observability": ObservabilitySettings,
}
