"""What the bytes of a KV page mean, and which of them two ranks share.

Owns:      the description of a pool's pages that two engines compare before one writes into the other's memory.
Invariant: one rank's page is contiguous and of one dtype, [L, 2, K / tp, page_size, D] for "MHA"
           (replicas/memory/pool.py) and [L, page_size, D] for "MLA" (replicas/memory/latent_pool.py): a latent vector
           that is K and V of all heads, so every rank has the same. Where numbers are scaled, a head's page_size scales
           follow its numbers (replicas/memory/scaled_pool.py). Pages that carry recurrent states hold their bytes, one
           state after the other (replicas/memory/state_pool.py); those that carry windows hold K and V of window
           layers in the place of others (replicas/runner/kv_access.py), so that heads are cut alike.
"""

import hashlib
from dataclasses import dataclass, fields

from kvtransfer.errors import IncompatibleLayout

MAX_COUNT = 2**31  # page ids are int32
SCALED = frozenset({"int8", "fp8", "fp8_e5m2"})
MAY_DIFFER = frozenset({"tp"})  # heads are sliced then
MHA, MLA = "MHA", "MLA"  # architectures (SPEC H12)


def scale_bytes(dtype: str) -> int:
    """Bytes of the scale of one token and head: a float32 where numbers of ``dtype`` mean nothing without one."""
    return 4 if dtype in SCALED else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PageSlice:
    """Bytes of a page that go from one rank to another: [src_offset, src_offset + num_bytes) of the source page."""

    src_offset: int
    dst_offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Carried:
    """What pages of their own carry behind those of a sequence: recurrent states, and the windows at its end."""

    state_pages: int = 0
    window_pages: int = 0  # pages at the end whose part in the window pool is carried, at most
    window_layers: int = 0  # of such a part
    num_layers: int = 1  # of a page that carries it

    def num_pages(self, num_tokens: int, page_size: int) -> int:
        """Count the pages that carry what a sequence of ``num_tokens`` needs."""
        windows = min(-(-num_tokens // page_size), self.window_pages)
        return self.state_pages + -(-windows * self.window_layers // self.num_layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class KvLayout:
    """Pages of one model instance."""

    model: str  # identity of config and weights, not a path: equal on every node that serves the same model
    architecture: str  # MHA or MLA; how K and V lie in a page
    num_layers: int
    num_kv_heads: int  # of all ranks together; 1 for MLA
    head_dim: int  # for MLA kv_lora_rank + rope_dim, and an index's key; V is the first kv_lora_rank numbers of K
    dtype: str  # "float32", "bfloat16", ...; it says whether numbers are scaled
    item_bytes: int  # of one number
    page_size: int  # tokens
    tp: int
    state_bytes: int = 0  # of a request's recurrent states, which pages of their own carry behind those of its tokens
    window_layers: int = 0  # beside ``num_layers``, with K and V in a pool of their own; of a sequence's end these
    window_pages: int = 0  # go likewise: of so many of its last pages

    def __post_init__(self) -> None:
        for field in ("num_layers", "num_kv_heads", "head_dim", "item_bytes", "page_size", "tp"):
            if not 0 < getattr(self, field) < MAX_COUNT:
                raise ValueError(f"{field} = {getattr(self, field)}: more than 0 and less than {MAX_COUNT} is wanted")
        if self.architecture not in (MHA, MLA) or (self.architecture == MLA and self.num_kv_heads != 1):
            raise ValueError(f"{self.architecture} of {self.num_kv_heads} KV heads: MHA, or MLA of one, is wanted")
        for field in ("state_bytes", "window_layers", "window_pages"):
            if getattr(self, field) < 0:
                raise ValueError(f"{field} = {getattr(self, field)}: 0 or more is wanted")
        if self.num_kv_heads % self.num_parts:
            raise ValueError(f"{self.num_kv_heads} KV heads do not split by tp = {self.tp}")

    @property
    def num_parts(self) -> int:
        """The parts of a page that differ: one of each rank, or one that every rank has (MLA)."""
        return 1 if self.architecture == MLA else self.tp

    @property
    def vectors(self) -> int:
        """The vectors of a token in one layer and head: K and V, or the latent one that is both."""
        return 1 if self.architecture == MLA else 2

    @property
    def heads_per_rank(self) -> int:
        return self.num_kv_heads // self.num_parts

    @property
    def token_bytes(self) -> int:
        """One token of one head of one layer's K (or V), its scale included."""
        return self.head_dim * self.item_bytes + scale_bytes(self.dtype)

    @property
    def head_bytes(self) -> int:
        """One head of one layer's K (or V) in a page: the numbers of all tokens, then their scales if they have any."""
        return self.page_size * self.token_bytes

    @property
    def page_bytes(self) -> int:
        """One rank's page."""
        return self.num_layers * self.vectors * self.heads_per_rank * self.head_bytes

    @property
    def carried(self) -> Carried:
        return Carried(
            state_pages=-(-self.state_bytes // self.page_bytes),
            window_pages=self.window_pages,
            window_layers=self.window_layers,
            num_layers=self.num_layers,
        )

    @property
    def fingerprint(self) -> str:
        """Equal exactly when pages can be exchanged (tp may differ). What is as by default is left out, so that stores
        of models without it keep their names."""
        told = [f.name for f in fields(self) if f.name not in MAY_DIFFER and getattr(self, f.name) != f.default]
        text = "|".join(f"{name}={getattr(self, name)}" for name in told)
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    def differences(self, theirs: "KvLayout", *, may_differ: frozenset[str]) -> str:
        """Every other field in which the two differ, with both values; empty when there is none."""
        return "; ".join(
            f"{f.name}: {getattr(self, f.name)!r} here, {getattr(theirs, f.name)!r} there"
            for f in fields(self)
            if f.name not in may_differ and getattr(self, f.name) != getattr(theirs, f.name)
        )

    def require_compatible(self, theirs: "KvLayout") -> None:
        """Raises: IncompatibleLayout that names every field that differs, both values, and what to do."""
        differing = self.differences(theirs, may_differ=MAY_DIFFER)
        if differing:
            wanted = (
                "Serve the same model with the same model.dtype, model.quantization, cache.kv_dtype and "
                "cache.page_size on prefill and decode replicas"
            )
            if self.model == theirs.model and self.window_layers != theirs.window_layers:
                wanted = (
                    "Layers with a window keep all tokens on one of them: give both or neither GPUs or "
                    "cache.host_memory_bytes"
                )
            raise IncompatibleLayout(f"KV pages cannot be exchanged: {differing}. {wanted}")
        if self.architecture != MLA and max(self.tp, theirs.tp) % min(self.tp, theirs.tp):
            raise IncompatibleLayout(
                f"tp = {self.tp} here and {theirs.tp} there: one must be a multiple of the other, so that heads map"
            )


def head_slices(src: KvLayout, src_rank: int, dst: KvLayout, dst_rank: int) -> tuple[PageSlice, ...]:
    """The parts of a page that rank ``src_rank`` of ``src`` has and rank ``dst_rank`` of ``dst`` wants, as few runs
    as possible: the whole page when tp is equal, else one run of heads for each layer's K and V; () when they share
    no head. Of MLA's equal pages each rank of ``dst`` gets one whole, from one rank of ``src``."""
    if src.architecture == MLA:
        writer = dst_rank % src.tp
        return (PageSlice(src_offset=0, dst_offset=0, num_bytes=src.page_bytes),) if src_rank == writer else ()
    low = max(src_rank * src.heads_per_rank, dst_rank * dst.heads_per_rank)
    high = min((src_rank + 1) * src.heads_per_rank, (dst_rank + 1) * dst.heads_per_rank)
    if low >= high:
        return ()
    if src.tp == dst.tp:
        return (PageSlice(src_offset=0, dst_offset=0, num_bytes=src.page_bytes),)
    return tuple(
        PageSlice(
            src_offset=(part * src.heads_per_rank + low - src_rank * src.heads_per_rank) * src.head_bytes,
            dst_offset=(part * dst.heads_per_rank + low - dst_rank * dst.heads_per_rank) * dst.head_bytes,
            num_bytes=(high - low) * src.head_bytes,
        )
        for part in range(src.num_layers * 2)
    )
