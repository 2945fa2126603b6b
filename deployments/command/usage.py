"""``manta key usage``: what each tenant has used in each month, added up from the lines of the routers' logs.

Owns:      the reading of these lines, as text or JSON, of files that were rotated too.
Never:     asks a running Manta; reads a prompt, a text or a key: no line has one.
Invariant: a request that ended has one line, at the router where it ended (record/route_log.py), in the month of that
           end, on that router's clock. A list of prompts has one each. One without a first token counts nothing. A
           stream that went on at other routers counts once and whole: with its first run, if that has a line, and else
           as the run that came furthest found it.
"""

import csv
import json
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from deployments.tenancy.tenants import NAME, NOBODY
from deployments.watch.terminal.table import Table, count, plain, spaced

SUMS = ("requests", "uncached_input_tokens", "cached_input_tokens", "output_tokens")
# Whole, as Serve writes it: a client chooses what its request is called, and so a part of other lines
# (its id of a request, and Serve's additional_log_standard_attrs, stand before the first --)
_LINE = re.compile(r"\S+ (?P<month>\d{4}-\d\d)-\d\d \S+ \S+ \S+ (?:[^ ]* )*?-- (?P<message>.*)\s*")
_ENDED = re.compile(r"finished (?P<told>rid=\S+(?: \w+=\S+)*)")
Used = Mapping[tuple[str, str], Counter[str]]  # by month and tenant


def run(folder: Path, *, month: str | None, as_csv: bool) -> int:
    """Print what the logs of ``folder`` say of ``month``; None: of all. Returns: the exit status."""
    files = sorted(folder.glob("*.log*"))
    if not files:
        print(f"there are no logs at {folder}: give the folder that `manta serve` printed: --folder", file=sys.stderr)
        return 1
    used = sorted((of, sums) for of, sums in added(lines_of(files)).items() if month in (None, of[0]))
    if as_csv:
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow(["month", "tenant", *SUMS])
        writer.writerows([*of, *(sums[name] for name in SUMS)] for of, sums in used)
        return 0
    shown = [
        {"month": of[0], "tenant": of[1], **{f">{name.replace('_', ' ')}": count(sums[name]) for name in SUMS}}
        for of, sums in used
    ]
    print(plain(spaced([Table(shown)])) if shown else "no request has ended" + (f" in {month}" if month else ""))
    return 0


def added(lines: Iterable[str]) -> Used:
    """Add up the requests and tokens that ``lines`` tell of, by month and tenant; "-" is everybody without a key."""
    used: dict[tuple[str, str], Counter[str]] = {}
    begun = dict[str, int]()  # by stream that can go on elsewhere: the longest output of a first run
    resumed = dict[str, tuple[tuple[str, str], tuple[int, int, int, int]]]()  # what the run that came furthest tells
    num_unread = 0
    for line in lines:
        try:
            month, told = _told(line)
            if "cached_l1" not in told:
                continue
            cached = sum(int(told[f"cached_l{tier}"]) for tier in (1, 2, 3))
            stream, output = told.get("stream", ""), int(told["output"]) + int(told.get("restored", 0))
            of, given = (month, told.get("tenant", NOBODY)), (1, int(told["prompt"]) - cached, cached, output)
            if "restored" in told and not stream:  # an older Manta's, whose first router counted all but this output
                given = (0, 0, 0, int(told["output"]))
        except (ValueError, KeyError):
            num_unread += 1
            continue
        if stream and "restored" in told:
            resumed[stream] = max(resumed.get(stream, (of, given)), (of, given), key=lambda each: each[1][-1])
            continue
        if stream:
            begun[stream] = max(begun.get(stream, 0), output)
        _add(used, of, given)
    for stream, (of, given) in resumed.items():
        _add(used, of, given if stream not in begun else (0, 0, 0, max(given[-1] - begun[stream], 0)))
    if num_unread:
        print(f"{num_unread} lines that seem to tell of requests were not read: cut off, or forged", file=sys.stderr)
    return used


def _add(used: dict[tuple[str, str], Counter[str]], of: tuple[str, str], given: Sequence[int]) -> None:
    used.setdefault(of, Counter()).update(dict(zip(SUMS, given, strict=True)))


def _told(line: str) -> tuple[str, Mapping[str, str]]:
    """Return the month of a line about a request that has ended, and what it tells; nothing of any other.

    Raises: ValueError, KeyError for one that is not as a router writes it.
    """
    if "finished rid=" not in line:
        return "", {}
    if line.startswith("{"):
        found = json.loads(line)
        message, month = str(found["message"]), str(found["asctime"])[:7]
    else:
        match = _LINE.fullmatch(line)
        month, message = match.groups() if match else ("", "")
    if not message.startswith("finished rid="):
        return "", {}
    ended = _ENDED.fullmatch(message)
    told = dict(pair.split("=", 1) for pair in ended["told"].split()) if ended else {}
    if "outcome" not in told or not re.fullmatch(NAME, told.get("tenant", NOBODY)):  # the router died while it wrote
        raise ValueError(line)
    return month, told


def lines_of(files: Iterable[Path]) -> Iterator[str]:
    """Read the lines of ``files``."""
    for file in files:
        try:
            with file.open(errors="replace", newline="\n") as opened:  # a carriage return ends no line
                yield from opened
        except OSError as error:  # rotated away, or another user's
            print(f"{file}: not read ({error})", file=sys.stderr)
