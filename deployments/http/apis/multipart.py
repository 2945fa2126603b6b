"""Reads a form with one file (multipart/form-data, RFC 7578): fields into memory, the file to disk as it comes.

Never:     holds more of the file than a chunk.
Invariant: what is written is what stands between the two boundaries, to the byte.
Thread:    the router's event loop; chunks are written on another thread, as a disk may be slow.

No library does it, since python-multipart's parser calls back for each piece of a header and of a value: to put these
together, within bounds, takes as much code as to find the boundaries.
"""

import re
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

from deployments.http.http_errors import BodyTooLarge
from replicas.errors import InvalidRequest

MOST_FIELDS = 16  # a form of files has four
MOST_HEAD = 16 << 10  # bytes of a part's headers, and of a field's value
_BOUNDARY = re.compile(r'multipart/form-data\s*;.*?boundary=(?:"([^"]{1,70})"|([^;,\s]{1,70}))', re.IGNORECASE)
_NAME = re.compile(rb'(?<!\w)name="((?:[^"\\]|\\.)*)"')
_FILENAME = re.compile(rb'filename="((?:[^"\\]|\\.)*)"')


def boundary_of(content_type: str) -> bytes:
    """Read what stands between the parts. Raises: InvalidRequest."""
    found = _BOUNDARY.match(content_type)
    if found is None:
        raise InvalidRequest(
            "the body must be a form with the fields file and purpose: Content-Type: multipart/form-data; boundary=..."
        )
    return b"\r\n--" + (found[1] or found[2]).encode()


async def read_form(
    chunks: AsyncIterator[bytes], boundary: bytes, path: Path, *, max_bytes: int, run: Callable[..., Awaitable[Any]]
) -> tuple[dict[str, str], str | None]:
    """Write the form's file to ``path``. Returns: its other fields, and the file's name; None without a file.

    Args:   run: makes a call that blocks.
    Raises: InvalidRequest for what is no such form; BodyTooLarge.
    """
    fields, filename, held, num_bytes = dict[str, str](), None, b"\r\n", 0
    num_fields = 0
    held = await _more(chunks, held, boundary)
    if not held.startswith(boundary):
        raise InvalidRequest("the form does not begin with its boundary")
    while True:
        held = held[len(boundary) :]
        held = await _more(chunks, held, b"\r\n\r\n", or_end=b"--")
        if held.startswith(b"--"):
            async for chunk in chunks:  # else its connection is closed
                held += chunk
                if len(held) > MOST_HEAD:
                    break
            return fields, filename
        head, _, held = held.partition(b"\r\n\r\n")
        name, file = _NAME.search(head), _FILENAME.search(head)
        if name is None:
            raise InvalidRequest("a part of the form has no name")
        if file is None:
            num_fields += 1
            if num_fields > MOST_FIELDS:
                raise InvalidRequest(f"the form has more than {MOST_FIELDS} fields")
            held = await _more(chunks, held, boundary)
            value, _, _ = held.partition(boundary)
            fields[_text(name[1])], held = _text(value), held[len(value) :]
            continue
        if filename is not None:
            raise InvalidRequest("the form has more than one file", param="file")
        filename = _text(file[1]) or "file"
        out = await run(path.open, "wb")
        try:
            while (at := held.find(boundary)) < 0:
                sure = max(len(held) - len(boundary) + 1, 0)  # the rest may be the begin of a boundary
                num_bytes += await run(out.write, held[:sure])
                _check_size(num_bytes, max_bytes)
                held = held[sure:] + await _next(chunks)
            _check_size(num_bytes + at, max_bytes)
            await run(out.write, held[:at])
            held = held[at:]
        finally:
            await run(out.close)


def _check_size(num_bytes: int, max_bytes: int) -> None:
    if num_bytes > max_bytes:
        raise BodyTooLarge(f"the file has more than {max_bytes:,} bytes; a longer one is not kept")


async def _more(chunks: AsyncIterator[bytes], held: bytes, wanted: bytes, *, or_end: bytes | None = None) -> bytes:
    """Read on until ``wanted`` is among what is held, or it begins with ``or_end``."""
    while wanted not in held and not (or_end is not None and held.startswith(or_end)):
        if len(held) > MOST_HEAD:
            raise InvalidRequest(f"a field of the form has more than {MOST_HEAD:,} bytes")
        held += await _next(chunks)
    return held


async def _next(chunks: AsyncIterator[bytes]) -> bytes:
    async for chunk in chunks:
        if chunk:
            return chunk
    raise InvalidRequest("the form ends before its last boundary")


def _text(value: bytes) -> str:
    return value.decode("utf-8", "replace")
