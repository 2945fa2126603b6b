"""Settings of one engine: frozen values.

Owns:  what each setting means, its default, and where its value came from (`EngineConfig.origin`).
Never: checks them, or fills gaps (replicas/resolve.py); `replicas/hf_config.py` reads how others spell a model's shape.
"""

import difflib
import functools
import importlib.metadata
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from importlib import import_module
from operator import attrgetter
from typing import Annotated, Any, Literal

from kvtransfer.layout import MHA, MLA, Carried, KvLayout, scale_bytes
from replicas.errors import InvalidConfig
from replicas.kernels.weight_formats import NUMBER_BYTES, WeightFormat, table_format

EXTENSIONS = "manta.extensions"  # the group of entry points
Device = Literal["cpu", "cuda"]
DType = Literal["float32", "bfloat16", "float16"]
Quantization = Literal["none", "int8", "int4", "fp8"]
Implementation = Literal["auto", "manta", "transformers"]
KvDType = Literal["float32", "bfloat16", "float16", "int8", "fp8", "fp8_e5m2"]
DTYPE_BYTES: dict[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
KV_DTYPE_BYTES: dict[str, int] = DTYPE_BYTES | {"int8": 1, "fp8": 1, "fp8_e5m2": 1}  # of a number, beside its scale
# what fp8 is on a GPU: in each layer one scale for all K and one for all V, as FlashInfer takes them
FP8_TENSOR = "fp8_tensor"


@dataclass(frozen=True, slots=True)
class NamesOf:
    """The values of a setting: the names of some tables, as "module:table", as they stand when the setting is checked.
    So what another package has added to a table is a value too. Only a check imports the tables.
    """

    tables: tuple[str, ...]
    also: tuple[str, ...] = ()

    @property
    def allowed(self) -> list[str]:
        tables = (place.partition(":") for place in self.tables)
        return [*self.also, *(name for module, _, table in tables for name in getattr(import_module(module), table))]

    def check(self, value: Any) -> Any:
        """Return ``value``. Raises: ValueError, with all names, if it is none of them."""
        names = self.allowed
        if value not in names:
            near = difflib.get_close_matches(str(value), names, n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise ValueError(f"must be {', '.join(map(repr, names[:-1]))} or {names[-1]!r}, not {value!r:.60}{hint}")
        return value

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], Any]) -> dict[str, Any]:
        """Check a value where pydantic reads the settings."""
        function = {"type": "no-info", "function": self.check}
        return {"type": "function-before", "function": function, "schema": handler(source)}


Attention = Annotated[str, NamesOf(("replicas.attention.registry:BACKENDS",), also=("auto",))]
Eviction = Annotated[str, NamesOf(("replicas.cache.retention:POLICIES",))]
HostEviction = Annotated[str, NamesOf(("replicas.cache.retention:POLICIES", "replicas.cache.arc:HOST_QUEUES"))]
WritePolicyName = Annotated[str, NamesOf(("replicas.cache.write_policy:RULES",))]
PrefetchPolicy = Annotated[str, NamesOf(("replicas.cache.store_tier:PREFETCH",))]
QueuePolicy = Annotated[str, NamesOf(("replicas.scheduler.orders:ORDERS",))]


LEAST_SHARE = 0.4  # of the pages, that have a part in the window pool (docs/log/2026-11-29-window-pools.md)
WINDOWS_A_TEXT = 4  # kept of a text of full length: where its prompts and answers ended
WORTH_SPLITTING = 0.75  # of the pages: with parts for more, all layers keep all tokens
LONGEST_DRAFT = 32  # tokens that one decode step tries of a request at most
STATE_DRAFT = 4  # of a model that keeps recurrent states, one of them for each


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding. ``scaling`` holds the parameters of ``kind`` under their Hugging Face names; of yarn,
    dynamic and longrope, ``factor`` and ``original_max_position_embeddings`` are always there."""

    theta: float = 10_000.0
    kind: Literal["default", "linear", "llama3", "yarn", "dynamic", "longrope"] = "default"
    scaling: Mapping[str, float] = field(default_factory=dict)
    short_factor: tuple[float, ...] = ()  # [D / 2] of longrope, up to the original context
    long_factor: tuple[float, ...] = ()  # [D / 2] of longrope, beyond it

    def fitted_len(self, context_len: int) -> int:
        """Return the context that frequencies are made for, where they follow the served one: of dynamic the longer of
        it and the original, of longrope 0 up to the original and 1 beyond; else 0."""
        if self.kind not in ("dynamic", "longrope"):
            return 0
        original = int(self.scaling["original_max_position_embeddings"])
        return max(context_len, original) if self.kind == "dynamic" else int(context_len > original)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionKind:
    """What the attention of one layer does beside plain causal attention with a scale of head_dim ** -0.5."""

    scale: float | None = None  # what products of query and key are multiplied by; None: head_dim ** -0.5
    window: int | None = None  # a token sees the last so many tokens, itself among them
    chunk: int | None = None  # a token sees from the last multiple of this position on (Llama 4)
    soft_cap: float | None = None  # scores become soft_cap * tanh(score / soft_cap) (Gemma 2)
    sinks: bool = False  # each head has one more score, of no token, in its softmax (GPT-OSS)
    indexed: bool = False  # a token sees only those that an index chose for it (DeepSeek V3.2)

    @property
    def special(self) -> frozenset[str]:
        """The names of what it does."""
        plain = AttentionKind()
        return frozenset(f.name for f in fields(self) if getattr(self, f.name) != getattr(plain, f.name))


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexConfig:
    """The index of sparse attention (DeepSeek-V3.2): narrow heads of its own score all tokens before a token, which
    attends to the best alone. The cache holds one key of a token for all these heads, behind the latent vector."""

    num_heads: int
    head_dim: int
    top_k: int  # tokens that a token attends to at most
    shared: tuple[bool, ...]  # of each layer, whether it takes the choice of the layer before
    interleaved: bool  # as `MLAConfig.interleaved`


@dataclass(frozen=True, slots=True, kw_only=True)
class MLAConfig:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): what the cache holds of a token is one latent and
    one rotated key that all heads share. Dimensions of a head, but for the ranks."""

    kv_lora_rank: int  # numbers of the latent
    q_lora_rank: int | None  # None: queries are projected at once (V2-Lite)
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    interleaved: bool = True  # dimensions 2 i and 2 i + 1 of the rotated part turn together, not i and i + half of it
    index: IndexConfig | None = None

    @property
    def cached_dim(self) -> int:
        """Numbers of a token and layer in the cache."""
        return self.kv_lora_rank + self.qk_rope_head_dim + (self.index.head_dim if self.index else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEConfig:
    """A mixture of experts: which experts compute a token, and how their results are summed."""

    num_experts: int
    top_k: int  # experts of a token
    intermediate_size: int  # of one expert
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    normalize: bool = False  # the chosen experts' weights are divided by their sum
    scaling: float = 1.0  # and then multiplied by this
    num_groups: int = 1  # experts lie in so many groups, and
    top_groups: int = 1  # are chosen from so many of them
    group_score: Literal["max", "top2"] = "max"  # a group's score: its best expert (V2), or its best two (V3)
    score_bias: bool = False  # the choice alone, not the weights, adds a learned bias (V3)
    shared_intermediate_size: int = 0  # of the expert that computes every token; 0: none
    shared_gate: bool = False  # whose result is multiplied by a sigmoid gate (Qwen2-MoE)
    biases: bool = False  # the router and the experts' products have biases (gpt-oss)
    swiglu: tuple[float, float] | None = None  # the limit and the alpha of gpt-oss's gate; None: SiLU
    dense_layers: tuple[int, ...] = ()  # layers with an MLP of ModelConfig.intermediate_size instead


@dataclass(frozen=True, slots=True, kw_only=True)
class StateTensor:
    """One tensor of what a module keeps of a text, under the name and number that it asks Transformers' cache for."""

    kind: Literal["conv", "recurrent", "linear"]
    number: int  # among those of its kind in the layer
    shape: tuple[int, ...]  # of one text
    exact: bool  # fp32 whatever the activations are; else as they are


@dataclass(frozen=True, slots=True, kw_only=True)
class StateLayer:
    """A module of Transformers that keeps a state: convolution's last inputs, a recurrence's sums, or both."""

    module: str  # its name within the model
    layer: int  # its number in Transformers' cache
    tensors: tuple[StateTensor, ...]
    whole: bool  # goes on from a state with several tokens at once; else with one


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredAs:
    """How a quantised checkpoint stores its weights, and what of that is served as it is, on a CPU in float32."""

    about: str  # for people: "GPTQ, 4 bits, groups of 128"
    products: WeightFormat | None = None  # the format that holds weights of products as they are; None: widened
    tables: WeightFormat | None = None  # the vocabulary's
    experts: WeightFormat | None = None  # the format that holds experts', whatever the dtype, where others are plain


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The shape of a decoder-only model; names follow Hugging Face's config.json."""

    path: str  # folder that Transformers can load
    architecture: str  # e.g. "LlamaForCausalLM"
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int  # that attention sees: 1 with ``mla``, whose
    head_dim: int  # queries and keys are `MLAConfig.cached_dim` numbers, an index's key among them
    rms_norm_eps: float
    rope: RopeConfig
    context_len: int  # longest prompt + output
    tie_embeddings: bool
    attention_bias: bool  # q, k, v have biases
    output_bias: bool  # o has a bias
    mlp_bias: bool
    qk_norm: bool  # RMSNorm on each query and key head (Qwen3)
    eos_ids: tuple[int, ...]
    dtype: DType  # of the weights; on a GPU of the activations too, which are fp32 on a CPU
    # int8: weights and activations of products, a scale for 32 of either; int4: weights alone, Q4_1; fp8: on a GPU
    quantization: Quantization = "none"
    stored: StoredAs | None = None  # None: the checkpoint has plain floats
    implementation: Literal["manta", "transformers"] = "manta"  # whose code runs it
    attention_kinds: tuple[AttentionKind, ...] = ()  # of each layer; empty: all are plain
    mla: MLAConfig | None = None
    moe: MoEConfig | None = None
    # of a model that Transformers runs, which only its own module can tell (models/outline.py):
    num_weights: int = 0  # numbers in the weights; 0: they follow from the sizes above
    outlined_tp_sizes: tuple[int, ...] = ()  # numbers of ranks that it can be split over; empty: `tp_sizes` counts them
    states: tuple[StateLayer, ...] = ()  # what its modules keep of a text beside K and V, in order of their calls
    indexes: tuple[str, ...] = ()  # its modules that choose what a token attends to, in order of their calls
    index_dim: int = 0  # numbers of the key that each of these keeps of a token

    @property
    def kept_layers(self) -> int:
        """The layers of a KV pool: those of attention, and behind them as many as hold the keys of ``indexes``."""
        vectors = len(self.indexes) * -(-self.index_dim // self.head_dim)
        return self.num_layers + -(-vectors // (2 * self.num_kv_heads))

    @property
    def window(self) -> int | None:
        """The most tokens that any layer sees; None: some layers see all."""
        windows = [kind.window for kind in self.attention_kinds]
        seen = [window for window in windows if window is not None]
        return max(seen) if seen and len(seen) == len(windows) else None

    @property
    def reach(self) -> int:
        """The tokens that a layer with a window or chunk sees at most; 0 without one."""
        return max((kind.window or kind.chunk or 0 for kind in self.attention_kinds), default=0)

    @property
    def window_layers(self) -> tuple[bool, ...]:
        """Of each layer, whether a token sees a window or chunk alone; empty where all layers are alike in that."""
        apart = tuple(kind.window is not None or kind.chunk is not None for kind in self.attention_kinds)
        return apart if len(set(apart)) > 1 else ()

    @property
    def weight_format(self) -> WeightFormat:
        """How the weights of products lie in memory on a CPU, or are rounded to on a GPU."""
        return {"none": self.dtype, "int8": "int8", "int4": "q4_1", "fp8": "fp8"}[self.quantization]

    @property
    def weight_number_bytes(self) -> tuple[float, float]:
        """Bytes of a weight of products and of the vocabulary's tables, with its part of a scale."""
        if self.stored is not None and self.stored.products is not None:
            return NUMBER_BYTES[self.stored.products], NUMBER_BYTES[self.stored.tables or self.weight_format]
        tables = self.dtype if self.quantization == "fp8" else table_format(self.weight_format)
        return NUMBER_BYTES[self.weight_format], NUMBER_BYTES[tables]

    @property
    def expert_number_bytes(self) -> float:
        """Bytes of a weight of experts, with its part of a scale."""
        if self.stored is not None and self.stored.experts is not None:
            return NUMBER_BYTES[self.stored.experts]
        return self.weight_number_bytes[0]

    def describe_weights(self) -> str:
        """Say in words how the checkpoint stores quantised weights and how they are served; "" of plain floats."""
        if self.stored is None:
            return ""
        if self.stored.experts is not None:
            others = "" if self.quantization == "none" else f"; others rounded to {self.quantization}"
            return f"{self.stored.about}; multiplied as they are ({self.stored.experts}){others}"
        if self.quantization != "none":
            return f"{self.stored.about}; rounded to {self.quantization} when they are loaded"
        if self.stored.products is not None:
            return f"{self.stored.about}; multiplied as they are ({self.stored.products})"
        return f"{self.stored.about}; dequantised to {self.dtype} when they are loaded"

    def kv_cell_bytes(self, *, tp: int, kv_dtype: str) -> int:
        """Bytes of one token's K and V on one rank, all layers, scales and keys of indexes included (SPEC A06); heads
        are replicated if tp > heads, and a latent vector on all ranks."""
        heads, vectors = max(1, self.num_kv_heads // tp), 2 if self.mla is None else 1
        return heads * self.kept_layers * vectors * (self.head_dim * kv_item_bytes(kv_dtype) + scale_bytes(kv_dtype))

    def state_bytes(self, device: Device) -> int:
        """Bytes of one text's states. On a CPU activations are fp32."""
        item = 4 if device == "cpu" else DTYPE_BYTES[self.dtype]
        tensors = (tensor for layer in self.states for tensor in layer.tensors)
        return sum(math.prod(tensor.shape) * (4 if tensor.exact else item) for tensor in tensors)

    @property
    def attended_size(self) -> int:
        """The length of what attention's last product reads, all ranks together."""
        return self.num_heads * (self.head_dim if self.mla is None else self.mla.v_head_dim)

    def attention_products(self, tp: int) -> list[tuple[int, int]]:
        """List the shapes (out, in) of the products around a block's attention, on one of ``tp`` ranks."""
        heads, after, mla = self.num_heads // tp, (self.hidden_size, self.attended_size // tp), self.mla
        if mla is None:
            return [((heads + 2 * max(1, self.num_kv_heads // tp)) * self.head_dim, self.hidden_size), after]
        down = mla.kv_lora_rank + mla.qk_rope_head_dim + (mla.q_lora_rank or 0)
        query = (heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim), mla.q_lora_rank or self.hidden_size)
        to_keys, to_values = (mla.kv_lora_rank, mla.qk_nope_head_dim), (mla.v_head_dim, mla.kv_lora_rank)
        products = [(down, self.hidden_size), query, *[to_keys] * heads, *[to_values] * heads, after]
        if (index := mla.index) is not None:  # the same on all ranks
            products += [(index.num_heads * index.head_dim, mla.q_lora_rank or self.hidden_size)]
            products += [(index.head_dim, self.hidden_size), (index.num_heads, self.hidden_size)]
        return products

    def adaptable(self) -> dict[str, tuple[int, int]]:
        """Return the shapes (out, in) of the weights that adapters (LoRA) can add to, by name: none of latent
        attention, of experts, or of a model that Transformers' code runs."""
        hidden, inner = self.hidden_size, self.intermediate_size
        heads, kv_heads = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        attention = {"q_proj": (heads, hidden), "k_proj": (kv_heads, hidden), "v_proj": (kv_heads, hidden),
                     "o_proj": (hidden, heads)}  # fmt: skip
        mlp = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
        found: dict[str, tuple[int, int]] = {}
        for layer in range(self.num_layers if self.implementation == "manta" else 0):
            is_dense = self.moe is None or layer in self.moe.dense_layers
            parts = {"self_attn": {} if self.mla else attention, "mlp": mlp if is_dense else {}}
            found |= {
                f"model.layers.{layer}.{part}.{name}": shape
                for part, shapes in parts.items()
                for name, shape in shapes.items()
            }
        return found

    @property
    def inner_sizes(self) -> tuple[int, ...]:
        """The inner sizes of its MLPs, experts and the shared expert among them: what ranks share evenly."""
        moe = self.moe
        if moe is None:
            return (self.intermediate_size,)
        shared = (moe.shared_intermediate_size,) if moe.shared_intermediate_size else ()
        return (moe.intermediate_size, *shared, *((self.intermediate_size,) if moe.dense_layers else ()))

    @property
    def widest_inner(self) -> int:
        """Numbers of a token inside its widest MLP, or inside all of its experts."""
        moe = self.moe
        dense = self.intermediate_size if moe is None or moe.dense_layers else 0
        return dense if moe is None else max(dense, moe.top_k * moe.intermediate_size + moe.shared_intermediate_size)

    def tp_sizes(self) -> list[int]:
        """Tensor-parallel sizes that split the heads evenly: divisors of the query heads that divide, or are
        multiples of, the KV heads; those that a module of Transformers can be split over."""
        if self.outlined_tp_sizes:
            return list(self.outlined_tp_sizes)
        return [
            tp
            for tp in range(1, self.num_heads + 1)
            if self.num_heads % tp == 0
            and all(size % tp == 0 for size in self.inner_sizes)
            and (self.num_kv_heads % tp == 0 or tp % self.num_kv_heads == 0)
        ]


STORE_KEY_LEN = 32  # characters, at least: a client that can list a store can try keys on the list


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """Settings of the KV pool and the prefix cache."""

    page_size: int = 16  # tokens in a KV page, the unit of allocation and of reuse
    prefix_cache: Literal["radix", "chunk"] = "radix"  # radix: requests reuse cached prefixes; chunk: they do not
    # which unused pages are evicted first
    eviction: Eviction = "lru"
    # conversations that are expected back keep their pages, an older one's before a younger's (docs/tiers.md); pages of
    # all others go before those, in the order of ``cache.eviction``
    sessions: bool = False
    mem_fraction_static: float = 0.9  # share of device memory for weights and KV; of engines on one GPU below 1 in all
    # the device memory of one replica; by default all of its GPUs, on a CPU 15 % of free RAM, at most 3 GiB
    device_memory_bytes: int | None = None
    # most tokens in the pool, with snapshots of states and pages that carry states or windows; by default all that fit
    max_total_tokens: int | None = None
    # number format of K and V, by default the model's (float32 where a CPU has float16 weights); int8, fp8 (e4m3) and
    # fp8_e5m2: a scale per token and head; on a GPU fp8 alone, with the checkpoint's scales or 1
    kv_dtype: KvDType | None = None
    label_channels: str | None = None  # of attention: double_sparse, a file that replicas/calibrate.py writes
    sparse_tokens: int = 256  # of attention: double_sparse, how many tokens a token attends to at most
    host_memory_bytes: int = 0  # host memory of one replica for pages that leave the pool (docs/tiers.md); 0: none
    host_eviction: HostEviction = "arc"  # which pages leave the host memory first
    # when pages are copied to the host: as they are computed, at their second use, when they are evicted, or then if
    # they are likely to be used again
    write_policy: WritePolicyName = "adaptive"
    # how long a request waits for pages that the store has: not at all, for all of them, for at most 2 s and 0.1 s per
    # 1,024 tokens, or while that is expected to be quicker than to compute them
    prefetch: PrefetchPolicy = "expected"
    store: str | None = None  # where pages are kept beyond the host memory: file:///folder or s3://bucket/prefix
    store_bytes: int = 10 << 30  # most bytes in a file store; the replicas of a host share them
    # secret that marks what Manta has written to the store; anything else there is not used. For a bucket that others
    # can write to (docs/tiers.md); by default MANTA_STORE_KEY, else none
    store_key: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterLimits:
    """Which adapters (LoRA) a replica accepts, and how many it holds."""

    max_rank: int = 64
    max_bytes: int = 1 << 30  # of an adapter's file
    max_held: int = 1024  # at once
    # of all that it holds: in fp32, on a GPU in the model's dtype; others are dropped, and loaded again when asked for
    host_bytes: int = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Settings of admission, chunking and queueing."""

    # order of the waiting queue: those first that can still have their first token within their objective, which is the
    # header x-manta-objective, or observability.ttft_objective_s, and the shortest of them as long as none gets late
    # (docs/routing.md); longest cached prefix first; requests of one part of the prefix tree together; highest ratio of
    # time waited to tokens to compute; order of arrival; longest output first; random; sessions that run most first
    policy: QueuePolicy = "on_time"
    # requests that run at once; by default 64 on a CPU, what the pool allows on a GPU
    max_running_requests: int | None = None
    max_queued_requests: int = 1024  # requests that wait beside those that run; more are answered with 503
    # most new tokens in a step, half as many where running requests make one each; by default 512 on a CPU, 8,192 on
    # a GPU
    chunked_prefill_size: int | None = None
    # running requests make a token in prefill steps too; false: they pause while prompts are computed
    mixed_steps: bool = True
    # requests of a step that share a cached prefix read its K and V once for all of them; on a CPU
    cascade: bool = True
    cascade_saves: int = 256  # tokens that such a group must save reading in a step
    # launch a decode step before the tokens of the last one are known; auto: on a GPU
    overlap: Literal["auto", "on", "off"] = "auto"
    # auto: guess tokens that follow, out of a request's own text or an answer to the same prompt, and verify them in
    # one step where that is expected to pay (the answer is the same, bit for bit); on: also where a row's bits depend
    # on how many rows a step has, as on a GPU, and under overlap: on
    speculation: Literal["auto", "on", "off"] = "auto"
    lpm_max_queue: int = 128  # lpm, dfs-weight, hrrn: a longer queue goes in order of arrival; on_time: asks no cache
    # a request that has waited this long goes before any better match; on_time: late_factor bounds waits instead
    ageing_s: float = 5.0
    # on_time: so many times as much of a queue longer than three objectives may be computed before a late request
    late_factor: float = 2.0
    # on: a point of a request's priority is worth ageing_s of waiting; off: the field is ignored
    priorities: Literal["off", "on"] = "off"
    new_token_ratio: float = 0.7  # share of a request's possible output that is reserved when it is admitted
    min_new_token_ratio: float = 0.1  # the share decays to this while no request is retracted
    new_token_ratio_decay: float = 0.001  # decay of the share in each decode step
    # a request that shares this many uncached tokens with one being prefilled waits a step for it
    in_batch_prefix_len: int = 32
    watchdog_s: float = 300.0  # a step that takes longer makes the replica unhealthy
    # a replica that is silent for so long, and does not answer its own node either, is killed and replaced; 0: never
    hang_kill_s: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """How one replica spreads over processes."""

    tp: int = 1  # tensor-parallel ranks of a replica; a size that does not split the heads is refused


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """The resources of the machine; the caller measures them, so that `resolve` stays pure."""

    device: Device
    num_cpus: int
    available_memory_bytes: int  # free RAM on CPU, free device memory on GPU


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionChoice:
    """The attention backend that runs, and why it is this one."""

    name: str  # of attention/registry.py's BACKENDS
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """All settings of one engine, resolved. ``origin`` says where each filled-in value came from."""

    model: ModelConfig
    cache: CacheConfig
    scheduler: SchedulerConfig
    parallel: ParallelConfig
    device: Device
    attention: Attention = "auto"
    cuda_graphs: bool = True  # of decode steps, on a GPU
    num_threads: int = 1  # compute threads of each rank, CPU only
    products: str = ""  # how they are computed, in words
    # what is made of a product's results is rounded, or chooses experts: ranks add their parts in one order
    one_order: bool = False
    adapters: AdapterLimits | None = None  # None: none are served
    hands_off: bool = False  # its pages go to other replicas, or come from them
    whole_pages: bool = False  # likewise, but where what window layers keep does not
    origin: Mapping[str, str] = field(default_factory=dict)

    @property
    def window_layers(self) -> tuple[bool, ...]:
        """Of each layer, whether it keeps K and V in the window pool (cache/parts.py); empty: there is none, as pages
        leave the device whole, or the layers are alike."""
        cache, model = self.cache, self.model
        whole = self.device != "cpu" or self.whole_pages or cache.host_memory_bytes or cache.label_channels is not None
        whole = whole or bool(model.states or model.indexes or model.mla is not None)
        return () if whole or self.window_share > WORTH_SPLITTING else model.window_layers

    @property
    def window_share(self) -> float:
        """The share of the pages that have a part in the window pool: that of WINDOWS_A_TEXT windows in a text of full
        length, LEAST_SHARE at least."""
        return max(LEAST_SHARE, WINDOWS_A_TEXT * self.model.reach / self.model.context_len)

    @property
    def carried(self) -> Carried:
        """What pages carry in a KV transfer behind those of a request's tokens."""
        page = self.cache.page_size * self.model.kv_cell_bytes(tp=self.parallel.tp, kv_dtype=self.kv_dtype)
        if not self.hands_off or not page:
            return Carried()
        layers = sum(self.window_layers)
        return Carried(
            state_pages=-(-self.model.state_bytes(self.device) // page),
            window_pages=tail_pages(self.model.reach, self.cache.page_size) if layers else 0,
            window_layers=layers,
            num_layers=self.model.kept_layers - layers,
        )

    @property
    def filled_in(self) -> dict[str, dict[str, Any]]:
        """By name, each setting that was left open: the value in force, and where it came from."""
        return {name: {"value": attrgetter(name)(self), "why": why} for name, why in self.origin.items()}

    @property
    def kv_dtype(self) -> str:
        """The number format of the pool; KV transfers want it equal: 8-bit floats of a GPU and of a CPU do not meet."""
        if self.cache.kv_dtype == "fp8" and self.device == "cuda":
            return FP8_TENSOR
        if self.device == "cpu" and self.model.dtype == "float16":
            return self.cache.kv_dtype or "float32"  # the CPU's attention reads no float16
        return self.cache.kv_dtype or self.model.dtype

    @property
    def rounds(self) -> bool:
        """Whether what fp32 arithmetic makes is rounded afterwards, so that a last bit can become a step: activations
        for int8 products, or K and V for a pool of narrower numbers."""
        return self.model.quantization == "int8" or (self.device == "cpu" and self.kv_dtype != "float32")

    @property
    def num_kv_parts(self) -> int:
        """The parts of a page that differ among the ranks (`KvLayout.num_parts`)."""
        return self.parallel.tp if self.model.mla is None else 1

    @property
    def chunked_prefill_size(self) -> int:
        assert self.scheduler.chunked_prefill_size is not None
        return self.scheduler.chunked_prefill_size


@functools.cache
def load_extensions() -> None:
    """Import the modules that installed packages name in the group `EXTENSIONS`, once in this process.

    They add to the tables whose names the settings allow (docs/extending.md).
    Raises: InvalidConfig for one that cannot be found; what it raises itself is its own.
    """
    for each in importlib.metadata.entry_points(group=EXTENSIONS):
        try:
            each.load()
        except (ImportError, AttributeError) as error:
            package = "a package" if each.dist is None else each.dist.name
            raise InvalidConfig(
                f"the extension {each.value} of {package} cannot be imported: {error}; mend or remove {package}"
            ) from error


def kv_layout(config: EngineConfig, model: str, *, tp: int | None = None) -> KvLayout:
    """Describe what the pages of this engine's pool mean.

    Args:   model: identity of config and weights (loading/model_files.py).
            tp: another than the engine's: 1 for bytes that hold all heads.
    Raises: ValueError when the ranks share KV heads (more ranks than heads): such pages cannot be cut by heads.
    """
    fitted, carried = config.model.rope.fitted_len(config.model.context_len), config.carried
    return KvLayout(
        model=f"{model}@{fitted}" if fitted else model,
        architecture=MHA if config.model.mla is None else MLA,
        num_layers=config.model.kept_layers - carried.window_layers,
        num_kv_heads=config.model.num_kv_heads,
        head_dim=config.model.head_dim,
        dtype=config.kv_dtype,
        item_bytes=kv_item_bytes(config.kv_dtype),
        page_size=config.cache.page_size,
        tp=config.parallel.tp if tp is None else tp,
        state_bytes=config.model.state_bytes(config.device),
        window_layers=carried.window_layers,
        window_pages=carried.window_pages,
    )


def tail_pages(reach: int, page_size: int) -> int:
    """Count the last pages of a sequence that a token sees which sees ``reach`` tokens: the next one, or the one behind
    the last page border at which the same sequence can be asked for again."""
    return -(-(reach - 1) // page_size) + 1


def kv_item_bytes(kv_dtype: str) -> int:
    """Return the bytes of one number of a pool, beside its scale."""
    return 1 if kv_dtype == FP8_TENSOR else KV_DTYPE_BYTES[kv_dtype]
