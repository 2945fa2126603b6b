"""The formats that are found in a chat template, or set; and what a reader of them needs."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from deployments.output.call_readers import as_json
from deployments.output.output_format import OutputFormat, Thought, names_tools
from deployments.output.reasoning import REASONING_FORMATS, THINK
from deployments.output.tool_formats import TOOL_FORMATS
from deployments.output.tools import value_types
from tests.unit.output.outputs import FORMATS, read

# the lines of the models' own templates that write a call
QWEN = """{%- if tools %}{{- '<tools>' }}{%- for tool in tools %}{{- tool | tojson }}{%- endfor %}
{{- "<tool_call>\\n{\\"name\\": <function-name>, \\"arguments\\": <args-json-object>}\\n</tool_call>" }}{%- endif %}"""
QWEN3 = QWEN + """{%- set content = message.content.split('</think>')[-1] %}"""
LLAMA = """{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{{- "<|python_tag|>" + tool_call.name + ".call(" }}
{{- '{"name": "' + tool_call.name + '", ' }}{{- '"parameters": ' }}"""
MISTRAL = """{%- if tools is not none %}{{- "[AVAILABLE_TOOLS] [" }}{%- endif %}{{- "[TOOL_CALLS] [" }}"""
SMALL = """{{- "[AVAILABLE_TOOLS]" + (tools | tojson) }}{{- "[TOOL_CALLS]" + name + "[ARGS]" + arguments }}"""
CODER = """{%- for tool in tools %}{%- endfor %}{{- '\\n<tool_call>\\n<function=' + tool_call.name + '>\\n' }}
{{- '<parameter=' + args_name + '>\\n' }}"""
DEEPSEEK = """{{- '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' }}
{{ '\\n' + '```json' + '\\n' }}"""
DEEPSEEK_31 = """{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>'+ name + '<｜tool▁sep｜>' + arguments}}
{{'<think>'}}{{'</think>'}}"""
GLM = """{% if tools %}{% endif %}{{ '<tool_call>' + name }}<arg_key>{{ k }}</arg_key>{{ arguments }}"""
HARMONY = """{%- if tools %}{{- "# Tools" }}{%- endif %}
{{- "<|start|>assistant<|channel|>analysis<|message|>" + thinking + "<|end|>" }}
{{- "<|start|>assistant to=functions." + name + "<|channel|>commentary json<|message|>" + arguments + "<|call|>" }}
{{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|end|>" }}"""
SMOL = """{% for message in messages %}{{'<|im_start|>' + message['role'] + message['content']}}{% endfor %}"""


def tokenizer(template: str | None, *special: str) -> Any:
    texts = dict(enumerate(special))
    source = SimpleNamespace(before_answers=(), source=lambda with_tools=False: template)
    return SimpleNamespace(template=source, special_ids=frozenset(texts), token_text=texts.__getitem__)


TEMPLATES: list[tuple[str | None, str | None, str | None, bool]] = [  # how it calls, how it reasons, has it tools
    (QWEN, "hermes", None, True),
    (QWEN3, "hermes", "think", True),
    (LLAMA, "llama3_json", None, True),
    (MISTRAL, "mistral", None, True),
    (SMALL, "mistral_named", None, True),
    (CODER, "qwen3_coder", None, True),
    (DEEPSEEK, "deepseek_v3", None, False),
    (DEEPSEEK_31, "deepseek_v31", "think", False),
    (SMOL, "hermes", None, False),
    (GLM, None, None, True),
    (HARMONY, None, "harmony", True),
    ("{{ '<|assistant|>' + message.content + '<|end|>' }}", "hermes", None, False),  # Phi 3's end is harmony's
    (None, None, None, False),
]


@pytest.mark.parametrize(("template", "tools", "reasoning", "has_tools"), TEMPLATES)
def test_formats_are_found_in_the_chat_template(
    template: str | None, tools: str | None, reasoning: str | None, has_tools: bool
) -> None:
    found = OutputFormat.of(tokenizer(template))
    assert found.tools == (FORMATS[tools] if tools else None)
    assert found.reasoning == (REASONING_FORMATS[reasoning] if reasoning else None)
    assert found.template_has_tools == has_tools


def test_every_entry_of_the_tables_has_a_template_here_and_is_read_by_these_tests() -> None:
    """A new format lacks what this test names."""
    assert {form for forms in TOOL_FORMATS.values() for form in forms} == {*FORMATS.values()}  # a constant each
    assert {tools for _, tools, _, _ in TEMPLATES} - {None} == {*FORMATS}
    assert {reasoning for _, _, reasoning, _ in TEMPLATES} - {None} == {*REASONING_FORMATS}


def test_settings_win_over_the_template() -> None:
    found = OutputFormat.of(tokenizer(QWEN3), tool_format="mistral", reasoning_format="none")
    assert (found.tools, found.reasoning, thought_in(found, "assistant\n")) == (FORMATS["mistral"], None, Thought())
    found = OutputFormat.of(tokenizer(SMOL), tool_format="none", reasoning_format="think")
    assert (found.tools, found.reasoning, thought_in(found, "assistant\n")) == (None, THINK, MAY_THINK)


@pytest.mark.parametrize(
    ("template", "names"),
    [
        ("{% if tools %}", True),
        ("{{ tools | tojson }}", True),
        ("{%- for tool in tools -%}", True),
        ("a list of tools {{ 'with tools' }} {{ message.tools }} {{ tools_given }}", False),
    ],
)
def test_a_template_has_tools_if_it_uses_the_variable(template: str, names: bool) -> None:
    assert names_tools(template) == names


def thought_in(found: OutputFormat, prompt: str, *, continues: bool = False) -> Thought:
    return found.thought(lambda length: prompt[-length:], len(prompt), continues=continues)


MAY_THINK, THINKS = Thought(after="</think>", opens="<think>"), Thought(is_open=True, after="</think>")
ME = "<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("turn", "continued", "meant"),
    [
        (f"{ME}", "", MAY_THINK),
        (f"{ME}<think>\n", "", THINKS),
        (f"{ME}<think>\n\n</think>\n\n", "", Thought()),
        (f"{ME}</think>", "", Thought()),
        # a client's own words, in its question and in an earlier turn
        (f"</think>, what is it?{ME}", "", MAY_THINK),
        (f"\n<think>{ME}", "", MAY_THINK),
        (f"{ME}<think>\nHm{ME}", "", MAY_THINK),
        # a turn that goes on: inside its thought, behind it, and in an answer without one
        (ME, "<think>\nThe user wants", THINKS),
        (f"{ME}<think>\n", "The user wants", THINKS),
        (ME, "<think>\n" + "long " * 400, THINKS),
        (ME, "<think>\nHm.\n</think>\n\nIt is", Thought()),
        (ME, "<think>\nHm.\n</think>\n\n", Thought()),
        (ME, "<think>a</think><think>b", THINKS),
        (ME, "It is", Thought()),
        (ME, "A thought begins with <think> and", Thought()),
        (ME, "", MAY_THINK),
        # results of a tool, behind which this template writes no beginning of a turn
        ("<|im_end|>\n<|im_start|>assistant\n<think>a</think>call<result>\n<think>x<|results_end|>", "", MAY_THINK),
    ],
)
def test_a_thought_is_open_where_the_last_tag_of_the_open_turn_begins_one(
    turn: str, continued: str, meant: Thought
) -> None:
    found = replace(OutputFormat.of(tokenizer(QWEN3)), before_answers=(f"{ME}<think>\n", "<|results_end|>"))
    assert thought_in(found, f"<|im_start|>user\nHi{turn}{continued}", continues=bool(continued)) == meant
    assert thought_in(OutputFormat.of(tokenizer(QWEN)), f"Hi{turn}") == Thought()
    if not continued:  # nothing is known of how a turn begins: the prompt's end tells
        bare = OutputFormat.of(tokenizer(QWEN3))
        assert thought_in(bare, f"Hi{turn}") == meant


def test_tags_that_are_special_tokens_must_stay_and_other_special_tokens_are_left_out_by_the_reader() -> None:
    found = OutputFormat.of(tokenizer(SMALL, "[TOOL_CALLS]", "[ARGS]", "</s>", "[INST]", ""))
    assert found.needs_special
    assert found.special_tags == {"[TOOL_CALLS]", "[ARGS]"}
    text = 'Hm.[INST][TOOL_CALLS]f[ARGS]{"a": 1}</s>'
    for pieces in ([text], text):
        assert read(found.reader(schemas={}), pieces) == ["Hm.", ("f", '{"a": 1}')]
        assert read(found.reader(schemas=None), pieces) == ['Hm.[TOOL_CALLS]f[ARGS]{"a": 1}']
    found = OutputFormat.of(tokenizer(QWEN, "<|im_end|>"))  # its tags are tokens, but not special ones
    assert (found.needs_special, found.dropped) == (False, ())


@pytest.mark.parametrize(
    ("schema", "text", "written"),
    [
        ({"type": "string"}, "5", '"5"'),
        ({"type": "integer"}, " 5\n", "5"),
        ({"type": "integer"}, "5.5", "5.5"),
        ({"type": "integer"}, "five", '"five"'),
        ({"type": "number"}, "NaN", '"NaN"'),
        ({"type": "number"}, "9" * 5000, f'"{"9" * 5000}"'),
        ({"type": "boolean"}, "True", "true"),
        ({"type": "boolean"}, "yes", '"yes"'),
        ({"type": ["string", "null"]}, "None", "null"),
        ({"type": ["string", "null"]}, "none", '"none"'),
        ({"type": ["string", "null"]}, "5", '"5"'),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "5", "5"),
        ({"type": "array"}, '["a",  1]', '["a",  1]'),
        ({"type": "array"}, "['a']", "\"['a']\""),
        ({"type": "array"}, "[" * 100_000, f'"{"[" * 100_000}"'),
        ({"enum": ["a", 1]}, "1", "1"),
        ({"const": "1"}, "1", '"1"'),
        ({"$ref": "#/$defs/x"}, '{"a": 1}', '{"a": 1}'),
        ({"$ref": "#/$defs/x"}, "red", '"red"'),
        ({}, '"a"', '"a"'),
        ({"type": ["string", "null"]}, '"a"', '"a"'),  # as a grammar has it; only pure text has no quotes
        ({"type": "string"}, '"a"', '"\\"a\\""'),
        (None, "1", '"1"'),
        (True, "1", '"1"'),
        ({"type": {}}, "1", "1"),
        ({"anyOf": 5}, "1", "1"),
    ],
)
def test_a_tagged_parameter_is_json_of_a_type_that_its_schema_has_or_a_string(
    schema: Any, text: str, written: str
) -> None:
    assert as_json(text, value_types(schema)) == written
