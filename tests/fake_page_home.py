"""The tiers of a replica that moves pages, without an engine: what `kvtransfer.migration` is tested with."""

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import numpy as np
import xxhash

from kvtransfer.layout import KvLayout
from kvtransfer.migration.migrator import PageHome
from kvtransfer.migration.wire import Bytes, Digests, Path

T = TypeVar("T")
PAGE_SIZE = 4
LAYOUT = KvLayout(
    model="m",
    architecture="MHA",
    num_layers=1,
    num_kv_heads=2,
    head_dim=4,
    dtype="float32",
    item_bytes=4,
    page_size=PAGE_SIZE,
    tp=2,
)  # a page: 256 bytes, 128 a rank


def page_of(salt: str, token_ids: Sequence[int]) -> np.ndarray:
    """The bytes of the last page of a sequence; those of another sequence differ."""
    text = f"{salt}|{list(token_ids)}".encode()
    return np.random.default_rng(xxhash.xxh3_64_intdigest(text)).integers(0, 256, 256, dtype=np.uint8)


def path(token_ids: Sequence[int], *, first_page: int = 0, salt: str = "", **known: float) -> Path:
    ids = np.asarray(token_ids, dtype="<i4").tobytes()
    return Path(salt, ids, first_page, **known)  # type: ignore[arg-type]


class FakePageHome:
    """Holds pages by (salt, tokens up to the page's end), at most ``room`` of them."""

    def __init__(self, *paths: Path, room: int = 1000) -> None:
        self.paths = list(paths)
        self.room = room
        self.pages: dict[tuple[str, tuple[int, ...]], np.ndarray] = {}
        self.num_reads = 0
        self.num_writes = 0
        self.spoilt: set[tuple[str, tuple[int, ...]]] = set()  # pages that are read with a bit that flipped
        for each in paths:
            for key in keys_of(each):
                self.pages[key] = page_of(*key)

    def hottest(self, most_bytes: int) -> list[Path]:
        return self.paths

    def held(self, paths: Sequence[Path]) -> list[int]:
        return [next((at for at, key in enumerate(keys_of(each)) if key not in self.pages), len(keys_of(each)))
                for each in paths]  # fmt: skip

    def read(self, path: Path, first: int, num: int) -> tuple[Bytes, Digests] | None:
        self.num_reads += 1
        keys = keys_of(path)[first : first + num]
        if any(key not in self.pages for key in keys):
            return None
        payload = np.stack([self.pages[key] for key in keys])
        digests = [[xxhash.xxh3_64_intdigest(half.tobytes()) for half in page.reshape(2, -1)] for page in payload]
        for at, key in enumerate(keys):
            payload[at, 200] ^= key in self.spoilt
        return payload, np.array(digests, dtype=np.uint64)

    def write(self, path: Path, first: int, payload: Bytes, digests: Digests) -> int:
        self.num_writes += 1
        keys = keys_of(path)
        if any(key not in self.pages for key in keys[:first]):
            return 0
        for at, page in enumerate(payload):
            if keys[first + at] not in self.pages and len(self.pages) >= self.room:
                return at
            self.pages.setdefault(keys[first + at], page.copy())
        return len(payload)

    async def visit(self, fn: Callable[[PageHome], T]) -> T:
        return fn(self)

    def check(self) -> None:
        """Every page is the right one for its tokens, and follows one that is here."""
        for (salt, ids), page in self.pages.items():
            assert (page == page_of(salt, ids)).all(), f"wrong bytes for {ids}"
            assert len(ids) == PAGE_SIZE or (salt, ids[:-PAGE_SIZE]) in self.pages


def keys_of(path: Path) -> list[tuple[str, tuple[int, ...]]]:
    ids = path.ids.tolist()
    return [(path.salt, tuple(ids[: end * PAGE_SIZE])) for end in range(1, path.num_pages(PAGE_SIZE) + 1)]


_: Callable[[Callable[[PageHome], int]], Awaitable[int]] = FakePageHome().visit
