"""Prompts are those of Transformers for the shape that a template wants: 40 templates, written here, and all messages.

The shape is said here, by hand; the product finds it out by trying. ``ROLES`` of a template: what each role's content
is given as; one that is missing is refused (``-``: Transformers would leave it out without a word).
"""

# ruff: noqa: E501  # a template is a line
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2
import pytest
from transformers import PreTrainedTokenizerFast

from deployments.output.output_format import OutputFormat
from deployments.output.prompting import ChatPrompting
from deployments.output.tools import tool_use
from replicas.errors import InvalidConfig, InvalidRequest
from replicas.text.tokenizer import Tokenizer
from tests.unit.tokenizer_folders import byte_level_folder

EACH = "{% for m in messages %}"
GO = "{% endfor %}{% if add_generation_prompt %}"
ME = "<|start|>assistant\n{% endif %}"
TEXTS = "{% for c in m.content if c.type == 'text' %}{{ c.text }}{% endfor %}"
PICKED = "{% for c in m.content | selectattr('type', 'equalto', 'text') %}{{ c.text }}{% endfor %}"
BOTH = "{% if m.content is string %}{{ m.content }}{% else %}" + TEXTS + "{% endif %}"
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
TURNS = "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('turns') }}{% endif %}"
CALLS = (
    '{% for t in m.tool_calls or [] %}<tool_call>\n{"name": "{{ t.function.name }}", "arguments": ARGS}\n</tool_call>'
    "{% endfor %}"
)
AS_JSON, AS_TEXT = (
    CALLS.replace("ARGS", "{{ t.function.arguments | tojson }}"),
    CALLS.replace("ARGS", "{{ t.function.arguments }}"),
)
TOOLS = "{% if tools %}<tools>{% for t in tools %}{{ t | tojson }}{% endfor %}</tools>{% endif %}"
TEXT, PARTS, EITHER = "text", "parts", "either"


def roles(shape: str = TEXT, **others: str | None) -> dict[str, str | None]:
    return {**dict.fromkeys(("system", "user", "assistant", "tool"), shape), **others}


def turns(content: str, begin: str = "<|start|>{{ m.role }}\n", end: str = "<|end|>\n", me: str = ME) -> str:
    return EACH + begin + content + end + GO + me


LLAMA_2 = (
    "{% if messages[0].role == 'system' %}{% set s = '<<SYS>>\n' ~ messages[0].content ~ '\n<</SYS>>\n\n' %}"
    "{% set messages = messages[1:] %}{% else %}{% set s = '' %}{% endif %}{% for m in messages %}"
    "{% if m.role == 'user' %}[INST] {{ (s if loop.first else '') ~ m.content.strip() }} [/INST]"
    "{% else %} {{ m.content.strip() }}<|end|>{% endif %}{% endfor %}"
)
MISTRAL = (
    "{% for m in messages %}{% if m.role == 'user' %}{% if tools and loop.last %}[AVAILABLE_TOOLS]{{ tools | tojson }}{% endif %}"
    "[INST]{{ m.content }}[/INST]{% elif m.role == 'tool' %}{% if m.tool_call_id | length != 9 %}{{ raise_exception('nine') }}"
    "{% endif %}[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]{% elif m.role == 'system' %}{{ m.content }}\n\n{% elif m.tool_calls %}"
    "[TOOL_CALLS] [{% for t in m.tool_calls %}{{ t.function | tojson }}{% endfor %}]{% else %}{{ m.content }}<|end|>{% endif %}{% endfor %}"
)
R1 = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% elif m.role == 'user' %}<U>{{ m.content }}"
    "{% elif m.role == 'assistant' %}<A>{{ m.content.split('</think>')[-1] }}<|end|>{% endif %}"
    + GO
    + "<A><think>\n{% endif %}"
)
QWEN_3 = (
    TOOLS + EACH + "<|start|>{{ 'user' if m.role == 'tool' else m.role }}\n{% if m.role == 'assistant' and '</think>' in m.content %}"
    "{{ m.content.split('</think>')[-1].lstrip('\n') }}{% else %}{{ m.content }}{% endif %}" + AS_JSON + "<|end|>\n" + GO
    + "<|start|>assistant\n{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)  # fmt: skip
COMMAND = {
    "default": turns("{{ m.content }}", "<|start|>{{ m.role | upper }}:"),
    "tool_use": TOOLS + turns("{{ m.content }}" + AS_JSON, "<|start|>{{ m.role | upper }}:"),
    "rag": "{{ documents }}",
}
# name: (template, in which shape it wants each role's content, how it wants arguments if it takes tools)
CASES: dict[str, tuple[str | Mapping[str, str], dict[str, str | None], str | None]] = {
    "chatml": (turns("{{ m.content }}"), roles(), None),
    "chatml trimmed": (turns("{{ m.content | trim }}"), roles(), None),
    "chatml joined": (EACH + "{{ '<|start|>' + m['role'] + '\n' + m['content'] + '<|end|>' }}" + GO + ME, roles(), None),
    "chatml default system": ("{% if messages[0].role != 'system' %}Be kind.{% endif %}" + turns("{{ m.content }}"), roles(), None),
    "llama 2": (LLAMA_2, roles(), None),
    "llama 3": (turns("{{ m.content | trim }}", "<|start|>{{ m.role }}<|end|>\n\n"), roles(), None),
    "llama 3.1": (TOOLS + turns("{{ m.content | trim }}" + AS_JSON), roles(), "json"),
    "llama 3.2 vision": (
        "{% if messages[0].role == 'system' %}S:{{ messages[0].content }}{% set messages = messages[1:] %}{% endif %}" + turns(BOTH),
        roles(EITHER, system=TEXT), None,
    ),
    "mistral": (MISTRAL, roles(), "json"),
    "mistral no system": (NO_SYSTEM + TURNS + "[INST]{{ m.content }}[/INST]{% endfor %}", roles(system=None), None),
    "gemma": (NO_SYSTEM + TURNS + "<start>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<end>\n" + GO + "<start>model\n{% endif %}", roles(system=None), None),
    "gemma 3": (NO_SYSTEM + TURNS + "<start>{{ m.role }}\n" + BOTH + "<end>" + GO + "<start>model\n{% endif %}", roles(EITHER, system=None), None),
    "phi 3": (EACH + "{% if m.role == 'user' %}<|user|>\n{{ m.content }}<|end|>\n<|assistant|>\n{% elif m.role == 'assistant' %}{{ m.content }}<|end|>\n{% endif %}{% endfor %}", roles(system="-"), None),
    "phi 4": (turns("{{ m.content }}", "<|start|>{{ m.role }}<|sep|>", "<|end|>", "<|start|>assistant<|sep|>{% endif %}"), roles(), None),
    "qwen 2.5": (TOOLS + turns("{{ m.content }}" + AS_JSON), roles(), "json"),
    "qwen 3": (QWEN_3, roles(), "json"),
    "qwen 2 vl": (turns(BOTH), roles(EITHER), None),
    "deepseek r1": (R1, roles(), None),
    "deepseek v2": (EACH + "{% if m.role == 'assistant' %}Assistant: {{ m.content }}<|end|>{% elif m.role == 'user' %}User: {{ m.content }}\n\n{% else %}{{ m.content }}\n\n{% endif %}" + GO + "Assistant:{% endif %}", roles(), None),
    "hermes 3": ({"default": turns("{{ m.content }}"), "tool_use": TOOLS + turns("{{ m.content }}" + AS_JSON)}, roles(), "json"),
    "command r": (COMMAND, roles(), "json"),
    "only named with text calls": ({"default": turns("{{ m.content }}"), "tool_use": TOOLS + turns("{{ m.content }}" + AS_TEXT)}, roles(), "string"),
    "calls as text": (TOOLS + turns("{{ m.content }}" + AS_TEXT), roles(), "string"),
    "tools in parts": (TOOLS + turns(TEXTS + AS_JSON), roles(PARTS), "json"),
    "vision picked": (turns(PICKED), roles(PARTS), None),
    "vision walked": (turns(TEXTS), roles(PARTS), None),
    "vision first": (turns("{{ m.content[0].text }}"), roles(PARTS), None),
    "vision mapped": (turns("{{ m.content | map(attribute='text') | join }}"), roles(PARTS), None),
    "vision subscript": (EACH + "{% for c in m['content'] %}{% if c['type'] == 'text' %}{{ '<|start|>' + c['text'] }}{% endif %}{% endfor %}" + GO + ME, roles(PARTS), None),
    "users walked": (EACH + "{% if m.role == 'user' %}" + TEXTS + "{% else %}{{ m.content }}{% endif %}" + GO + ME, roles(TEXT, user=PARTS), None),
    "assistants walked": (EACH + "{% if m.role != 'user' %}" + TEXTS + "{% else %}{{ m.content }}{% endif %}" + GO + ME, roles(PARTS, user=TEXT), None),
    "mapping or text": (turns("{% if m.content is iterable and m.content is not string %}" + TEXTS + "{% else %}{{ m.content }}{% endif %}"), roles(EITHER), None),
    "quoted": (turns('"{{ m.content }}"'), roles(), None),
    "escaped": (turns("{{ m.content | tojson }}"), roles(), None),
    "alpaca": (EACH + "{% if m.role == 'user' %}### Instruction:\n{{ m.content }}\n\n{% elif m.role == 'assistant' %}### Response:\n{{ m.content }}\n\n{% else %}{{ m.content }}\n{% endif %}" + GO + "### Response:\n{% endif %}", roles(), None),
    "vicuna": (EACH + "{% if m.role == 'system' %}{{ m.content }} {% else %}{{ m.role | upper }}: {{ m.content }} {% endif %}" + GO + "ASSISTANT:{% endif %}", roles(), None),
    "zephyr": (EACH + "<|{{ m.role }}|>\n{{ m.content + eos_token }}\n" + GO + "<|assistant|>\n{% endif %}", roles(), None),
    "granite": (TOOLS + turns("{{ m.content }}" + AS_JSON, "<role>{{ m.role }}</role>"), roles(), "json"),
    "olmo": ("{{ eos_token }}" + EACH + "<|{{ m.role }}|>\n{{ m.content }}\n" + GO + "<|assistant|>\n{% endif %}", roles(), None),
    "falcon": (EACH + "{{ m.role | capitalize }}: {{ m.content | replace('\r\n', '\n') }}\n\n" + GO + "Assistant:{% endif %}", roles(), None),
    "open chat": (EACH + "GPT4 Correct {{ m.role | title }}: {{ m.content }}<|end|>" + GO + "GPT4 Correct Assistant:{% endif %}", roles(), None),
    "last alone": ("{{ messages[-1].content }}", roles(system="-"), None),
}  # fmt: skip

TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}},
}
MANY = ["first ", {"type": "text", "text": " second"}]
U, A, S = (
    {"role": role, "content": text} for role, text in (("user", "Hi\n"), ("assistant", "Yes."), ("system", "Be <b>"))
)
CALLED = {"role": "assistant", "content": None, "tool_calls": [
    {"id": "a1b2c3d4e", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
]}  # fmt: skip
RESULT = {"role": "tool", "tool_call_id": "a1b2c3d4e", "name": "f", "content": "30"}
CHATS: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "one": ([U], {}),
    "system": ([S, U], {}),
    "turns": ([U, A, U, A, {"role": "user", "content": "Why?"}], {}),
    "parts": ([{"role": "user", "content": MANY}], {}),
    "system of parts": ([{"role": "system", "content": MANY}, U], {}),
    "thought": ([U, {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nYes."}, U], {}),
    "continued": ([U, {"role": "assistant", "content": "<think>\nThe user"}], {"continue_final_message": True}),
    "continued parts": ([U, {"role": "assistant", "content": ["Yes", " and"]}], {"continue_final_message": True}),
    "no prompt": ([U, A], {"add_generation_prompt": False}),
    "a variable": ([U], {"enable_thinking": False}),
    "tools": ([U], {"tools": [TOOL]}),
    "results": ([U, CALLED, RESULT], {"tools": [TOOL]}),
}


def given(message: Mapping[str, Any], shapes: Mapping[str, str | None], arguments: str | None) -> dict[str, Any]:
    """``message`` as someone who knows the template would give it to Transformers."""
    made, content, shape = dict(message), message["content"], shapes[message["role"]]
    texts = (
        [part if isinstance(part, str) else part["text"] for part in content or []]
        if not isinstance(content, str)
        else [content]
    )
    as_parts = shape == PARTS or (shape == EITHER and isinstance(content, list))
    made["content"] = [{"type": "text", "text": text} for text in texts] if as_parts else "\n".join(texts)
    if "tool_calls" in made and arguments == "json":
        call = made["tool_calls"][0]
        function = {**call["function"], "arguments": json.loads(call["function"]["arguments"])}
        made["tool_calls"] = [{**call, "function": function}]
    return made


def folder(path: Path, template: str | Mapping[str, str]) -> str:
    if isinstance(template, str):
        return byte_level_folder(path, chat_template=template)
    byte_level_folder(path, chat_template=template["default"])
    (path / "additional_chat_templates").mkdir()
    for name, source in template.items():
        if name != "default":
            (path / "additional_chat_templates" / f"{name}.jinja").write_text(source)
    return str(path)


@pytest.mark.parametrize("name", CASES)
def test_prompts_are_those_of_transformers_in_the_shape_that_the_template_wants(name: str, tmp_path: Path) -> None:
    template, shapes, arguments = CASES[name]
    path = folder(tmp_path, template)
    theirs, ours = PreTrainedTokenizerFast.from_pretrained(path), Tokenizer(path)
    prompting = ChatPrompting.of(OutputFormat.of(ours), ours.template, ours.chat_text)
    num_equal = 0
    for chat, (messages, asked) in CHATS.items():
        options = {"add_generation_prompt": not asked.get("continue_final_message"), **asked}
        tools = options.pop("tools", None)
        if tools and arguments is None:
            continue  # they are described in words of our own
        try:
            wanted = theirs.apply_chat_template(
                [given(message, shapes, arguments) for message in messages], tools=tools, return_dict=False, **options
            )
            if any(shapes[message["role"]] == "-" for message in messages):
                wanted = None
        except (jinja2.TemplateError, ValueError, TypeError):
            wanted = None
        prompt = prompting.prompt(messages, tool_use(tools, None, None))
        if wanted is None:
            with pytest.raises(InvalidRequest):
                ours.chat(prompt.messages, tools=prompt.tools, marks=prompt.marks, **options)
            continue
        found = ours.chat(prompt.messages, tools=prompt.tools, marks=prompt.marks, **options)
        assert found.tolist() == wanted, (chat, ours.decode(found, False), theirs.decode(wanted))
        num_equal += 1
    assert num_equal >= 6


@pytest.mark.parametrize(
    ("template", "says"),
    [
        (
            "{% for m in messages %}{{ m.role }}{% endfor %}",
            "leaves out what a user writes, as a text and as text parts",
        ),
        ("{{ messages[0].content[0].image }}", "leaves out what a user writes"),
        ("{% for m in messages %}{{ m.content", "cannot be read: .*line 1"),
        ("{{ messages[0].content | no_such_filter }}", "cannot be read: .*no_such_filter"),
    ],
)
def test_a_template_that_shows_no_text_or_cannot_be_read_is_refused_at_the_start(
    template: str, says: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidConfig, match=f"{tmp_path}: its chat template {says}"):
        Tokenizer(byte_level_folder(tmp_path, chat_template=template))


def test_a_broken_template_for_tools_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="its chat template cannot be read"):
        Tokenizer(folder(tmp_path, {"default": turns("{{ m.content }}"), "tool_use": "{% if tools %}"}))


def test_a_system_message_that_would_be_left_out_is_refused_and_tools_go_to_the_user(tmp_path: Path) -> None:
    tokenizer = Tokenizer(folder(tmp_path, CASES["phi 3"][0]))
    with pytest.raises(InvalidRequest, match=r"messages\[0\]: this model's chat template leaves out system messages"):
        tokenizer.chat([{"role": "developer", "content": "Be kind."}, U])
    for name in ("phi 3", "gemma"):
        tokenizer = Tokenizer(folder(tmp_path / name, CASES[name][0]))
        prompting = ChatPrompting.of(OutputFormat.of(tokenizer), tokenizer.template, tokenizer.chat_text)
        prompt = prompting.prompt([U], tool_use([TOOL], None, None))
        text = tokenizer.chat_text(prompt.messages)
        assert text.index('"name": "f"') < text.index("Hi")
