"""The ids of a stream's events, with which any router can go on behind the last one that a client has had.

Owns:      what an id says; where the deltas of another run are cut, and which of their events are left out.
Never:     keeps an event, or knows its JSON.
Invariant: what a client gets of several runs is what one run says, or `StreamGone`: an answer that does not come out
           the same, as can happen where numbers are rounded, is refused and never continued with other text.

An id says how far each choice had come:

    NUMBER:TOKENS.CHARACTERS.CRC32[e],...[+EVENTS[@CHOICE.TOKENS.CHARACTERS]]

that is its number in the stream, and of each choice the output so far, with a checksum of its text (``e``: it has
ended). Where one delta makes several events, all but the last say how many of them there were, and where the delta
began; without a place, they are of those behind the end of all choices.
"""

import re
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from replicas.errors import Fault, InvalidRequest, MantaError
from replicas.types import TokenDelta

MOST_CHOICES = 8  # of one stream: each event's id names the places of all
ALL = sys.maxsize

_PLACE = r"(\d{1,9})\.(\d{1,9})\.([0-9a-f]{8})(e?)"
_ID = re.compile(rf"(\d{{1,9}}):({_PLACE}(?:,{_PLACE})*)(?:\+(\d{{1,4}})(?:@(\d)\.(\d{{1,9}})\.(\d{{1,9}}))?)?")


class StreamGone(MantaError):
    """The rest of a stream is not there any more, or cannot be made as it was."""

    fault = Fault.GONE
    code = "stream_gone"


@dataclass(frozen=True, slots=True)
class Reached:
    """How far a choice has come."""

    num_tokens: int = 0
    num_characters: int = 0
    checksum: int = 0  # CRC-32 of the text in UTF-8
    ended: bool = False

    def after(self, delta: TokenDelta) -> "Reached":
        return Reached(
            self.num_tokens + len(delta.token_ids),
            self.num_characters + len(delta.text),
            zlib.crc32(delta.text.encode(), self.checksum),
            delta.finish is not None,
        )

    def covers(self, other: "Reached") -> bool:
        enough = self.num_tokens >= other.num_tokens and self.num_characters >= other.num_characters
        return enough and self.ended >= other.ended

    def __str__(self) -> str:
        return f"{self.num_tokens}.{self.num_characters}.{self.checksum:08x}{'e' if self.ended else ''}"


class Begun(NamedTuple):
    """Where the delta began of which a client has had some events, and not all."""

    choice: int
    num_tokens: int
    num_characters: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """What a client has had of a stream: the id of its last event, read."""

    number: int
    places: tuple[Reached, ...]
    num_events: int = 0  # of the delta that began at ``begun``, or of the events behind all choices
    begun: Begun | None = None

    @staticmethod
    def read(text: str, *, num_choices: int) -> "Cursor":
        """Read the id of an event. Raises: InvalidRequest."""
        found = _ID.fullmatch(text)
        if found is None or found[2].count(",") != num_choices - 1:
            raise InvalidRequest(f"Last-Event-ID: {text[:64]!r} is not the id of an event of this stream")
        places = tuple(
            Reached(int(tokens), int(characters), int(checksum, 16), bool(ended))
            for tokens, characters, checksum, ended in re.findall(_PLACE, found[2])
        )
        *_, num_events, choice, num_tokens, num_characters = found.groups()
        begun = None if choice is None else Begun(int(choice), int(num_tokens), int(num_characters))
        if begun is not None and begun.choice >= num_choices:
            raise InvalidRequest(f"Last-Event-ID: {text[:64]!r} names a choice that this request does not have")
        return Cursor(number=int(found[1]), places=places, num_events=int(num_events or 0), begun=begun)

    def __str__(self) -> str:
        part = f"+{self.num_events}" if self.num_events else ""
        begun = "" if self.begun is None else "@" + ".".join(map(str, self.begun))
        return f"{self.number}:{','.join(map(str, self.places))}{part}{begun}"


@dataclass(frozen=True, slots=True)
class _Cut:
    """A place up to which a client has had something of a choice."""

    place: Reached
    num_had: int  # events of what ends here
    is_checked: bool = True


class Numbering:
    """Gives the events of one run their ids, after cutting its deltas where the client's last event ended."""

    def __init__(self, after: Cursor | None, *, num_choices: int) -> None:
        """``after``: what the client has had of the stream; None: nothing."""
        self._number = 0 if after is None else after.number
        self._places = [Reached()] * num_choices
        self._begun: Begun | None = None  # of the newest piece
        self._come = [Reached()] * num_choices  # with what is held
        self._held: list[list[TokenDelta]] = [[] for _ in range(num_choices)]  # what has come before a cut
        self._cuts: list[list[_Cut]] = [[] for _ in range(num_choices)]
        self._num_last_had = 0
        if after is None:
            return
        self._cuts = [[_Cut(place, ALL)] if place != Reached() else [] for place in after.places]
        if after.begun is not None:
            choice = after.begun.choice
            self._cuts[choice] = [_Cut(after.places[choice], after.num_events)]
            if after.begun[1:] != (0, 0):
                begin = Reached(after.begun.num_tokens, after.begun.num_characters)
                self._cuts[choice].insert(0, _Cut(begin, ALL, is_checked=False))
        else:
            self._num_last_had = after.num_events

    def pieces(self, delta: TokenDelta) -> Iterator[tuple[TokenDelta, int]]:
        """Yield ``delta`` in pieces, each with how many of its events the client has had. Raises: StreamGone."""
        index = delta.index
        cuts = self._cuts[index]
        self._come[index] = self._come[index].after(delta)
        while cuts:
            place, cut, held = self._places[index], cuts[0], self._held[index]
            held.append(delta)
            if not self._come[index].covers(cut.place):
                if delta.finish is not None:
                    raise _other_text()
                return
            delta = held[0].merge(*held[1:])
            held.clear()
            first, rest = _split(delta, place, cut.place)
            if (cut.is_checked and place.after(first) != cut.place) or (cut.place.ended and rest is not None):
                raise _other_text()
            del cuts[0]
            yield self._piece(first), cut.num_had
            if rest is None:
                return
            delta = rest
        yield self._piece(delta), 0

    def ids(self, num_events: int, num_had: int) -> list[str]:
        """Number the events of the newest piece, but the first ``num_had`` of them."""
        return self._ids(num_events, num_had, self._begun, whole=num_events)

    def last_ids(self, num_events: int) -> list[str]:
        """Number the events behind the end of all choices, but those that the client has had."""
        return self._ids(num_events, self._num_last_had, None, whole=ALL)

    @property
    def num_last_had(self) -> int:
        return self._num_last_had

    def _piece(self, delta: TokenDelta) -> TokenDelta:
        place = self._places[delta.index]
        self._begun = Begun(delta.index, place.num_tokens, place.num_characters)
        self._places[delta.index] = place.after(delta)
        return delta

    def _ids(self, num_events: int, num_had: int, begun: Begun | None, *, whole: int) -> list[str]:
        ids, places = [], tuple(self._places)
        for count in range(num_had + 1, num_events + 1):
            self._number += 1
            if count == whole:
                ids.append(str(Cursor(number=self._number, places=places)))
            else:
                ids.append(str(Cursor(number=self._number, places=places, num_events=count, begun=begun)))
        return ids


def _split(delta: TokenDelta, begin: Reached, cut: Reached) -> tuple[TokenDelta, TokenDelta | None]:
    """Cut ``delta``, which begins at ``begin``, at ``cut``; None: nothing is left behind it."""
    tokens, characters = cut.num_tokens - begin.num_tokens, cut.num_characters - begin.num_characters
    rest = replace(
        delta,
        token_ids=delta.token_ids[tokens:],
        text=delta.text[characters:],
        logprobs=delta.logprobs[tokens:],
        prompt_logprobs=(),
        finish=None if cut.ended else delta.finish,
    )
    first = replace(
        delta,
        token_ids=delta.token_ids[:tokens],
        text=delta.text[:characters],
        logprobs=delta.logprobs[:tokens],
        finish=delta.finish if cut.ended else None,
    )
    return first, rest if rest.token_ids or rest.text or rest.finish is not None else None


def _other_text() -> StreamGone:
    return StreamGone("the answer came out differently this time: send the request again, without Last-Event-ID")
