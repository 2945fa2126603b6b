"""Where processes serve their metrics (``http_sd``), and the metrics of all of them in one answer.

Owns:      how texts of the exposition format are merged: families stay together, and HELP and TYPE come once.
Never:     writes a ``job`` label into ``http_sd``, which would override the name of the scrape job.
Invariant: no series comes twice; a process that does not answer costs its own series alone, and a comment names it.
Thread:    the observatory's event loop.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

import aiohttp

from deployments.fleet.seen import Target

ANSWER_S = 3.0
MOST_BYTES = 8 << 20  # of one process
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"  # what every process answers by default
Fetch = Callable[[str], Awaitable[str]]  # address -> text


async def gather(targets: Sequence[Target], fetch: Fetch, *, within_s: float = ANSWER_S) -> str:
    """Fetch the metrics of ``targets``, all at once."""
    asked = (asyncio.wait_for(fetch(target.address), within_s) for target in targets)
    answers = await asyncio.gather(*asked, return_exceptions=True)
    texts, silent = [], []
    for target, answer in zip(targets, answers, strict=True):
        if isinstance(answer, BaseException):
            silent.append(f"# {target.role} {target.process_id} at {target.address} did not answer: "
                          f"{type(answer).__name__}\n")  # fmt: skip
        else:
            texts.append(answer)
    return merge(texts) + "".join(silent)


async def fetch_text(address: str, *, key: str | None = None) -> str:
    """Fetch metrics over HTTP with the admin ``key``. Raises: aiohttp.ClientError, ValueError if too long."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with aiohttp.ClientSession(headers=headers) as session, session.get(f"http://{address}/metrics") as answer:
        answer.raise_for_status()
        body = bytearray()
        async for chunk in answer.content.iter_any():
            body += chunk
            if len(body) > MOST_BYTES:
                raise ValueError(f"{address} answers with more than {MOST_BYTES} bytes")
        return body.decode()


def merge(texts: Iterable[str]) -> str:
    """Merge texts of the exposition format into one. A series without TYPE is a family of its own name."""
    heads: dict[str, dict[str, str]] = {}  # family -> HELP, TYPE -> line
    samples: dict[str, dict[str, str]] = {}  # family -> series -> line
    for text in texts:
        family = ""
        for line in text.splitlines():
            if line.startswith(("# HELP ", "# TYPE ")):
                _, keyword, family, *_ = line.split(" ", 3)
                heads.setdefault(family, {}).setdefault(keyword, line)
            elif line and not line.startswith("#"):
                series = line.rpartition(" ")[0]
                name = series.partition("{")[0]
                own = family if family and name.startswith(family) else name
                samples.setdefault(own, {}).setdefault(series, line)
    lines = []
    for family, found in samples.items():
        head = heads.get(family, {})
        lines += [head[keyword] for keyword in ("HELP", "TYPE") if keyword in head]
        lines += found.values()
    return "".join(f"{line}\n" for line in lines)


def service_discovery(targets: Iterable[Target]) -> list[dict[str, Any]]:
    """Return an entry a process. Its series say what it is; the label says where it runs."""
    return [{"targets": [each.address], "labels": {"node": each.node_id}} for each in targets]
