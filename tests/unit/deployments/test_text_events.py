"""Events that differ in their text alone are what encoding each whole would give."""

from typing import Any

import pytest

from deployments.http.streaming import TextEvents, sse


def payload(text: str) -> dict[str, Any]:
    return {"id": 'cmpl-"a\\b"', "created": 7, "choices": [{"index": 0, "text": text, "logprobs": None}], "end": None}


@pytest.mark.parametrize("text", ["", " the", 'say "yes"\n', "\\n as two", "é 漢 🙂", "\0\x1f\x7f\u2028", "{}"])
def test_an_event_is_byte_for_byte_that_of_the_whole_payload(text: str) -> None:
    assert TextEvents(payload).event(text) == sse(payload(text))


def test_a_payload_with_the_text_in_two_places_is_refused() -> None:
    with pytest.raises(AssertionError, match="the text stands in 2 places"):
        TextEvents(lambda text: {"text": text, "again": text})
