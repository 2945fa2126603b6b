"""A sample of MaskBench (tests/data/README.md): no valid document is refused, and no invalid one accepted."""

import functools
import json
import lzma
import time
from collections import Counter
from pathlib import Path
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from deployments.output.validation import is_valid
from replicas.errors import InvalidRequest
from replicas.grammar.checking import LIMITS, Examined, examine, grammar_of, keywords_of
from tests.embedded import MODEL

DATA = Path(__file__).parents[2] / "data" / "maskbench.jsonl.xz"


@functools.cache
def tokenizer() -> LLTokenizer:
    return LLTokenizer((Path(MODEL) / "tokenizer.json").read_text())


@functools.cache
def schemas() -> list[dict[str, Any]]:
    return [json.loads(line) for line in lzma.decompress(DATA.read_bytes()).decode().splitlines()]


def error_of(grammar: str) -> str:
    return str(LLMatcher(tokenizer(), grammar, log_level=0, limits=LIMITS).get_error())


@functools.cache
def examined() -> list[tuple[dict[str, Any], Examined | InvalidRequest]]:
    found: list[tuple[dict[str, Any], Examined | InvalidRequest]] = []
    for each in schemas():
        try:
            found.append((each, examine("json_schema", json.dumps(each["schema"]), error_of)))
        except InvalidRequest as error:
            found.append((each, error))
    return found


def takes(matcher: LLMatcher, text: str) -> bool:
    """Whether the mask allows each token of ``text`` in its turn, and then the end."""
    for token in tokenizer().tokenize_str(text):
        if not matcher.compute_bitmask()[token // 8] >> token % 8 & 1:
            return False
        assert matcher.consume_token(token)
    return bool(matcher.is_accepting())


def in_order(document: Any, schema: Any) -> Any:
    """The document with all objects' names in the order of the schema."""
    names = [name for _, keyword, value, _ in keywords_of(schema) if keyword == "properties" for name in value]
    if isinstance(document, dict):
        ranks = {name: names.index(name) if name in names else len(names) for name in document}
        return {name: in_order(document[name], schema) for name in sorted(document, key=ranks.__getitem__)}
    return [in_order(each, schema) for each in document] if isinstance(document, list) else document


def shown(document: Any) -> str:
    return json.dumps(document, ensure_ascii=False)


def test_of_schemas_that_are_enforced_all_valid_documents_are_taken_and_no_invalid_one() -> None:
    wrong, counts = [], Counter[str]()
    for each, found in examined():
        if isinstance(found, InvalidRequest) or found.problems:
            counts["not enforced"] += 1
            continue
        counts["enforced"] += 1
        start = LLMatcher(tokenizer(), grammar_of(found.constraint), log_level=0, limits=LIMITS)
        for test in each["tests"]:
            counts["valid" if test["valid"] else "invalid"] += 1
            taken = takes(start.deep_copy(), shown(test["data"]))
            if test["valid"] and not taken:  # names come in the schema's order, which is documented
                counts["valid, in another order"] += 1
                taken = takes(start.deep_copy(), shown(in_order(test["data"], each["schema"])))
            if taken is not test["valid"]:
                wrong.append((each["name"], test["valid"], shown(test["data"])[:100]))
    print(dict(counts))
    assert wrong == []
    assert counts["enforced"] >= 215  # of 240
    assert counts["valid, in another order"] <= 1


def test_every_refusal_names_what_is_refused() -> None:
    keywords, refused = Counter[str](), Counter[str]()
    for each, found in examined():
        if isinstance(found, InvalidRequest):
            refused[str(found)[:80]] += 1
            continue
        for keyword, pointer in found.problems:
            keywords[keyword] += 1
            at: Any = each["schema"]
            for part in pointer.split("/")[1:]:
                part = part.replace("~1", "/").replace("~0", "~")
                at = at[int(part)] if isinstance(at, list) else at[part]  # the place is in the client's own schema
            assert pointer.endswith(f"/{keyword}")
    print(dict(keywords), dict(refused))
    assert keywords


def test_of_schemas_that_are_not_enforced_no_invalid_document_is_called_valid() -> None:
    """What the grammar lets through is validated: together they are right, or say that they cannot tell."""
    wrong, counts = [], Counter[str]()
    for each, found in examined():
        if isinstance(found, InvalidRequest) or not found.problems:
            continue
        start = LLMatcher(tokenizer(), grammar_of(found.constraint), log_level=0, limits=LIMITS)
        for test in each["tests"]:
            text = shown(test["data"])
            taken = takes(start.deep_copy(), text)
            valid = taken and is_valid(json.dumps(each["schema"]), text, until=time.monotonic() + 60)
            counts[f"valid={test['valid']}: taken={taken}, called valid={valid}"] += 1
            if valid and not test["valid"]:
                wrong.append((each["name"], text[:100]))
    print(dict(counts))
    assert wrong == []
