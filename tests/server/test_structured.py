"""Constraints as requests over HTTP ask for them, and the answers that follow them."""

import asyncio
import json
import re
import typing

import jsonschema
import openai
import pydantic
import pytest

from nanoactor.errors import InvalidRequest
from nanoactor.grammar.check import check_spec
from nanoactor.requests.grammar_spec import GrammarSpec, ToolFunction, ToolGrammar
from nanoactor.server.choices import ChatChoice
from nanoactor.server.errors import APIError
from nanoactor.server.requests import (
    ChatRequest,
    CompletionRequest,
    Decoder,
    sampling_params,
    template_options,
)
from nanoactor.server.structured import errors_name_field
from nanoactor.server.tool_calls import ToolCallParser
from tests.server.harness import CPU, here, served, url
from tests.server.scripted import SPACES, Script, directory, with_weights

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "string"}}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA, "strict": True}}
BODIES = {
    ChatRequest: {"model": "m", "messages": [{"role": "user", "content": "a"}]},
    CompletionRequest: {"model": "m", "prompt": "a"},
}


def decode(kind, **extra):
    return Decoder(strict=True).decode(kind, json.dumps({**BODIES[kind], **extra}).encode())


def spec(kind=ChatRequest, **extra):
    """What the engine is told of a request; None where it is not constrained."""
    body = decode(kind, **extra)
    made = sampling_params(body, body.constraint).structured_outputs
    return made and made.spec()


def compact(value):
    return json.dumps(value, separators=(",", ":"))


ASKED = [
    (dict(response_format=FORMAT), "json_schema", compact(SCHEMA)),
    (dict(response_format={"type": "json_object"}), "json_object", ""),
    (dict(structured_outputs={"json": SCHEMA}), "json_schema", compact(SCHEMA)),
    (dict(structured_outputs={"json": compact(SCHEMA)}), "json_schema", compact(SCHEMA)),
    (dict(structured_outputs={"regex": "a+"}), "regex", "a+"),
    (dict(structured_outputs={"choice": ["a", "b"]}), "choice", '["a", "b"]'),
    (dict(structured_outputs={"grammar": 'root ::= "a"'}), "grammar", 'root ::= "a"'),
    (dict(structured_outputs={"json_object": True}), "json_object", ""),
    (dict(guided_json=SCHEMA), "json_schema", compact(SCHEMA)),
    (dict(guided_regex="a+"), "regex", "a+"),
    (dict(guided_choice=["a"]), "choice", '["a"]'),
    (dict(guided_grammar='root ::= "a"'), "grammar", 'root ::= "a"'),
    (dict(json_schema=compact(SCHEMA)), "json_schema", compact(SCHEMA)),
    (dict(regex="a+"), "regex", "a+"),
    (dict(ebnf='root ::= "a"'), "grammar", 'root ::= "a"'),
    (dict(grammar='root ::= "a"'), "grammar", 'root ::= "a"'),
]


@pytest.mark.parametrize("kind", BODIES)
@pytest.mark.parametrize(("extra", "name", "value"), ASKED, ids=[str(a[0])[:40] for a in ASKED])
def test_each_field_becomes_a_specification(kind, extra, name, value):
    assert spec(kind, **extra) == GrammarSpec(kind=name, value=value)


@pytest.mark.parametrize("kind", BODIES)
def test_what_asks_for_nothing_constrains_nothing(kind):
    for nothing in (dict(), dict(response_format={"type": "text"}), dict(response_format=None)):
        assert spec(kind, **nothing) is None


def test_options_of_vllm_are_passed_on():
    options = {"disable_any_whitespace": True, "disable_additional_properties": True}
    made = spec(structured_outputs={"json": SCHEMA, **options})
    assert not made.whitespace
    assert json.loads(made.value) == {**SCHEMA, "additionalProperties": False}


WRONG = [
    (dict(response_format={"type": "yaml"}), "response_format.type"),
    (dict(response_format={"type": "json_schema"}), "response_format.json_schema"),
    (
        dict(response_format={"type": "json_schema", "json_schema": {"name": "s"}}),
        "response_format.json_schema",
    ),
    (dict(response_format={"type": "json_object"}, guided_regex="a"), "guided_regex"),
    (
        dict(response_format={"type": "json_object"}, structured_outputs={"regex": "a"}),
        "structured_outputs",
    ),
    (dict(structured_outputs={}), "structured_outputs"),
    (dict(structured_outputs={"regex": "a", "choice": ["b"]}), "structured_outputs"),
    (dict(structured_outputs={"regex": "a", "whitespace_pattern": " "}), "structured_outputs"),
    (dict(structured_outputs={"structural_tag": "{}"}), "structured_outputs"),
    (dict(structured_outputs={"regx": "a"}), "structured_outputs.regx"),
    (dict(guided_json="{"), "guided_json"),
    (dict(guided_choice=[]), "guided_choice"),
    (dict(guided_regex=""), "guided_regex"),
]


@pytest.mark.parametrize("kind", BODIES)
@pytest.mark.parametrize(("extra", "param"), WRONG, ids=[str(w[0])[:40] for w in WRONG])
def test_what_is_wrong_is_refused_by_the_name_of_its_field(kind, extra, param):
    with pytest.raises(APIError) as caught:
        body = decode(kind, **extra)
        with errors_name_field(body.constraint):
            sampling_params(body, body.constraint)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert param in caught.value.message


def test_what_the_engine_says_of_its_parameter_is_said_of_the_requests_field():
    constraint = decode(ChatRequest, response_format=FORMAT).constraint
    with (
        pytest.raises(APIError, match=r"^response_format: no \$ref") as caught,
        errors_name_field(constraint),
    ):
        raise InvalidRequest("structured_outputs: no $ref is followed")
    assert caught.value.param == "response_format"
    for told, of in (("stop must be", constraint), ("structured_outputs: no", None)):
        with pytest.raises(InvalidRequest, match=f"^{told}"), errors_name_field(of):
            raise InvalidRequest(told)


# -- tools --------------------------------------------------------------------------------

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def tool(name, strict=None, **rest):
    return {"type": "function", "function": {"name": name, "strict": strict, **rest}}


TOOLS = [tool("weather", parameters=PARAMETERS), tool("time")]
STRICT = [tool("weather", strict=True, parameters=PARAMETERS), tool("time", parameters=PARAMETERS)]
NAMED = {"type": "function", "function": {"name": "weather"}}
WEATHER = ToolFunction(name="weather", parameters=compact(PARAMETERS))
# Without parameters a function has none.
TIME = ToolFunction(
    name="time", parameters='{"type":"object","properties":{},"additionalProperties":false}'
)


def calls(**extra):
    body = decode(ChatRequest, **extra)
    return body.constraint and body.constraint.values["tools"]


def test_demanded_calls_have_arguments_that_their_schemas_allow():
    both = ToolGrammar(functions=(WEATHER, TIME), required=True)
    assert calls(tools=TOOLS, tool_choice="required") == both
    one = calls(tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    assert one == ToolGrammar(functions=(WEATHER, TIME), required=True, parallel=False)


def test_a_named_function_is_called_once():
    only = ToolGrammar(functions=(WEATHER,), required=True, parallel=False)
    assert calls(tools=TOOLS, tool_choice=NAMED) == only


def test_calls_that_may_come_are_constrained_where_a_function_is_strict():
    assert calls(tools=TOOLS) is calls(tools=TOOLS, tool_choice="auto") is None
    assert calls(tools=STRICT, tool_choice="none") is None
    for auto in (dict(), dict(tool_choice="auto")):
        found = calls(tools=STRICT, **auto)
        assert found == ToolGrammar(functions=(WEATHER, ToolFunction(name="time")), required=False)


def allowed(mode, *names):
    listed = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": listed}}


def test_tools_that_are_not_allowed_are_shown_and_cannot_be_called():
    may = calls(tools=TOOLS, tool_choice=allowed("auto", "time"))
    assert may == ToolGrammar(functions=(ToolFunction(name="time"),), required=False)
    must = calls(tools=TOOLS, tool_choice=allowed("required", "weather"))
    assert must == ToolGrammar(functions=(WEATHER,), required=True)
    body = decode(ChatRequest, tools=TOOLS, tool_choice=allowed("auto", "time"))
    assert template_options(body)["tools"] == TOOLS
    for wrong in (allowed("auto"), allowed("never", "time"), allowed("auto", "sing")):
        with pytest.raises(APIError) as caught:
            decode(ChatRequest, tools=TOOLS, tool_choice=wrong)
        assert caught.value.param.startswith("tool_choice")


def test_tools_that_are_no_functions_are_refused_in_a_sentence():
    custom = {"type": "custom", "custom": {"name": "shell"}}
    with pytest.raises(APIError, match="tools of type 'custom' are not supported") as caught:
        decode(ChatRequest, tools=[*TOOLS, custom])
    assert caught.value.param == "tools[2].type"


# -- names of other servers ----------------------------------------------------------------


@pytest.mark.parametrize("kind", BODIES)
def test_one_constraint_under_several_names_is_one(kind):
    grammar = 'root ::= "a"'
    for names in (
        dict(guided_grammar=grammar, structured_outputs={"grammar": grammar}),
        dict(ebnf=grammar, grammar=grammar),
        dict(guided_json=SCHEMA, json_schema=json.dumps(SCHEMA)),
        dict(response_format=FORMAT, structured_outputs={"json": SCHEMA}),
    ):
        assert spec(kind, **names) is not None, names
    with pytest.raises(APIError, match="guided_regex, which already constrains"):
        spec(kind, guided_regex="a", regex="b")


@pytest.mark.parametrize("kind", BODIES)
def test_parameters_under_sglangs_names_are_ours(kind):
    body = decode(kind, max_new_tokens=7, min_new_tokens=3)
    made = sampling_params(body)
    assert (made.max_tokens, made.min_tokens) == (7, 3)
    with pytest.raises(APIError, match="the same parameter"):
        sampling_params(decode(kind, max_new_tokens=7, max_tokens=8))


def test_calls_reach_the_engine_as_a_specification():
    made = spec(tools=TOOLS, tool_choice=NAMED)
    assert made.kind == "tools"
    assert json.loads(made.value)["functions"][0]["parameters"] == compact(PARAMETERS)


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        (dict(tool_choice="required"), "if there are no tools"),
        (dict(tool_choice="required", tools=[]), "if there are no tools"),
        (dict(tool_choice=NAMED), "if there are no tools"),
        (
            dict(tools=TOOLS[1:], tool_choice=NAMED),
            r"'weather' is not the name of one of the tools \('time'\)",
        ),
        (dict(tools=TOOLS, tool_choice="any"), "any"),
        (dict(tools=TOOLS, tool_choice={"type": "custom"}), "tool_choice"),
    ],
    ids=str,
)
def test_a_choice_that_the_tools_have_not_is_refused(extra, words):
    with pytest.raises(APIError, match=words) as caught:
        decode(ChatRequest, **extra)
    assert caught.value.param.partition(".")[0] == "tool_choice"


def test_a_form_is_one_of_two_ways_where_calls_may_come_and_gives_way_to_demanded_ones():
    for tools in (TOOLS, STRICT):
        made = spec(tools=tools, response_format=FORMAT)
        assert made.kind == "tools"
        either = json.loads(made.value)
        assert either["required"] is True
        assert json.loads(either["answer"]) == FORMAT["json_schema"]["schema"]
    assert spec(tools=TOOLS, tool_choice="none", response_format=FORMAT).kind == "json_schema"
    assert spec(tools=TOOLS, tool_choice="required", response_format=FORMAT).kind == "tools"
    with pytest.raises(APIError, match="with a tool_choice that requires calls") as caught:
        spec(tools=TOOLS, tool_choice="required", guided_regex="a")
    assert caught.value.param == "guided_regex"


def test_what_is_wrong_with_a_form_beside_tools_is_said_of_the_form():
    schema = {"type": "object", "minProperties": 2}
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    for tools in (None, TOOLS):
        with pytest.raises((APIError, InvalidRequest), match="minProperties") as caught:
            body = decode(ChatRequest, tools=tools, response_format=form)
            with errors_name_field(body.constraint):
                check_spec(body.constraint.params.spec())
        assert str(caught.value).startswith("response_format" if tools else "json_schema")


@pytest.mark.parametrize(("named", "reason"), [(False, "tool_calls"), (True, "stop")])
def test_the_reason_of_a_named_call_is_that_of_openai(named, reason):
    choice = ChatChoice(0, None, ToolCallParser(), named_call=named)
    choice.push('<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>')
    assert choice.finish("stop")[-1]["finish_reason"] == reason
    assert choice.complete()["message"]["tool_calls"][0]["function"]["arguments"] == "{}"


# -- answers of the demo model, which has never seen JSON ---------------------------------

ASK = [{"role": "user", "content": "Who is there?"}]
SHORT = dict(
    model="m",
    messages=ASK,
    max_tokens=400,
    seed=1,
    logit_bias=dict.fromkeys(map(str, SPACES), -100),
)
PLAIN = {"chat_template_kwargs": {"enable_thinking": False}}


class Item(pydantic.BaseModel, extra="forbid"):
    kind: typing.Literal["sword", "crown"]
    worth: int = pydantic.Field(ge=0, le=99)


class Person(pydantic.BaseModel, extra="forbid"):
    name: str = pydantic.Field(max_length=12)
    alive: bool
    things: list[Item] = pydantic.Field(max_length=2)


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    """OpenAI's own, of a server of the demo model with a template for tools and thoughts."""
    path = with_weights(directory(tmp_path_factory.mktemp("model")))
    options = ("--served-model-name", "m", *CPU)
    with served(*options, model=str(path)) as server:
        base = f"{server.url}/v1"
        with openai.OpenAI(base_url=base, api_key="none", max_retries=0) as made:
            yield made


def both(client, **values):
    """(content, [name and arguments of each call], reason), whole and as a stream."""
    values = {**SHORT, "extra_body": PLAIN, **values}
    (choice,) = client.chat.completions.create(**values).choices
    made = [[c.function.name, c.function.arguments] for c in choice.message.tool_calls or []]
    content, calls, reason = "", [], None
    for chunk in client.chat.completions.create(**values, stream=True):
        (one,) = chunk.choices
        content += one.delta.content or ""
        for call in one.delta.tool_calls or []:
            if call.id:
                calls.append([call.function.name, ""])
            calls[call.index][1] += call.function.arguments
        reason = one.finish_reason or reason
    assert (content, calls, reason) == (choice.message.content or "", made, choice.finish_reason)
    return content, calls, reason


def test_typed_answers_are_parsed_by_the_official_client(client):
    values = {**SHORT, "response_format": Person, "extra_body": PLAIN}
    (choice,) = client.chat.completions.parse(**values).choices
    assert isinstance(choice.message.parsed, Person)
    with client.chat.completions.stream(**values) as stream:
        last = stream.get_final_completion()
    assert last.choices[0].message.parsed == choice.message.parsed


@pytest.mark.parametrize("seed", range(3))
def test_an_answer_is_valid_under_its_schema(client, seed):
    schema = Person.model_json_schema()
    wanted = {"type": "json_schema", "json_schema": {"name": "p", "schema": schema}}
    content, _, reason = both(client, response_format=wanted, seed=seed)
    jsonschema.validate(json.loads(content), schema)
    assert reason == "stop"


def test_each_of_several_answers_is_valid(client):
    schema = Item.model_json_schema()
    wanted = {"type": "json_schema", "json_schema": {"name": "p", "schema": schema}}
    found = client.chat.completions.create(
        **SHORT, response_format=wanted, n=3, logprobs=True, extra_body=PLAIN
    )
    for choice in found.choices:
        jsonschema.validate(json.loads(choice.message.content), schema)
        told = b"".join(bytes(one.bytes or []) for one in choice.logprobs.content)
        assert told.decode().startswith(choice.message.content)


COMPACT = {"disable_any_whitespace": True}
FORMS = [
    ({"structured_outputs": {"choice": ["yes", "no"]}}, r"yes|no"),
    ({"structured_outputs": {"regex": r"\d{3}-[xy]"}}, r"\d{3}-[xy]"),
    ({"structured_outputs": {"grammar": 'start: "a" ("b" | "c")'}}, r"a[bc]"),
    ({"structured_outputs": {"grammar": 'root ::= "a" ("b" | "c")'}}, r"a[bc]"),
    ({"structured_outputs": {"json": {"enum": [1, "é"]}, **COMPACT}}, '1|"é"'),
    ({"guided_choice": ["yes", "no"]}, r"yes|no"),
    ({"guided_regex": r"\d{3}-[xy]"}, r"\d{3}-[xy]"),
    ({"guided_json": {"type": "boolean"}}, r"true|false"),
    ({"guided_grammar": 'start: "a"'}, r"a"),
]


@pytest.mark.parametrize(("extra", "pattern"), FORMS, ids=[str(f[0])[:40] for f in FORMS])
def test_each_form_is_followed_on_both_routes(client, extra, pattern):
    content, _, reason = both(client, extra_body={**PLAIN, **extra})
    assert re.fullmatch(pattern, content), content
    assert reason == "stop"
    found = client.completions.create(
        model="m", prompt=["Who?", "Where?"], max_tokens=30, extra_body=extra
    )
    for choice in found.choices:
        assert re.fullmatch(pattern, choice.text), choice.text


REFUSED = [
    (
        {"json_schema": {"name": "s", "schema": {"$ref": "https://example.org/s.json"}}},
        "pointer within",
    ),
    ({"json_schema": {"name": "s", "schema": {"type": "object", "not": {"type": "null"}}}}, "not"),
    ({"json_schema": {"name": "s", "schema": {"type": "elephant"}}}, "elephant"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("more", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_a_schema_that_cannot_be_enforced_is_refused_with_a_status(client, more, words, stream):
    wanted = {"type": "json_schema", **more}
    with pytest.raises(openai.BadRequestError, match=f"response_format: .*{words}") as caught:
        client.chat.completions.create(**SHORT, response_format=wanted, stream=stream)
    assert caught.value.param == "response_format"


@pytest.mark.parametrize("field", ["guided_regex", "guided_grammar"])
def test_what_only_the_parser_can_tell_is_refused_with_a_status_too(client, field):
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(**SHORT, extra_body={field: "([|"}, stream=stream)
        assert caught.value.param == field


LIMITED = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Troy"]}, "days": {"enum": [1, 2, 3]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
CALLED = [
    tool("forecast", parameters=LIMITED),
    tool("now"),
]


def test_demanded_calls_come_and_their_arguments_are_valid(client):
    schemas = {"forecast": LIMITED, "now": {"type": "object", "maxProperties": 0}}
    content, calls, reason = both(client, tools=CALLED, tool_choice="required")
    assert (content, reason) == ("", "tool_calls")
    for name, arguments in calls:
        jsonschema.validate(json.loads(arguments), schemas[name])


@pytest.mark.parametrize("name", ["forecast", "now"])
def test_a_named_function_is_called(client, name):
    choice = {"type": "function", "function": {"name": name}}
    content, calls, reason = both(client, tools=CALLED, tool_choice=choice)
    assert [called for called, _ in calls] == [name]
    assert (content, reason) == ("", "stop")


def test_one_call_is_demanded(client):
    _, calls, reason = both(client, tools=CALLED, tool_choice="required", parallel_tool_calls=False)
    assert (len(calls), reason) == (1, "tool_calls")


def test_typed_tools_are_parsed_by_the_official_client(client):
    (choice,) = client.chat.completions.parse(
        **SHORT,
        tools=[openai.pydantic_function_tool(Item)],
        tool_choice="required",
        parallel_tool_calls=False,
        extra_body=PLAIN,
    ).choices
    (call,) = choice.message.tool_calls
    assert isinstance(call.function.parsed_arguments, Item)


# -- a model that says what a test tells it to --------------------------------------------


def test_thoughts_come_before_the_constraint(tmp_path, monkeypatch):
    """Where they are open, where they may come, and where they are switched off."""
    scripts = [
        ("Hm. {", "</think>\n\n", {"mode": "open"}),
        ("<think>\nHm. {", "\n</think>\n\n", {}),
        ("", "", {}),
        ("", "", {"mode": "none"}),
    ]
    template = (
        "{% for message in messages %}{{ message.content }}{% endfor %}"
        "{% if mode == 'open' %}<think>{% elif mode == 'none' %}<think></think>{% endif %}"
    )
    wanted = {"type": "json_schema", "json_schema": {"name": "b", "schema": {"type": "boolean"}}}

    async def main():
        script = Script(monkeypatch)
        config = {"served_model_name": "m"}
        async with here(directory(tmp_path, template), config=config) as server:
            base = f"{url(server)}/v1"
            async with openai.AsyncOpenAI(base_url=base, api_key="none", max_retries=0) as client:
                for thoughts, close, options in scripts:
                    script.say(f"{thoughts}{close}true")
                    found = await client.chat.completions.create(
                        model="m",
                        messages=ASK,
                        response_format=wanted,
                        extra_body={"chat_template_kwargs": options},
                    )
                    message = found.choices[0].message
                    assert message.content == "true"
                    told = getattr(message, "reasoning_content", None) or ""
                    assert told == thoughts.removeprefix("<think>\n")
                    assert script.refused == []
                script.say("Hm. {</think>true")
                found = await client.chat.completions.create(
                    model="m",
                    messages=ASK,
                    response_format=wanted,
                    extra_body={"chat_template_kwargs": {"mode": "none"}},
                )
                assert found.choices[0].message.content in ("true", "false")
                assert script.refused

    asyncio.run(main())


def test_a_strict_tool_may_be_called_after_text_and_need_not(tmp_path, monkeypatch):
    called = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'

    async def main():
        script = Script(monkeypatch)
        config = {"served_model_name": "m"}
        async with here(directory(tmp_path), config=config) as server:
            base = f"{url(server)}/v1"
            async with openai.AsyncOpenAI(base_url=base, api_key="none", max_retries=0) as client:
                for said, text, count in (
                    ("Cold <there>.", "Cold <there>.", 0),
                    (f"I look.\n{called}", "I look.", 1),
                    (called.replace("Oslo", 'Oslo", "x": "'), None, 1),
                ):
                    script.say(said)
                    found = await client.chat.completions.create(
                        model="m", messages=ASK, tools=STRICT, max_tokens=200
                    )
                    (choice,) = found.choices
                    assert len(choice.message.tool_calls or []) == count
                    if text is not None:
                        assert (choice.message.content, script.refused) == (text, [])

    asyncio.run(main())
