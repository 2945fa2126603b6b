"""What keys add to a request in its router: the check of the key, the request's scope, its quota until it is settled,
and the headers of its answer; by CPU time, on one thread, beside the same without keys.

Never: opens a socket or sends to a replica: both are the same with keys and without.
"""

import argparse
import asyncio
import functools
import hashlib
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import yaml
from starlette.types import Message, Receive, Scope, Send

from benchmarks.harness import Row
from deployments.dispatch.progress import Progress
from deployments.dispatch.quotas import Charge, Quotas
from deployments.http.access import KeyCheck, scoped
from deployments.settings.keys import NO_KEYS, KeyDigests
from deployments.settings.tenants import TenantKeys
from replicas.types import GenerateRequest, SamplingParams

PER_ROUND, ROUNDS = 3_000, 7
PLENTY = {"requests": 10**9, "input_tokens": 10**12, "output_tokens": 10**12, "choices": 100}
ASKED = GenerateRequest(
    rid="0123456789abcdef.1",
    token_ids=np.arange(1_000, dtype=np.int32),
    sampling=SamplingParams(max_new_tokens=100),
)


async def _route(scope: Scope, receive: Receive, send: Send, *, quotas: Quotas | None) -> None:
    """Do with a request what a router does for its key."""
    caller = scope["state"]["caller"]
    request = scoped(ASKED, caller, isolation="key", model="model")
    progress = Progress(request)
    if quotas is not None:
        charge = Charge([request], quotas, caller.key)
        charge.sends(progress, 500)
        charge.end(failed=False)
    await send({"type": "http.response.start", "status": 200, "headers": []})


async def _drop(message: Message) -> None:
    pass


async def _nothing() -> Message:
    return {"type": "http.request"}


async def _round_us(app: KeyCheck, secrets: list[str]) -> float:
    scopes: list[Scope] = [
        {"type": "http", "path": "/v1/completions", "headers": [(b"authorization", f"Bearer {secret}".encode())]}
        for secret in (secrets[at % len(secrets)] for at in range(PER_ROUND))
    ]
    started_s = time.process_time()
    for scope in scopes:
        await app(scope, _nothing, _drop)
    return (time.process_time() - started_s) / PER_ROUND * 1e6


def measure(options: argparse.Namespace) -> Iterator[Row]:
    """Yield what a request costs more with files of so many keys, each with limits on everything."""
    for num_keys in (1, 10) if options.quick else (1, 1_000):
        secrets = [f"the-key-of-number-{number}" for number in range(num_keys)]
        with tempfile.TemporaryDirectory(prefix="manta-keys-") as folder:
            file = Path(folder) / "keys.yaml"
            entries = [
                {"id": f"key-{at}", "sha256": hashlib.sha256(secret.encode()).hexdigest(), "limits": PLENTY}
                for at, secret in enumerate(secrets)
            ]
            file.write_text(yaml.safe_dump(entries))
            keys = TenantKeys.read(str(file))
        quotas = Quotas(keys)
        on = KeyCheck(functools.partial(_route, quotas=quotas), keys=KeyDigests(tenants=keys), quotas=quotas)
        off = KeyCheck(functools.partial(_route, quotas=None), keys=NO_KEYS)
        more_us = [
            asyncio.run(_round_us(on, secrets)) - asyncio.run(_round_us(off, secrets)) for _ in range(ROUNDS + 1)
        ][1:]  # the first one warms up
        yield Row(
            section="what keys cost a request", name=f"{num_keys:,} keys with limits", value=statistics.median(more_us),
            unit="us", low=min(more_us), high=max(more_us), runs=len(more_us), target="< 30",
        )  # fmt: skip
