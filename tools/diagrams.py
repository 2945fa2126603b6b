"""Draws how batches, the radix tree, tiers and a KV transfer work: docs/pictures/{steps,tree,tiers,kv_transfer}.svg.

    python -m tools.diagrams

Owns:      steps and tree are what the scheduler and the cache did when they ran here, over a fake device
           (tests/harness.py); tiers and KV transfers are drawn by hand.
Invariant: the same code draws the same bytes: tests/contract/test_house.py compares.
"""

from collections.abc import Iterator, Sequence
from html import escape

from replicas.cache.base import Lock
from replicas.cache.kv import KvCache
from replicas.cache.node import TreeNode
from replicas.request import Req
from replicas.scheduler.plan import ExtendPlan, StepPlan
from tests.harness import Bench, choice_of, pool_of
from tools.house import PICTURES, svg

PREFILL, CACHED, DECODE, LOCKED, FREE = "#dcefdc", "#fde8c8", "#dbe9f6", "#f0dcec", "#eeeeee"
PAGE = 4  # tokens


def _box(x: float, y: float, width: float, text: str, colour: str, *, height: float = 26) -> str:
    shape = (
        f'<rect x="{x:.0f}" y="{y:.0f}" width="{width:.0f}" height="{height:.0f}" rx="4" fill="{colour}" '
        'stroke="#8a93a0"/>'
    )
    return shape + _text(x + width / 2, y + height / 2 + 4, text, "name")


def _text(x: float, y: float, text: str, kind: str = "file") -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" class="{kind}">{escape(text)}</text>'


def _arrow(x: float, y: float, to_x: float, to_y: float) -> str:
    return (
        f'<line x1="{x:.0f}" y1="{y:.0f}" x2="{to_x:.0f}" y2="{to_y:.0f}" stroke="#8a93a0" stroke-width="1.4" '
        'marker-end="url(#tip)"/>'
    )


def _tokens(plan: StepPlan) -> dict[int, int]:
    """Tokens of each row of the request table in a step; one of a row in decode."""
    if isinstance(plan, ExtendPlan):
        return {row.row: len(row.token_ids) for row in plan.rows}
    return dict.fromkeys(map(int, plan.rows), 1)


def steps_svg() -> str:
    """Four requests over steps of at most 16 tokens: chunks beside decode, and a prompt that finds a prefix."""
    bench = Bench(page_size=PAGE, chunked_prefill_size=16)
    arrivals = {0: ("A", range(8), 7), 2: ("B", range(100, 140), 3), 5: ("C", range(200, 206), 4)}
    arrivals[7] = ("D", [*range(100, 132), *range(300, 306)], 2)
    names, cells, at = list[str](), list[str](), 0
    while at <= max(arrivals) or bench.scheduler.has_work:
        if at in arrivals:
            name, prompt, new = arrivals[at]
            bench.submit(list(prompt), max_new_tokens=new)
            names.append(f"{name}: {len(prompt)} tokens in, {new} out")
        rows = {id(req): req for req in bench.reqs if not req.finish}
        before = {key: req.computed_len for key, req in rows.items()}
        plan = bench.scheduler.schedule()
        assert plan is not None
        tokens = _tokens(plan)
        for number, req in enumerate(bench.reqs):
            if id(req) in rows and req.holding and req.holding.row in tokens:
                x, y = 190 + 76 * at, 40 + 36 * number
                cells += _cell(req, x, y, tokens[req.holding.row], req.computed_len - before[id(req)])
        bench.scheduler.apply(plan, bench.device.execute(plan))
        at += 1
    heads = [_text(190 + 76 * step + 34, 26, f"step {step + 1}", "size") for step in range(at)]
    labels = [_text(10, 57 + 36 * number, name) for number, name in enumerate(names)]
    foot = "green: tokens of a prompt; gold: tokens that were cached; blue: one token of an answer"
    bottom = 40 + 36 * len(names) + 16
    return svg(200 + 76 * at, bottom + 14, [*heads, *labels, *cells, _text(10, bottom, foot, "file")])


def _cell(req: Req, x: float, y: float, num_tokens: int, cached: int) -> Iterator[str]:
    if req.computed_len >= req.prompt_len:
        yield _box(x, y, 68, "1", DECODE)
    elif cached > 0:
        yield _box(x, y, 34, str(cached), CACHED)
        yield _box(x + 34, y, 34, str(num_tokens), PREFILL)
    else:
        yield _box(x, y, 68, str(num_tokens), PREFILL)


def tree_svg() -> str:
    """The tree of a pool of twelve pages: a first prompt, a second that splits its node, a third that evicts."""
    kv = KvCache(size=pool_of(12, PAGE), max_requests=4, context_len=64)
    first, second, third = [*range(24)], [*range(12), *range(50, 62)], [*range(70, 90)]
    parts, x = list[str](), 10.0
    for number, (text, prompt) in enumerate(
        (("1. A prompt of 24 tokens", first), ("2. Another one shares 12: split", second), ("3. A third evicts", third))
    ):
        req = choice_of(f"r{number}", prompt, max_new_tokens=1)
        cached = kv.admit(req)
        kv.extend(req, req.num_tokens)
        req.computed_len = req.num_tokens
        kv.commit(req)
        parts.append(_text(x, 20, text, "room"))
        parts.append(_text(x, 36, f"{cached} tokens cached, {len(prompt) - cached} computed"))
        drawn, width = _subtree(_root(req), x, 52)
        parts += drawn
        free = kv.store.stats().free_pages
        parts.append(_text(x, 232, f"{free} of 12 pages are free"))
        kv.release(req, keep=True)
        x += max(width, 230) + 30
    return svg(x, 244, parts)


def _root(req: Req) -> TreeNode:
    """The root of the tree in which ``req`` holds a lock."""
    assert req.holding is not None
    assert isinstance(req.holding.lock, Lock)
    node = req.holding.lock.node
    while node.parent is not None:
        node = node.parent
    return node


def _subtree(node: TreeNode, x: float, y: float) -> tuple[list[str], float]:
    """Draw ``node`` and what is below it; return that, and its width."""
    parts, right = list[str](), x
    for child in node.children.values():
        drawn, width = _subtree(child, right, y + 56)
        parts += [_arrow(x + 55, y + 26, right + 55, y + 56), *drawn]
        right += width + 12
    if node.parent is None:
        text, colour = "root", FREE
    else:
        ids = node.key.tolist()
        text, colour = f"tokens {ids[0]}-{ids[-1]}", LOCKED if node.lock_ref else CACHED
    return [*parts, _box(x, y, 110, text, colour)], max(right - 12 - x, 110)


def kv_transfer_svg() -> str:
    """One prompt from a prefill to a decode replica."""
    left, right = 150, 620
    steps: Sequence[tuple[bool, str, str]] = (
        (True, "1. room, missing pages (TCP)", "decode: match its own tree; take a row and all pages"),
        (
            False,
            "2. pages of each whole chunk and their digests (NIXL)",
            "prefill: cached pages first, then chunk by chunk",
        ),
        (False, "3. more pages, at most 16 a write", "decode: verify each page as it arrives"),
        (False, "4. the last pages, and the first token", "prefill: the prompt is computed"),
        (True, "5. ack (TCP)", "decode: all pages of all ranks are there"),
        (True, "6. done", "decode: prefix to its tree, first token, decode; prefill: pages freed, prefix stays cached"),
    )
    parts = [_box(left - 70, 10, 140, "decode replica", DECODE), _box(right - 70, 10, 140, "prefill replica", PREFILL)]
    bottom = 60 + 44 * len(steps)
    parts += [f'<line x1="{x}" y1="36" x2="{x}" y2="{bottom}" stroke="#c4c9d0"/>' for x in (left, right)]
    for number, (forth, what, does) in enumerate(steps):
        y = 64 + 44 * number
        if number + 1 < len(steps):
            parts.append(_arrow(left if forth else right, y, right if forth else left, y))
        parts.append(_text((left + right) / 2, y - 6, what, "name"))
        parts.append(_text((left + right) / 2, y + 14, does, "size"))
    return svg(right + 90, bottom + 10, parts)


def tiers_svg() -> str:
    """Where pages go when the pool is short of room, and how they come back."""
    names = (("L1: device pool", CACHED), ("L2: host memory", PREFILL), ("L3: store, a folder or S3", DECODE))
    parts = [_box(10 + 290 * at, 60, 170, name, colour, height=44) for at, (name, colour) in enumerate(names)]
    out = ("evicted, worth a copy", "written while nothing is read")
    back = ("loaded in the step that needs it", "read if quicker than computing")
    for at in range(2):
        x = 180 + 290 * at
        parts += [_arrow(x, 72, x + 118, 72), _text(x + 60, 50, out[at], "size")]
        parts += [_arrow(x + 118, 94, x + 2, 94), _text(x + 60, 120, back[at], "size")]
    for at, text in enumerate(
        ("evicted, not worth a copy: gone", "evicted: gone, unless stored", "least recently used: gone")
    ):
        parts += [_arrow(95 + 290 * at, 104, 95 + 290 * at, 144), _text(95 + 290 * at, 160, text, "size")]
    return svg(780, 172, parts)


DRAWN = {"steps": steps_svg, "tree": tree_svg, "kv_transfer": kv_transfer_svg, "tiers": tiers_svg}

if __name__ == "__main__":
    for name, draw in DRAWN.items():
        (PICTURES / f"{name}.svg").write_text(draw())
