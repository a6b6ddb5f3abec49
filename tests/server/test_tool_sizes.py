"""Tools are looked into on the server's loop: no more of them than a grammar may be."""

import json

import pytest

from nanoactor.requests.grammar_spec import MAX_GRAMMAR_BYTES
from nanoactor.server.errors import APIError
from nanoactor.server.requests import ChatRequest, Decoder


@pytest.mark.parametrize("strict", [False, True])
def test_schemas_that_are_too_large_together_are_refused_before_they_are_copied(strict):
    large = {"type": "string", "format": "byte", "description": "x" * (MAX_GRAMMAR_BYTES // 4)}
    tools = [
        {"type": "function", "function": {"name": f"f{n}", "parameters": large, "strict": strict}}
        for n in range(5)
    ]
    body = {"messages": [{"role": "user", "content": "a"}], "tools": tools}
    choice = {} if strict else {"tool_choice": "required"}
    with pytest.raises(APIError, match="tools: the schemas") as caught:
        Decoder().decode(ChatRequest, json.dumps({**body, **choice}).encode())
    assert (caught.value.status, caught.value.param) == (400, "tools")
    free = [{**tool, "function": {**tool["function"], "strict": False}} for tool in tools]
    Decoder().decode(ChatRequest, json.dumps({**body, "tools": free}).encode())
