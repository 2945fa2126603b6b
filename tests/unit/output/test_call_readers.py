"""Tool calls in recorded and made outputs of each format: what is a call, what is text, and what a cut one gives."""

import pytest

from tests.unit.output.outputs import Short, calls_of

DS_ALL, DS_ONE, DS_SEP = "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"
DS_ONE_END, DS_ALL_END = "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"

EXAMPLES: list[tuple[str, str, list[Short]]] = [
    # hermes: Qwen2.5 and Hermes 2 Pro
    ("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', [("f", '{"a": 1}')]),
    ("hermes", 'I look.\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>', ["I look.\n", ("f", "{}")]),
    (
        "hermes",
        '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n'
        '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>\n',
        [("f", "{}"), ("g", "{}")],
    ),
    ("hermes", '<tool_call>{"arguments":{"a":1},"name":"f"}</tool_call> Done.', [("f", '{"a":1}'), " Done."]),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"search_request": {"query": {"text": "x"}}}}</tool_call>',
        [("f", '{"search_request": {"query": {"text": "x"}}}')],
    ),
    (
        "hermes",
        '<tool_call>{"name": "bash", "arguments": {"cmd": "for i in ${A[@]}; do echo \\"}{\\" </tool_call>; done"}}'
        "</tool_call>",
        [("bash", '{"cmd": "for i in ${A[@]}; do echo \\"}{\\" </tool_call>; done"}')],
    ),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"s": "caf\\u00e9 \\ud83d\\ude00 \\\\"}}</tool_call>',
        [("f", '{"s": "caf\\u00e9 \\ud83d\\ude00 \\\\"}')],
    ),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"s": "\ufffd"}}</tool_call>', [("f", '{"s": "\ufffd"}')]),
    ("hermes", '<tool_call>{"name": "na\\u0131f", "arguments": {}}</tool_call>', [("naıf", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', [("f", '"{\\"a\\": 1}"')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', [("f", "null")]),
    ("hermes", '<tool_call>{"name": "f", "arguments":  }</tool_call>', [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', [("f", "{}")]),
    ("hermes", '<tool_call>{"id": {"name": "x"}, "name": "f", "arguments": {}}</tool_call>', [("f", "{}")]),
    # hermes: cut, and not what the format has
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": [1, "x', [("f", '{"a": [1, "x')]),
    ("hermes", '<tool_call>{"name": "f", "argu', [("f", "")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}}\n</tool_c', [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}}\n</tool_c!', [("f", "{}"), "\n</tool_c!"]),
    ("hermes", '<tool_call>{"name": "f', ['<tool_call>{"name": "f']),
    ("hermes", '<tool_call>{"arguments": {"a": 1}', ['<tool_call>{"arguments": {"a": 1}']),
    ("hermes", "<tool_call>", ["<tool_call>"]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>!', [("f", '{"a": 1}'), "!"]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": {}</tool_call>!', [("f", '{"a": {}'), "!"]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}}}</tool_call>', [("f", "{}"), "}"]),
    ("hermes", "<tool_call>f(1)</tool_call>", ["<tool_call>f(1)</tool_call>"]),
    ("hermes", '<tool_call>{"name": 1}</tool_call>', ['<tool_call>{"name": 1}</tool_call>']),
    ("hermes", '<tool_call>{"name": "\\ud800"}</tool_call>', ['<tool_call>{"name": "\\ud800"}</tool_call>']),
    ("hermes", '<tool_call><tool_call>{"name": "f"}</tool_call>', ["<tool_call>", ("f", "{}")]),
    ("hermes", "a < b <tool <tool_cal", ["a < b <tool <tool_cal"]),
    ("hermes", '{"name": "f", "arguments": {}}', ['{"name": "f", "arguments": {}}']),
    ("hermes", " \n ", [" \n "]),
    ("hermes", "", []),
    # llama3_json
    ("llama3_json", '{"name": "f", "parameters": {"a": 1}}', [("f", '{"a": 1}')]),
    ("llama3_json", '\n\n{"type": "function", "name": "f", "parameters": {"a": "1"}}', [("f", '{"a": "1"}')]),
    ("llama3_json", '<|python_tag|>{"name": "f", "parameters": {}}', [("f", "{}")]),
    ("llama3_json", 'So: <|python_tag|>{"name": "f"}', ["So: ", ("f", "{}")]),
    (
        "llama3_json",
        '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}};{"name": "h", "parameters": {}}\n',
        [("f", "{}"), ("g", "{}"), ("h", "{}")],
    ),
    ("llama3_json", '{"name": "f", "parameters": {}} is it.', [("f", "{}"), " is it."]),
    ("llama3_json", '{"parameters": {"a": 1}, "name": "f"}', [("f", '{"a": 1}')]),
    ("llama3_json", '{"name": "Bob", "age": 3}', ['{"name": "Bob", "age": 3}']),
    ("llama3_json", '{"name": "Bob"}', ['{"name": "Bob"}']),
    ("llama3_json", '{"name": "f", "par', ['{"name": "f", "par']),
    ("llama3_json", "{x}", ["{x}"]),
    ("llama3_json", 'Use {"name": "f", "parameters": {}}', ['Use {"name": "f", "parameters": {}}']),
    # mistral, both forms
    ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}]', [("f", '{"a": 1}')]),
    (
        "mistral",
        'Hm. [TOOL_CALLS] [{"name": "f", "arguments": {}, "id": "123456789"}, {"arguments": {}, "name": "g"}] ok',
        ["Hm. ", ("f", "{}"), ("g", "{}"), " ok"],
    ),
    ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {"a": [[', [("f", '{"a": [[')]),
    ("mistral", "[TOOL_CALLS][]", ["[TOOL_CALLS][]"]),
    ("mistral", "[TOOL_CALLS] means calls", ["[TOOL_CALLS] means calls"]),
    ("mistral", '[TOOL_CALLS]{"name": "f", "arguments": {}}', [("f", "{}")]),
    ("mistral_named", '[TOOL_CALLS]f[ARGS]{"a": "[TOOL_CALLS]"}', [("f", '{"a": "[TOOL_CALLS]"}')]),
    ("mistral_named", '[TOOL_CALLS]f[ARGS]{}[TOOL_CALLS]g[ARGS]{"b": 2}', [("f", "{}"), ("g", '{"b": 2}')]),
    ("mistral_named", '[TOOL_CALLS]f[CALL_ID]a1[ARGS]{"a": 1}', [("f", '{"a": 1}')]),
    ("mistral_named", '[TOOL_CALLS]f{"a": 1}', [("f", '{"a": 1}')]),
    ("mistral_named", "[TOOL_CALLS]f[ARGS] [TOOL_CALLS]g[ARGS]{}", [("f", "{}"), ("g", "{}")]),
    ("mistral_named", '[TOOL_CALLS]f[ARGS]{"a": "', [("f", '{"a": "')]),
    ("mistral_named", "[TOOL_CALLS]f[ARG", ["[TOOL_CALLS]f[ARG"]),
    ("mistral_named", "[TOOL_CALLS]f[INST]{}", ["[TOOL_CALLS]f[INST]{}"]),
    # qwen3_coder
    (
        "qwen3_coder",
        'I see.\n<tool_call>\n<function=f>\n<parameter=s>\nif a < b:\n  print("x")\n</parameter>\n'
        "<parameter=i>\n7\n</parameter>\n"
        "</function>\n</tool_call>",
        ["I see.\n", ("f", '{"s": "if a < b:\\n  print(\\"x\\")", "i": 7}')],
    ),
    (
        "qwen3_coder",
        "<tool_call>\n<function=f>\n</function>\n</tool_call>\n<tool_call>\n<function=g>\n<parameter=x>\n1\n</parameter>\n</function>\n"
        "</tool_call> ok",
        [("f", "{}"), ("g", '{"x": "1"}'), " ok"],
    ),
    ("qwen3_coder", "<function=f><parameter=b>True</parameter></function>", [("f", '{"b": true}')]),
    ("qwen3_coder", "<function=f><parameter=s>\n\n\n</parameter></function>", [("f", '{"s": "\\n"}')]),
    ("qwen3_coder", "<function=f><parameter=s></parameter></function>", [("f", '{"s": ""}')]),
    (
        "qwen3_coder",
        "<function=f><parameter=s><function=x></function></tool_call></parameter></function>",
        [("f", '{"s": "<function=x></function></tool_call>"}')],
    ),
    ("qwen3_coder", "<tool_call><function=f><parameter=s>\nab", [("f", '{"s": "ab')]),
    ("qwen3_coder", "<tool_call><function=f><parameter=n>\n12", [("f", '{"n": 12')]),
    ("qwen3_coder", "<tool_call><function=f>", [("f", "{")]),
    ("qwen3_coder", "<tool_call><function=f", ["<tool_call><function=f"]),
    ("qwen3_coder", "<tool_call><function=f></tool_call>", [("f", "{}")]),
    ("qwen3_coder", "<tool_call><function=f><function=g></function>", [("f", "{}"), ("g", "{}")]),
    (
        "qwen3_coder",
        "<function=f><parameter=s>a</parameter><parameter x><parameter=i>1</parameter></function>",
        [("f", '{"s": "a", "i": 1}'), "<parameter x>"],
    ),
    (
        "qwen3_coder",
        '<function=f><parameter=a>\n["</parameter>"]\n</parameter><parameter=m>\n"a\n</parameter></function>',
        [("f", '{"a": ["</parameter>"], "m": "\\"a"}')],
    ),
    ("qwen3_coder", "<function=f><parameter=first name>a b</parameter>", [("f", '{"first name": "a b"')]),
    ("qwen3_coder", "<function=f><parameter=a\n>b</parameter>", [("f", "{"), "<parameter=a\n>b</parameter>"]),
    ("qwen3_coder", "<tool_call>f</tool_call>", ["<tool_call>f</tool_call>"]),
    ("qwen3_coder", " <tool_call>", [" <tool_call>"]),
    # deepseek v3 and v3.1
    (
        "deepseek_v3",
        f'Yes.{DS_ALL}{DS_ONE}function{DS_SEP}f\n```json\n{{"a": "```"}}\n```{DS_ONE_END}\n'
        f"{DS_ONE}function{DS_SEP}g\n```json\n{{}}\n```{DS_ONE_END}{DS_ALL_END}",
        ["Yes.", ("f", '{"a": "```"}'), ("g", "{}")],
    ),
    ("deepseek_v3", f"{DS_ALL}{DS_ONE}function{DS_SEP}f\n```json\n\n```{DS_ONE_END}{DS_ALL_END}", [("f", "{}")]),
    ("deepseek_v3", f'{DS_ALL}{DS_ONE}function{DS_SEP}f\n```json\n{{"a', [("f", '{"a')]),
    ("deepseek_v3", f"{DS_ALL}{DS_ONE}function{DS_SEP}f\n```js", [f"{DS_ALL}{DS_ONE}function{DS_SEP}f\n```js"]),
    (
        "deepseek_v31",
        f'{DS_ALL}{DS_ONE}f{DS_SEP}{{"a": 1}}{DS_ONE_END}{DS_ONE}g{DS_SEP}{DS_ONE_END}{DS_ALL_END} So ```x```',
        [("f", '{"a": 1}'), ("g", "{}"), " So ```x```"],
    ),
    ("deepseek_v31", f"{DS_ALL}nothing", [f"{DS_ALL}nothing"]),
    ("deepseek_v31", "```json\n{}\n```", ["```json\n{}\n```"]),
]


@pytest.mark.parametrize(("name", "text", "parts"), EXAMPLES)
def test_an_output_is_read_as_text_and_calls_whole_and_by_character(name: str, text: str, parts: list[Short]) -> None:
    assert calls_of(name, text) == parts
    assert calls_of(name, *text) == parts
