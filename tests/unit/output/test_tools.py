"""Tools as clients send them: what is read, and what is refused by its place."""

from typing import Any

import pytest

from deployments.output.tools import MAX_TOOLS, tool_use
from replicas.errors import InvalidRequest


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
