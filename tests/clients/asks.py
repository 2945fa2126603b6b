"""`python asks.py LIBRARY URL MODEL`, run by the Python of `.tools/clients`: what one client library makes of a server.

Prints one JSON object, an entry for each way of asking. The library's own types have judged what it holds: a document
that does not fit its model has raised here. Every question is greedy, so that ways of asking the same can be compared.
"""

import asyncio
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

CHAT = [{"role": "user", "content": "A customer named Ann wants 3 bolts and 2 nuts today."}]
FRANCE = "What is the capital of France?"  # answered in 8 tokens
LIMIT = 120  # output tokens: a document has at most some 80
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": LIMIT}


class Line(BaseModel):
    """A line of an order."""

    model_config = ConfigDict(extra="forbid")

    part: Literal["bolt", "nut"]
    count: int = Field(ge=1, le=99)


class Order(BaseModel):
    """An order for parts."""

    model_config = ConfigDict(extra="forbid")

    customer: str = Field(max_length=12)
    lines: list[Line] = Field(min_length=1, max_length=2)
    urgent: bool


STOCK: dict[str, Any] = {
    "name": "look_up_stock",
    "description": "How many of a part there are",
    "parameters": {
        "type": "object",
        "properties": {"part": {"type": "string", "enum": ["bolt", "nut"]}, "shelf": {"type": "integer"}},
        "required": ["part", "shelf"],
        "additionalProperties": False,
    },
}
TOOL: dict[str, Any] = {"type": "function", "function": STOCK}


def ask_openai(url: str, model: str) -> dict[str, Any]:
    from openai import OpenAI

    client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)
    chat: dict[str, Any] = {"model": model, "messages": CHAT, **GREEDY}
    short = {**chat, "messages": [{"role": "user", "content": FRANCE}]}
    tools: dict[str, Any] = {"tools": [TOOL], "tool_choice": "required"}
    called = client.chat.completions.create(**chat, **tools).choices[0]
    with client.chat.completions.stream(**chat, **tools) as events:
        for _ in events:
            pass
        streamed = events.get_final_completion().choices[0]
    parsed = client.chat.completions.parse(**chat, response_format=Order)
    asked: dict[str, Any] = {"model": model, "input": CHAT[0]["content"], "temperature": 0, "max_output_tokens": LIMIT}
    typed = client.responses.parse(**asked, text_format=Order)
    flat = {"type": "function", **STOCK, "strict": True}
    answer = client.responses.create(**asked, tools=[flat], tool_choice="required")
    with client.responses.stream(**{**asked, "input": FRANCE}) as events:
        kinds = [event.type for event in events]
        text = events.get_final_response().output_text
    return {
        "calls": [[each.function.name, json.loads(each.function.arguments)] for each in called.message.tool_calls],
        "streamed calls": [
            [each.function.name, json.loads(each.function.arguments)] for each in streamed.message.tool_calls
        ],
        "finish reasons": [called.finish_reason, streamed.finish_reason],
        "parsed": parsed.choices[0].message.parsed.model_dump(),
        "response parsed": typed.output_parsed.model_dump(),
        "response calls": [
            [each.name, json.loads(each.arguments)] for each in answer.output if each.type == "function_call"
        ],
        "response events": [kinds[0], kinds[-1]],
        "response text": text,
        "chat text": client.chat.completions.create(**short).choices[0].message.content,
    }


def ask_anthropic(url: str, model: str) -> dict[str, Any]:
    from anthropic import Anthropic

    client = Anthropic(base_url=url, api_key="none", max_retries=0, timeout=120)
    chat: dict[str, Any] = {"model": model, "messages": CHAT, "system": "Be brief.", "max_tokens": LIMIT}
    chat["extra_body"] = {"temperature": 0}  # the SDK has no argument for it any more
    short = {**chat, "messages": [{"role": "user", "content": FRANCE}]}
    whole = client.messages.create(**short)
    with client.messages.stream(**short) as stream:
        text = "".join(stream.text_stream)
        streamed = stream.get_final_message()
    tool = {"name": STOCK["name"], "description": STOCK["description"], "input_schema": STOCK["parameters"]}
    called = client.messages.create(**chat, tools=[tool], tool_choice={"type": "any"})
    with client.messages.stream(**chat, tools=[tool], tool_choice={"type": "any"}) as stream:
        again = stream.get_final_message()
    counted = client.messages.count_tokens(model=model, messages=short["messages"], system="Be brief.")
    return {
        "text": whole.content[0].text,
        "streamed text": text,
        "stop reasons": [whole.stop_reason, streamed.stop_reason],
        "calls": [[each.name, each.input] for each in called.content if each.type == "tool_use"],
        "streamed calls": [[each.name, each.input] for each in again.content if each.type == "tool_use"],
        "call stop reason": called.stop_reason,
        "counted": counted.input_tokens,
        "used": whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0),
    }


def ask_instructor(url: str, model: str) -> dict[str, Any]:
    import instructor
    from openai import OpenAI

    answers = {}
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        client = instructor.from_openai(OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0), mode=mode)
        order = client.chat.completions.create(
            model=model, messages=CHAT, response_model=Order, max_retries=0, **GREEDY
        )
        answers[mode.name] = order.model_dump()
    return answers


class Address(BaseModel):
    """Where somebody lives."""

    street: str = Field(max_length=40)
    city: str = Field(max_length=30)
    postcode: str = Field(pattern=r"^[0-9]{5}$")


class Person(BaseModel):
    """Somebody."""

    name: str = Field(max_length=40)
    age: int = Field(ge=0, le=120)
    address: Address
    friends: list[Annotated[str, Field(max_length=40)]] = Field(max_length=3)


def ask_instructor_often(url: str, model: str) -> dict[str, Any]:
    """A hundred answers with a nested model, sampled; not part of CI: two minutes. Where strings had no length, the
    limit of tokens cut 3 of them: a small model goes on with a string at times."""
    import instructor
    from openai import OpenAI

    def valid(mode: instructor.Mode, seed: int) -> str | None:
        client = instructor.from_openai(OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0), mode=mode)
        question = f"Tell me about somebody who is called {'ABCDEFGHIJ'[seed % 10]}. and lives in Europe."
        try:
            client.chat.completions.create(
                model=model, messages=[{"role": "user", "content": question}], response_model=Person,
                max_retries=0, temperature=0.8, seed=seed, max_tokens=500,
            )  # fmt: skip
        except Exception as error:  # noqa: BLE001 - each is counted
            return f"{type(error).__name__}: {error}"[:300]
        return None

    counts = {}
    with ThreadPoolExecutor(8) as pool:
        for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
            errors = list(pool.map(lambda seed, mode=mode: valid(mode, seed), range(50)))
            counts[mode.name] = [errors.count(None), [error for error in errors if error]]
    return counts


def ask_pydantic_ai(url: str, model: str) -> dict[str, Any]:
    from pydantic_ai import Agent, NativeOutput
    from pydantic_ai.messages import ToolReturnPart
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    served = OpenAIChatModel(model, provider=OpenAIProvider(base_url=f"{url}/v1", api_key="none"))
    settings: Any = {"temperature": 0.0, "max_tokens": LIMIT}
    question = CHAT[0]["content"]
    by_tool = Agent(served, output_type=Order, model_settings=settings).run_sync(question)
    native = Agent(served, output_type=NativeOutput(Order), model_settings=settings).run_sync(question)
    asked = []

    def look_up_stock(part: Literal["bolt", "nut"]) -> str:
        """How many of a part there are."""
        asked.append(part)
        return f"There are 7 of {part}."

    function: Any = look_up_stock
    helper = Agent(served, tools=[function], output_type=[Order, str], model_settings=settings)
    history = helper.run_sync(question).all_messages()
    returned = [part.content for each in history for part in each.parts if isinstance(part, ToolReturnPart)]
    return {
        "by tool": by_tool.output.model_dump(),
        "native": native.output.model_dump(),
        "asked": asked,
        "returned": returned,
    }


def ask_langchain(url: str, model: str) -> dict[str, Any]:
    from langchain_openai import ChatOpenAI

    chat: Any = ChatOpenAI(base_url=f"{url}/v1", api_key="none", model=model, max_retries=0, **GREEDY)  # type: ignore[call-arg]
    question = CHAT[0]["content"]
    answers = {
        method: chat.with_structured_output(Order, method=method).invoke(question).model_dump()
        for method in ("json_schema", "function_calling")
    }
    bound = chat.bind_tools([TOOL], tool_choice="any")
    streamed = None
    for chunk in bound.stream(question):
        streamed = chunk if streamed is None else streamed + chunk
    calls = {"calls": bound.invoke(question).tool_calls, "streamed calls": streamed.tool_calls}
    return answers | {name: [[each["name"], each["args"]] for each in said] for name, said in calls.items()}


def ask_litellm(url: str, model: str) -> dict[str, Any]:
    import litellm

    common: dict[str, Any] = {"api_base": f"{url}/v1", "api_key": "none", "num_retries": 0, "messages": CHAT, **GREEDY}
    chat = {**common, "model": f"openai/{model}"}
    called = litellm.completion(**chat, tools=[TOOL], tool_choice="required").choices[0].message
    document = litellm.completion(**chat, response_format=Order).choices[0].message.content
    hosted = {**common, "model": f"hosted_vllm/{model}"}
    anything = litellm.completion(**hosted, response_format={"type": "json_object"}).choices[0]
    return {
        "calls": [[each.function.name, json.loads(each.function.arguments)] for each in called.tool_calls],
        "document": Order.model_validate_json(document).model_dump(),
        "json object": [anything.finish_reason, anything.message.content],
    }


ASKS = {
    "openai": ask_openai,
    "anthropic": ask_anthropic,
    "instructor": ask_instructor,
    "instructor often": ask_instructor_often,
    "pydantic-ai": ask_pydantic_ai,
    "langchain": ask_langchain,
    "litellm": ask_litellm,
}

if __name__ == "__main__":
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # nothing is fetched
    asyncio.set_event_loop(asyncio.new_event_loop())
    print(json.dumps(ASKS[sys.argv[1]](*sys.argv[2:])))
