"""Tools as clients send them, and grammars of tool calls, in every format, over the embedded model's tokenizer."""

import re
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer

from deployments.output import tool_formats
from deployments.output.output_format import OutputFormat
from deployments.output.tool_formats import ToolFormat
from deployments.output.tool_grammar import arguments_schema, is_constrained, problems_of, tool_constraint
from deployments.output.tools import MAX_TOOLS, ToolUse, tool_use
from replicas.errors import InvalidRequest
from replicas.grammar.checking import LIMITS, MAX_TEXT, grammar_of
from replicas.types import Constraint
from tests.embedded import MODEL
from tests.unit.output.outputs import FORMATS

UNITS = {"enum": ["c", "f"]}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "unit": UNITS}, "required": ["city"]}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": SCHEMA, "strict": True}},
    {"type": "function", "function": {"name": "now"}},
]


@pytest.fixture(scope="module")
def file() -> str:
    return (Path(MODEL) / "tokenizer.json").read_text()


@pytest.fixture(scope="module")
def matched(file: str) -> LLTokenizer:
    return LLTokenizer(file)


def output_of(form: ToolFormat | None) -> OutputFormat:
    return OutputFormat(tools=form, reasoning=None, template_has_tools=False, special_tags=frozenset(), dropped=())


def constraint_of(output: OutputFormat, use: ToolUse, **options: Any) -> Constraint:
    schemas = {tool.name: arguments_schema(tool) for tool in use.tools}
    return tool_constraint(output, use, schemas=schemas, **{"token_id": int, **options})


class Accepts:
    """Says of texts whether an output may be so, from its first token to its last."""

    def __init__(self, file: str, matched: LLTokenizer, form: ToolFormat, use: ToolUse, **options: Any) -> None:
        constraint = constraint_of(output_of(form), use, **options)
        self._grammar, self._matched, self._tokenizer = grammar_of(constraint), matched, Tokenizer.from_str(file)

    def __call__(self, text: str) -> bool:
        matcher = LLMatcher(self._matched, self._grammar)
        assert not matcher.get_error()
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


def use_of(choice: Any, parallel: bool = True) -> ToolUse:
    use = tool_use(TOOLS, choice, parallel)
    assert use is not None
    return use


def whole(form: ToolFormat, *names: str) -> str:
    """An output of calls of these tools."""
    parameter = f"{form.parameter_begin('city')}Rome{form.parameter_end}"
    city = '{"city": "Rome"}' if form.arguments == "json" else parameter
    arguments = {"weather": city, "now": "{}" if form.arguments == "json" else ""}
    calls = [f"{form.begin(name)}{arguments[name]}{form.end}" for name in names]
    return f"{form.whole_begin}{form.between.join(calls)}{form.whole_end}"


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("parallel", [True, False])
def test_a_required_call_is_all_that_there_is(
    file: str, matched: LLTokenizer, form: ToolFormat, parallel: bool
) -> None:
    accepts = Accepts(file, matched, form, use_of("required", parallel))
    assert accepts(whole(form, "weather"))
    assert accepts(whole(form, "now"))
    assert accepts(whole(form, "weather", "now")) is parallel
    for text in ("", "Rome", f"Rome {whole(form, 'now')}", whole(form, "weather").replace("city", "town")):
        assert not accepts(text)


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("parallel", [True, False])
def test_a_strict_tool_is_held_to_its_schema_where_a_call_begins(
    file: str, matched: LLTokenizer, form: ToolFormat, parallel: bool
) -> None:
    accepts = Accepts(file, matched, form, use_of("auto", parallel))
    assert accepts("It is 5 o'clock in <Rome> [1].")
    assert accepts(whole(form, "weather"))
    assert accepts(whole(form, "weather", "now")) is parallel
    assert not accepts(whole(form, "weather").replace("city", "town"))
    if form != tool_formats.LLAMA3_JSON:  # a call of it is the whole output
        assert accepts(f"Let me see. {whole(form, 'weather')}")
        assert not accepts(f"Let me see. {whole(form, 'weather').replace('city', 'town')}")


def test_a_named_tool_is_called_and_no_other(file: str, matched: LLTokenizer) -> None:
    form = tool_formats.HERMES
    accepts = Accepts(file, matched, form, use_of({"type": "function", "function": {"name": "now"}}))
    assert accepts(whole(form, "now"))
    assert not accepts(whole(form, "weather"))
    assert not accepts(whole(form, "now", "now"))


def test_a_tagged_parameter_is_what_its_schema_says(file: str, matched: LLTokenizer) -> None:
    form = tool_formats.QWEN3_CODER
    accepts = Accepts(file, matched, form, use_of("required"))
    call = whole(form, "weather")
    for unit, fits in (("c", True), ("k", False)):
        parameter = f"{form.parameter_begin('unit')}{unit}{form.parameter_end}"
        assert accepts(call.replace("</function>", f"{parameter}</function>")) is fits
    assert accepts(call.replace("Rome", 'a "b"\n{<c>}'))
    assert not accepts(call.replace("Rome\n</parameter>\n", ""))


def test_a_constant_in_a_tagged_parameter_is_the_only_value(file: str, matched: LLTokenizer) -> None:
    schema = {"type": "object", "properties": {"a b": {"type": "string", "const": "x"}}, "required": ["a b"]}
    use = tool_use([{"type": "function", "function": {"name": "f", "parameters": schema}}], "required", False)
    assert use is not None
    form = tool_formats.QWEN3_CODER
    accepts = Accepts(file, matched, form, use)
    for value in ("x", "y"):
        call = f"{form.begin('f')}{form.parameter_begin('a b')}{value}{form.parameter_end}{form.end}"
        assert accepts(call) is (value == "x")


def test_what_a_tagged_parameter_cannot_be_held_to_is_listed_by_its_place() -> None:
    schema = {
        "type": "object",
        "properties": {
            "a/b": {"type": "string", "pattern": "x", "maxLength": 3},
            "c": {"enum": ["x"], "description": "y"},
            "d": {"type": ["string", "null"], "format": "date"},  # is written as JSON
            "e": {"type": "array", "items": {"type": "string", "minLength": 1}},
            "f": {"anyOf": [{"const": "x"}, {"type": "string", "minLength": 3}]},
            "g": True,
        },
        "minProperties": 1,
        "required": ["a/b", "z"],
    }  # fmt: skip
    assert [pointer for _, pointer in problems_of(tool_formats.QWEN3_CODER, schema)] == [
        "/minProperties", "/required", "/properties/a~1b/pattern", "/properties/a~1b/maxLength", "/properties/f/anyOf",
    ]  # fmt: skip
    assert problems_of(tool_formats.HERMES, schema) == []


@pytest.mark.parametrize("name", ["a>b", "<a", "a\nb", ""])
def test_a_name_that_no_tag_can_hold_is_refused(name: str) -> None:
    schema = {"type": "object", "properties": {name: {}}}
    with pytest.raises(InvalidRequest, match=re.escape(repr(name))):
        problems_of(tool_formats.QWEN3_CODER, schema)
    assert problems_of(tool_formats.HERMES, schema) == []


def test_as_many_tools_as_are_accepted_make_one_grammar(matched: LLTokenizer) -> None:
    tools = [
        {"type": "function", "function": {"name": f"tool_{i}", "parameters": SCHEMA, "strict": True}}
        for i in range(MAX_TOOLS)
    ]
    use = tool_use(tools, "required", None)
    assert use is not None
    constraint = constraint_of(output_of(tool_formats.HERMES), use)
    assert len(constraint.text) > MAX_TEXT
    assert not LLMatcher(matched, grammar_of(constraint), limits=LIMITS).get_error()


def test_tags_that_are_special_tokens_are_written_as_such() -> None:
    form = tool_formats.MISTRAL_NAMED
    tags = frozenset({"[TOOL_CALLS]", "[ARGS]"})
    output = OutputFormat(tools=form, reasoning=None, template_has_tools=True, special_tags=tags, dropped=())
    ids = {"[TOOL_CALLS]": 9, "[ARGS]": 32}
    constraint = constraint_of(output, use_of("required", False), token_id=ids.__getitem__)
    lines = constraint.text.splitlines()
    assert lines[1].split() == ["start:", "<[9]>", "named"]
    assert lines[-1] == 'named: ("weather" <[32]> arguments_0 | "now" <[32]> arguments_1) '


def test_an_answer_without_a_call_fits_the_schema_that_was_asked_for(file: str, matched: LLTokenizer) -> None:
    content = Constraint(kind="json_schema", text='{"type": "object", "properties": {"a": {"const": 1}}}')
    accepts = Accepts(file, matched, tool_formats.HERMES, use_of("auto"), content=content)
    call = whole(tool_formats.HERMES, "weather")
    assert accepts('{"a": 1}')
    assert accepts(call)
    for text in ("text", '{"a": 2}', f'{{"a": 1}}{call}', call.replace("city", "town")):
        assert not accepts(text)
    only_calls = Accepts(file, matched, tool_formats.HERMES, use_of("required"), content=content)
    assert only_calls(call)
    assert not only_calls('{"a": 1}')


def test_a_form_of_answers_that_is_no_schema_does_not_go_with_tools() -> None:
    content = Constraint(kind="regex", text="a+")
    with pytest.raises(InvalidRequest, match="go together with a JSON schema"):
        constraint_of(output_of(tool_formats.HERMES), use_of("auto"), content=content)


@pytest.mark.parametrize(
    ("tools", "choice", "parallel", "constrained"),
    [
        (TOOLS, "auto", None, True),
        (TOOLS[1:], "auto", None, False),
        (TOOLS[1:], "auto", False, True),
        (TOOLS[1:], "required", None, True),
    ],
)
def test_what_asks_for_nothing_is_not_constrained(
    tools: list[Any], choice: str, parallel: bool | None, constrained: bool
) -> None:
    use = tool_use(tools, choice, parallel)
    assert use is not None
    assert is_constrained(use) is constrained


def test_a_model_without_a_known_form_of_calls_refuses_to_be_made_to_call() -> None:
    with pytest.raises(InvalidRequest, match="this model's form of tool calls is not known"):
        constraint_of(output_of(None), use_of("required"))


def tool(name: str = "f", **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def test_absent_fields_mean_that_any_tools_may_be_called() -> None:
    use = tool_use([tool(description="d"), tool("g", strict=True)], None, None)
    assert use is not None
    assert (use.choice, use.parallel, use.must_call) == ("auto", True, False)
    assert [each.name for each in use.callable_tools] == ["f", "g"]
    assert [each.strict for each in use.tools] == [False, True]


def test_a_named_tool_is_the_only_one_and_is_called_once() -> None:
    use = tool_use([tool(), tool("g")], named("g"), True)
    assert use is not None
    assert (use.must_call, use.parallel, [each.name for each in use.callable_tools]) == (True, False, ["g"])


@pytest.mark.parametrize(("tools", "choice"), [(None, None), ([], "auto"), ([tool()], "none"), (None, "none")])
def test_where_no_tool_may_be_called_there_is_no_use(tools: Any, choice: Any) -> None:
    assert tool_use(tools, choice, None) is None


def test_what_the_model_sees_has_no_strict_and_always_a_schema() -> None:
    use = tool_use([tool(strict=True)], None, None)
    assert use is not None
    [shown] = [each.body for each in use.tools]
    assert shown == tool(parameters={"type": "object", "properties": {}})


@pytest.mark.parametrize(
    ("tools", "choice", "param"),
    [
        ([tool(), tool('a"b')], None, "tools[1].function.name"),
        ([tool("a\nb")], None, "tools[0].function.name"),
        ([tool("f\n")], None, "tools[0].function.name"),
        ([tool("")], "none", "tools[0].function.name"),
        ([tool("a" * 65)], None, "tools[0].function.name"),
        ([tool(), tool("g"), tool()], None, "tools[2].function.name"),
        ([{"type": "custom", "custom": {}}], None, "tools[0]"),
        ([{"type": "function"}], None, "tools[0]"),
        ([tool(parameters=[])], None, "tools[0].function.parameters"),
        ([tool(parameters={"type": "array"})], None, "tools[0].function.parameters.type"),
        ([tool(description=5)], None, "tools[0].function.description"),
        ([tool(strict="yes")], None, "tools[0].function.strict"),
        ([tool()] * (MAX_TOOLS + 1), None, "tools"),
        ([tool()], named("g"), "tool_choice"),
        ([tool()], "any", "tool_choice"),
        ([tool()], {"type": "function"}, "tool_choice"),
        (None, "required", "tool_choice"),
        ([], "required", "tool_choice"),
        (None, named("f"), "tool_choice"),
    ],
)
def test_what_is_wrong_is_refused_by_its_place(tools: Any, choice: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        tool_use(tools, choice, None)
    assert caught.value.param == param
    assert str(caught.value).startswith(f"{param}: ")
