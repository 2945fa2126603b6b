"""The ``args`` of serve_config.yaml: every setting of the application, checked before anything starts.

Owns:      names, defaults and checks of the application's settings. Those of the engine are the dataclasses of
           replicas/config.py themselves, so that the two cannot drift.
Never:     fills in what depends on the machine (capacity.py, replicas/resolve.py).
"""

import copy
import dataclasses
import re
import types
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from pydantic import Field, SecretStr, ValidationError, model_validator

from deployments.settings.constants import experimental, is_constant, notice, renamed
from deployments.settings.groups import (
    CACHE_NAMES,
    DTYPE_NAMES,
    QUANTIZATION_NAMES,
    SCHEDULER_NAMES,
    AdapterSettings,
    AutoscalingSettings,
    ReplicaSettings,
    RoleSettings,
    Settings,
    TransferGroup,
    in_bytes,
)
from deployments.settings.settings_file import BYTES, sentences, setting_of, shown
from deployments.tenancy.keys import SECRET, CacheIsolation, KeyDigests, read_keys
from deployments.tenancy.tenants import TAKEN
from kvtransfer.stores.urls import parsed
from replicas.config import (
    Attention,
    CacheConfig,
    DType,
    Implementation,
    NamesOf,
    ParallelConfig,
    Quantization,
    SchedulerConfig,
    load_extensions,
)
from replicas.errors import InvalidConfig
from replicas.types import MAX_DEADLINE_S

ToolFormatName = Annotated[str, NamesOf(("deployments.output.tool_formats:TOOL_FORMATS",), also=("auto", "none"))]
ReasoningName = Annotated[str, NamesOf(("deployments.output.reasoning:REASONING_FORMATS",), also=("auto", "none"))]
RoutingPolicy = Annotated[str, NamesOf(("routing.policies:POLICIES",))]
_GGUF_ENDING = re.compile(r"(-\d{5}-of-\d{5})?\.gguf$")  # no part of a model's name, as in llama.cpp


class ModelSettings(Settings):
    """The group ``model``: which model is served, in which number formats."""

    path: str = Field(min_length=1)  # folder or GGUF file (relative to the project's root), or hub id
    revision: str | None = Field(default=None, min_length=1)  # branch, tag or commit of a hub id; by default main
    # name that requests use; by default the last part of the path, of a GGUF file without its ending
    served_name: str | None = None
    # number format of the weights, and on a GPU of the computation; a CPU computes in float32, and multiplies bfloat16
    # weights in bfloat16 where it has AMX or AMD's AVX512_BF16. By default the checkpoint's on a
    # GPU; bfloat16 on a CPU with AMX or AMD's AVX512_BF16 if it is the checkpoint's; else float32
    dtype: Annotated[DType | None, DTYPE_NAMES] = None
    # int8: products multiply int8 weights and activations; int4: weights in 4 bits (Q4_1), the vocabulary's tables in
    # 8 (Q8_0), are multiplied in float32, or with dtype: bfloat16 by activations in bfloat16 where the CPU has AMD's
    # AVX512_BF16; both on a CPU alone, without another dtype. fp8: weights in e4m3, a scale a row, on a GPU (from Ada
    # on); activations too, a scale a token
    quantization: Annotated[Quantization, QUANTIZATION_NAMES] = "none"
    # whose code runs the model: our own for the families that it has, Transformers' modules for others that can be
    # served so (docs/models.md); auto: our own where there is one
    implementation: Implementation = "auto"
    # longest prompt and output together, in tokens; by default the model's. With dynamic rope scaling up to its factor
    # times that
    context_len: int | None = Field(default=None, ge=1)
    # how the model writes tool calls; auto: as its chat template, and as hermes where that knows no tools; none: calls
    # are not looked for
    tool_format: ToolFormatName = "auto"
    # how the model writes its reasoning; think: between a pair of think tags; harmony: in a channel, as gpt-oss, whose
    # calls are read too; auto: as its chat template names it
    reasoning_format: ReasoningName = "auto"
    # what is meant where a request says nothing of temperature, top_k, top_p, min_p or repetition_penalty; model: what
    # the model's generation_config.json says, as vLLM and SGLang do; openai: temperature 1, and nothing is cut off
    sampling_defaults: Literal["model", "openai"] = "model"

    @property
    def name(self) -> str:
        return self.served_name or _GGUF_ENDING.sub("", self.path.rstrip("/").rsplit("/", 1)[-1])


class RouterSettings(Settings):
    """The group ``router``: how requests are routed, bounded and admitted."""

    policy: RoutingPolicy = "estimated_ttft"  # how a replica is chosen
    # number of routers; each is an HTTP ingress. By default 2 on a cluster with nodes for two, each on its own; else 1
    count: int | None = Field(default=None, ge=1)
    cpus: float = Field(default=0.0, ge=0)  # CPUs that Ray reserves for each router
    max_body_bytes: int = Field(default=4 << 20, ge=1024)  # a longer body is answered with 413
    # a longer JSON schema, or grammar that is made of several, is answered with 400
    max_schema_bytes: int = Field(default=1 << 20, ge=1024, le=4 << 20)
    body_timeout_s: float = Field(default=60.0, gt=0)  # a body that is not complete by then is answered with 408
    # replicas that one request may be sent to, one after the other, when they die or hang
    max_tries: int = Field(default=3, ge=1)
    # how long a request waits for another replica when its own has died
    retry_wait_s: float = Field(default=30.0, ge=0)
    # how often a replica sends its cache events and statistics to every router
    report_period_s: float = Field(default=0.1, gt=0, le=10)
    # a replica silent for this long while another one reports loses its requests to that one
    hang_timeout_s: float = Field(default=4.0, gt=0)
    # how long a stream whose client asked for it (x-manta-reconnect) waits for it without a connection; 0: it ends
    reconnect_s: float = Field(default=30.0, ge=0, le=3600)
    # how long a response in the background (background: true) may wait and run
    background_timeout_s: float = Field(default=3600.0, gt=0, le=MAX_DEADLINE_S)
    background_kept_s: float = Field(default=600.0, gt=0, le=86_400)  # how long a router keeps one that has ended
    max_wait_s: float = Field(default=120.0, gt=0)  # a request whose estimated wait is longer is answered with 429
    # choices of one API key that run or wait at one router; a request that would exceed them is answered with 429
    max_choices_per_key: int = Field(default=1024, ge=1)
    # most recent requests that GET /route/{rid} can explain; each takes 0.5 KB per replica
    decisions_kept: int = Field(default=1000, ge=1)
    # absolute folder; each router writes a recording into it, a line for each request without its text, to be replayed
    # (docs/capacity.md). By default nothing is recorded
    record: str | None = Field(default=None, pattern="^/")
    record_bytes: int = Field(default=1 << 30, ge=1 << 16)  # where a router's recording ends
    # absolute folder of files and batches (docs/batches.md), which all routers share; by default there are none
    batch_folder: str | None = Field(default=None, pattern="^/")
    batch_bytes: int = Field(default=10 << 30, ge=1 << 20)  # of all files of batches; beyond it none is taken
    batch_file_bytes: int = Field(default=200 << 20, ge=1024)  # a longer file is answered with 413
    api_key_file: str | None = None  # file of API keys, one a line; MANTA_API_KEYS adds to them
    # file of keys with tenants, limits and weights, read anew when it changes; each router's node has it at this path
    keys_file: str | None = None
    # key for the admin's routes and the metrics ports; by default MANTA_ADMIN_KEY, else none
    admin_key: SecretStr | None = None
    # key: requests of different API keys share no cached prefix; tenant: those of different tenants share none; none:
    # all share
    cache_isolation: CacheIsolation = "key"
    # names accepted in Host beside the loopback's, where the loopback is served without keys; *: any
    allowed_hosts: tuple[str, ...] = ()
    # origins of web pages that may call the API, such as http://localhost:3000; *: all
    cors_origins: tuple[str, ...] = ()

    def known_keys(self) -> KeyDigests:
        """Read the keys of these settings and of this environment. Raises: InvalidConfig."""
        given = None if self.admin_key is None else self.admin_key.get_secret_value()
        return read_keys(api_key_file=self.api_key_file, admin_key=given, keys_file=self.keys_file)

    def shown(self) -> dict[str, Any]:
        """Write the settings without the secrets."""
        return self.model_dump(mode="json", exclude=set(SECRET))


class ObservabilitySettings(Settings):
    """The group ``observability``: metrics, traces, objectives and log lines."""

    # port of the metrics; 0: any free one, right nearly always: processes of a node cannot share a port
    metrics_port: int = Field(default=0, ge=0, le=65535)
    # a request meets its objective if its first token takes no longer than this
    ttft_objective_s: float = Field(default=2.0, gt=0, le=MAX_DEADLINE_S)
    # a request meets its objective if the mean gap between its tokens is no longer than this
    itl_objective_s: float = Field(default=0.1, gt=0)
    # where traces are sent; by default OTEL_EXPORTER_OTLP_ENDPOINT, else they are off
    otlp_endpoint: str | None = Field(default=None, pattern=r"^https?://")
    trace_ratio: float = Field(default=0.01, ge=0, le=1)  # share that is traced of the requests without a traceparent
    log_format: Literal["text", "json"] = "text"  # form of the log lines: text, or one JSON object per line


class AppConfig(Settings):
    """All settings of the application, by group."""

    model: ModelSettings
    replicas: ReplicaSettings = ReplicaSettings()
    router: RouterSettings = RouterSettings()
    adapters: AdapterSettings = AdapterSettings()
    cache: Annotated[CacheConfig, CACHE_NAMES] = CacheConfig()
    scheduler: Annotated[SchedulerConfig, SCHEDULER_NAMES] = SchedulerConfig()
    parallel: ParallelConfig = ParallelConfig()
    # attention backend: cpu (compiled), flashinfer or triton (GPU), torch_native (plain reference), double_sparse (a
    # reference on a CPU that attends to few tokens; prompts are slower than dense)
    attention: Attention = "auto"
    cuda_graphs: bool = True  # records decode steps at start and replays them; on a GPU
    # disaggregated: prompts are computed by prefill replicas and handed over to decode replicas
    mode: Literal["unified", "disaggregated"] = "unified"
    # deploys another mode or tp in the place of what serves, which Serve stops before the new replicas are ready
    allow_outage: bool = False
    prefill: RoleSettings = RoleSettings()
    decode: RoleSettings = RoleSettings()
    transfer: TransferGroup = TransferGroup()
    observability: ObservabilitySettings = ObservabilitySettings()

    @model_validator(mode="after")
    def _stores_exist(self) -> "AppConfig":
        of_roles = {f"{name}.cache": getattr(self, name).cache.get("store") for name in ("prefill", "decode")}
        for group, url in {"cache": self.cache.store, **of_roles}.items():
            try:
                if url is not None:
                    parsed(url)
            except ValueError as error:
                raise ValueError(f"{group}.store: {error}") from error
        return self

    @model_validator(mode="after")
    def _names_differ(self) -> "AppConfig":
        if self.model.name in self.adapters.names:
            raise ValueError(f"adapters.names.{self.model.name}: is the name of the model; give another one")
        for name in TAKEN.keys() & self.adapters.names.keys():
            raise ValueError(f"adapters.names.{name}: {TAKEN[name]}; give another one")
        return self

    @model_validator(mode="after")
    def _of_its_mode(self) -> "AppConfig":
        if self.mode == "unified":
            groups = ("prefill", "decode") if self.transfer.fetch == "auto" else ("prefill", "decode", "transfer")
            given = [name for name in groups if name in self.model_fields_set]
            if given:
                raise ValueError(
                    f"{', '.join(given)}: given, but mode is unified; set mode: disaggregated, or leave them out"
                )
            return self
        if self.router.policy != "estimated_ttft":
            raise ValueError(
                f"router.policy = {self.router.policy!r} with mode: disaggregated, where pd_pair chooses pairs of "
                "replicas; leave router.policy out"
            )
        for name in ("page_size", "kv_dtype"):
            mine, theirs = (role.cache.get(name, getattr(self.cache, name)) for role in (self.prefill, self.decode))
            if mine != theirs:
                raise ValueError(
                    f"prefill.cache.{name} = {mine!r} and decode.cache.{name} = {theirs!r}; pages are handed over "
                    f"unchanged, so both roles need the same {name}: set cache.{name}"
                )
        return self


def parse(args: dict[str, Any]) -> AppConfig:
    """Check the settings. Raises: InvalidConfig with a sentence for each wrong one: why, and what is allowed."""
    config, problems = examine(args)
    if problems or config is None:
        raise InvalidConfig(*problems)
    return config


def examine(args: dict[str, Any]) -> tuple[AppConfig | None, list[str]]:
    """Check the settings and list a sentence for each wrong one.

    Returns: the settings, with defaults for the wrong ones, or None if that is impossible; the sentences.
    """
    load_extensions()  # settings may name what they add
    args = _without(_typed(args), list(constants_in(args)))
    try:
        return AppConfig.model_validate(args), []
    except ValidationError as error:
        problems = sentences(error, allowed=_allowed)
    try:
        return AppConfig.model_validate(_without(args, [setting_of(problem) for problem in problems])), problems
    except ValidationError:
        return None, problems


def constants_in(args: dict[str, Any]) -> dict[str, str]:
    """Return a sentence for each of ``args`` that is a constant now and so ignored, by its dotted name."""
    found: dict[str, str] = {}
    for path, kind in () if experimental() else _GROUPS.items():
        for name, given in _inner(args, path).items():
            if is_constant(setting := f"{path}.{name}"):
                now = defaults(kind)
                found[setting] = notice(setting, shown(now[name]) if name in now else None, shown(given))
    return found


def notices(args: dict[str, Any]) -> list[str]:
    """Return a sentence for each of ``args`` whose name is out of date: what holds, and what to write."""
    return [
        *constants_in(args).values(),
        *(f"{old}: is {new} now, and is read as that. Rename it" for old, new in _old_names(args).items()),
    ]


def defaults(kind: type[Any]) -> dict[str, Any]:
    """Return what the settings of a group are where nothing is given, by name."""
    if issubclass(kind, Settings):
        fields = kind.model_fields.items()
        return {name: field.default if field.default_factory is None else None for name, field in fields}
    return {field.name: field.default for field in dataclasses.fields(kind)}


def _typed(args: dict[str, Any]) -> dict[str, Any]:
    """Copy ``args`` with today's names, and sizes in bytes. A boolean for a number becomes text, which no number's
    check takes: to Python, ``page_size: yes`` is 1."""
    typed = copy.deepcopy(args)
    for old, new in _old_names(args).items():
        (path, _, last), name = old.rpartition("."), new.rpartition(".")[2]
        if name not in (group := _inner(typed, path)):  # else the old one stays, and is refused
            group[name] = group.pop(last)
    for path, kind in _GROUPS.items():
        group, hints = _inner(typed, path), get_type_hints(kind)
        for name, value in group.items():
            if isinstance(value, bool) and _is_number(hints.get(name)):
                group[name] = shown(value)
            elif isinstance(value, str) and str(name).endswith(BYTES):
                group[name] = in_bytes(value)
    return typed


def _old_names(args: dict[str, Any]) -> dict[str, str]:
    """Map the settings of ``args`` that have another name now to it, dotted both."""
    given = (f"{path}.{name}" for path in _GROUPS for name in _inner(args, path))
    return {setting: new for setting in given if (new := renamed(setting)) is not None}


def _is_number(hint: Any) -> bool:
    kinds = {hint} if get_origin(hint) is not types.UnionType else {*get_args(hint)}
    return bool(kinds) and kinds <= {int, float, types.NoneType}


def _without(args: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """Copy ``args`` without the settings of these dotted names."""
    left = copy.deepcopy(args)
    for name in names:
        group, _, last = name.rpartition(".")
        _inner(left, group).pop(last, None)
    return left


def _inner(args: dict[str, Any], path: str) -> dict[str, Any]:
    """Find the group at a dotted path; an empty one if there is none."""
    inner: Any = args
    for name in filter(None, path.split(".")):
        inner = inner.get(name) if isinstance(inner, dict) else None
    return inner if isinstance(inner, dict) else {}


def _allowed(group: str) -> list[str]:
    """List the settings of ``group``."""
    return [name for name in defaults(_GROUPS.get(group, AppConfig)) if not is_constant(f"{group}.{name}")]


_GROUPS: dict[str, type[Any]] = {
    "": AppConfig,
    "model": ModelSettings,
    "replicas": ReplicaSettings,
    "replicas.autoscaling": AutoscalingSettings,
    "router": RouterSettings,
    "adapters": AdapterSettings,
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
