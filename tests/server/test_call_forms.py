"""Forms of calls besides Hermes': what is found, and that no cut of the text matters."""

import asyncio
import functools
import json

import httpx2 as httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanoactor.server.call_forms import call_finder, call_form
from nanoactor.server.json_calls import LlamaCalls, MistralCalls
from nanoactor.server.tool_calls import Arguments, CallsAfterReasoning
from nanoactor.server.tool_choice import Function, Tool
from nanoactor.server.xml_calls import QwenCoderCalls
from nanoactor.text.template import ChatTemplate
from tests.server.harness import events, url
from tests.server.parsing import found
from tests.server.scripted import scripted
from tests.text.test_chat import THINKING

SCHEMA = {
    "type": "object",
    "properties": {
        "s": {"type": "string"},
        "i": {"type": "integer"},
        "n": {"type": "number"},
        "b": {"type": "boolean"},
        "o": {"type": "object"},
        "a": {"type": "array", "items": {"type": "integer"}},
        "ns": {"type": ["string", "null"]},
        "any": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
        "e": {"enum": ["x", "1"]},
        "un": {},
    },
}


def xml():
    return QwenCoderCalls({"f": SCHEMA, "g": None})


def llama():
    return LlamaCalls(["f", "g"])


def check(make, text, said, calls):
    assert found(make, [text]) == (said, calls)
    assert found(make, list(text)) == (said, calls)
    for at in range(1, len(text)):
        assert found(make, [text[:at], text[at:]]) == (said, calls), at


# -- Qwen3-Coder --------------------------------------------------------------------------


def function(*parameters, name="f", tag=True):
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters)
    text = f"<function={name}>\n{inner}</function>"
    return f"<tool_call>\n{text}\n</tool_call>" if tag else text


XML = [
    ("Hello ", "Hello ", []),
    (function(("s", "Oslo")), "", [("f", '{"s": "Oslo"}')]),
    (function(), "", [("f", "{}")]),
    (f"I look.\n\n{function(('s', 'a'))}", "I look.", [("f", '{"s": "a"}')]),
    (f"{function()}\n{function(name='g')} So.", "So.", [("f", "{}"), ("g", "{}")]),
    (function(("s", "a"), tag=False), "", [("f", '{"s": "a"}')]),
    (
        function(("s", "  a\nb<c>\n\n"), ("i", "7"), ("n", "1.0")),
        "",
        [("f", '{"s": "  a\\nb<c>\\n\\n", "i": 7, "n": 1}')],
    ),
    (
        function(("s", 'say "hi" \\ \t ü 北')),
        "",
        [("f", json.dumps({"s": 'say "hi" \\ \t ü 北'}, ensure_ascii=False))],
    ),
    (
        function(("s", "use <tool_call> and </function> here")),
        "",
        [("f", '{"s": "use <tool_call> and </function> here"}')],
    ),
    (function(("s", "")), "", [("f", '{"s": ""}')]),
    ("<function=f><parameter=s>a</parameter></function>", "", [("f", '{"s": "a"}')]),
    # Closing tags that were forgotten.
    (
        "<function=f>\n<parameter=s>\nx\n<parameter=i>\n3\n</parameter>",
        "",
        [("f", '{"s": "x", "i": 3}')],
    ),
    ("<function=f>\n<parameter=s>\nx\n</function>", "", [("f", '{"s": "x"}')]),
    ("<tool_call>\n<function=f>\n<parameter=s>\nx\n</parameter>", "", [("f", '{"s": "x"}')]),
    # A text that is cut within stays open.
    ("<tool_call>\n<function=f>\n<parameter=s>\nx", "", [("f", '{"s": "x')]),
    ("<tool_call>\n<function=f>\n<parameter=s>\nx</para", "", [("f", '{"s": "x</para')]),
    ("<tool_call>\n<func", "<tool_call>\n<func", []),
    ("a <tool_call> is a tag", "a <tool_call> is a tag", []),
    ("a <function= is a tag", "a <function= is a tag", []),
    ("a <function=x\ny> b", "a <function=x\ny> b", []),
]


@pytest.mark.parametrize(("text", "said", "calls"), XML, ids=[text for text, _, _ in XML])
def test_calls_of_qwen3_coder_are_found(text, said, calls):
    check(xml, text, said, calls)


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        *(("i", "7", 7), ("i", "007", 7), ("i", "abc", "abc"), ("i", "-3", -3)),
        *(("n", "1.0", 1), ("n", "5", 5), ("n", "2.5e-3", 0.0025), ("n", "1e999", "1e999")),
        *(("b", "True", True), ("b", "1", True), ("b", "yes", "yes"), ("b", "false", False)),
        *(("o", '{"k":1}', {"k": 1}), ("o", "{'k':1}", "{'k':1}"), ("o", "3", "3")),
        *(("a", '["1",2]', ["1", 2]), ("a", "1,2", "1,2"), ("a", "[NaN]", "[NaN]")),
        *(("ns", "null", None), ("ns", "None", "None"), ("any", "5", 5), ("any", "x", "x")),
        *(("e", "1", "1"), ("un", "5", "5"), ("unknown", "5", "5")),
    ],
)
def test_values_have_the_types_of_the_schema(key, text, value):
    """As in vLLM 0.33."""
    _, ((_, arguments),) = found(xml, [function((key, text))])
    assert json.loads(arguments) == {key: value}


@pytest.mark.parametrize(
    "own",
    [
        *({"enum": None}, {"enum": 5}, {"type": {"x": 1}}, {"type": [["x"]]}, {"anyOf": 3}),
        *(True, None, [], {"type": "string", "enum": None}, {"const": None, "allOf": [1]}),
    ],
)
def test_odd_schemas_are_read_as_far_as_they_say_something(own):
    for schema in ({"properties": {"a": own}}, {"properties": own}, own):
        make = functools.partial(QwenCoderCalls, {"f": schema})
        check(make, function(("a", "x")), "", [("f", '{"a": "x"}')])


def test_texts_are_streamed():
    parser, told = xml(), []
    for character in function(("s", "a long text, word by word")):
        told += [p for p in parser.push(character) if isinstance(p, Arguments)]
    assert len(told) > 20


# -- Llama and Mistral --------------------------------------------------------------------

F, G = '{"name": "f", "parameters": {"a": 1}}', '{"name": "g", "arguments": {}}'
LLAMA = [
    ("Hello ", "Hello ", []),
    (F, "", [("f", '{"a": 1}')]),
    (f"<|python_tag|>{F}; {G}", "", [("f", '{"a": 1}'), ("g", "{}")]),
    (f"{F};{G}\n{F}", "", [("f", '{"a": 1}'), ("g", "{}"), ("f", '{"a": 1}')]),
    (f"Well. <|python_tag|>{F}", "Well.", [("f", '{"a": 1}')]),
    (f"{F} I used {{tool}}.", "I used {tool}.", [("f", '{"a": 1}')]),
    ('{"name": "f", "parameters": {"a": "}{\\""}, "id": 3}', "", [("f", '{"a": "}{\\""}')]),
    ('{"parameters": {"a": 1}, "name": "f"}', "", [("f", '{"a": 1}')]),
    ('{"name": "f", "parameters": "{\\"a\\": 1}"}', "", [("f", '{"a": 1}')]),
    ('{"name": "f"}', "", [("f", "{}")]),
    # Answers in JSON are no calls.
    ('{"a": 1}', '{"a": 1}', []),
    ('{"name": "Oslo", "parameters": {}}', '{"name": "Oslo", "parameters": {}}', []),
    ('{"name": "f", "parameters": {"a": ', "", [("f", '{"a": ')]),
    ('{"name": "f", "par', '{"name": "f", "par', []),
    ('<|python_tag|>search.call(q="x")', 'search.call(q="x")', []),
    ("  <|pyth", "  <|pyth", []),
    (f"Sure: {F}", f"Sure: {F}", []),
]
MISTRAL = [
    ("Hello ", "Hello ", []),
    (
        f'[TOOL_CALLS] [{{"name": "f", "arguments": {{"a": 1}}, "id": "abcdefghi"}}, {G}]',
        "",
        [("f", '{"a": 1}'), ("g", "{}")],
    ),
    (f"Well.\n[TOOL_CALLS][{G}] So.", "Well.So.", [("g", "{}")]),
    (f"[TOOL_CALLS]{G}", "", [("g", "{}")]),
    (
        '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g{"b": [1]}',
        "",
        [("f", '{"a": 1}'), ("g", '{"b": [1]}')],
    ),
    ('[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{"a": "]}"} tail', "tail", [("f", '{"a": "]}"}')]),
    ('[TOOL_CALLS][{"name": "f"', '{"name": "f"', []),
    ("[TOOL_CALLS]what is {this}", "[TOOL_CALLS]what is {this}", []),
    ("[TOOL_CALLS]what", "[TOOL_CALLS]what", []),
    ("a [TOOL_", "a [TOOL_", []),
]


@pytest.mark.parametrize(("text", "said", "calls"), LLAMA, ids=[text for text, _, _ in LLAMA])
def test_calls_of_llama_are_found(text, said, calls):
    check(llama, text, said, calls)


@pytest.mark.parametrize(("text", "said", "calls"), MISTRAL, ids=[text for text, _, _ in MISTRAL])
def test_calls_of_mistral_are_found(text, said, calls):
    check(MistralCalls, text, said, calls)


def test_ids_are_as_the_next_turns_template_wants_them():
    assert all(
        MistralCalls().new_id().isalnum() and len(MistralCalls().new_id()) == 9 for _ in "ab"
    )
    assert llama().new_id().startswith("call_")
    assert CallsAfterReasoning("none", MistralCalls()).new_id().isalnum()


# -- over HTTP ----------------------------------------------------------------------------

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
SAID = {
    "hermes": '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo", "days": 3}}\n'
    "</tool_call>",
    "qwen3_coder": "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
    "llama3_json": '{"name": "weather", "parameters": {"city": "Oslo", "days": 3}}',
    "mistral": '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Oslo", "days": 3}}]',
}


def message_of(answer):
    """The message of a stream's chunks, and how many of them had arguments."""
    text, calls, argued = "", [], 0
    for chunk in events(answer.text)[:-1]:
        for choice in chunk["choices"]:
            text += choice["delta"].get("content") or ""
            for call in choice["delta"].get("tool_calls", ()):
                if "id" in call:
                    calls.append({"id": call["id"], "name": call["function"]["name"], "told": ""})
                calls[-1]["told"] += call["function"]["arguments"]
                argued += bool(call["function"]["arguments"])
    return text, calls, argued


@pytest.mark.parametrize("form", SAID)
def test_a_server_reads_and_demands_calls_in_its_models_form(tmp_path, monkeypatch, form):
    async def main():
        config = {"tool_call_parser": form}
        async with (
            scripted(tmp_path, monkeypatch, config, jump_forward=False) as (server, script),
            httpx.AsyncClient(base_url=url(server), timeout=60) as client,
        ):
            asked = {"messages": [{"role": "user", "content": "?"}], "tools": [WEATHER]}
            for choice in ("auto", "required"):
                # A grammar takes none but the tokens of the text as it is tokenized.
                by_character = choice == "auto"
                script.say(SAID[form], by_character)
                body = {**asked, "tool_choice": choice, "max_tokens": 400}
                whole = (await client.post("/v1/chat/completions", json=body)).json()["choices"][0]
                assert whole["finish_reason"] == "tool_calls", whole
                (call,) = whole["message"]["tool_calls"]
                assert json.loads(call["function"]["arguments"]) == {"city": "Oslo", "days": 3}
                assert call["id"].startswith("call_") == (form != "mistral")
                script.say(SAID[form], by_character)
                stream = await client.post("/v1/chat/completions", json={**body, "stream": True})
                text, (told,), argued = message_of(stream)
                assert (text, told["name"]) == ("", "weather")
                assert told["told"] == call["function"]["arguments"]
                assert argued > 3 or not by_character, "arguments are streamed"
            assert script.refused == [], "the grammar allows what the model writes"
            script.say("Well.", by_character=True)
            plain = (await client.post("/v1/chat/completions", json=asked)).json()
            assert plain["choices"][0]["message"]["content"] == "Well."

    asyncio.run(main())


def test_the_template_chooses_the_form(tmp_path, monkeypatch):
    template = THINKING + "{# <tool_call><function=NAME><parameter=KEY> #}"

    async def main():
        async with (
            scripted(tmp_path, monkeypatch, template=template) as (server, script),
            httpx.AsyncClient(base_url=url(server)) as client,
        ):
            script.say(SAID["qwen3_coder"])
            asked = {"messages": [{"role": "user", "content": "?"}], "tools": [WEATHER]}
            answer = (await client.post("/v1/chat/completions", json=asked)).json()["choices"][0]
            assert answer["message"]["tool_calls"][0]["function"]["name"] == "weather"

    asyncio.run(main())


@pytest.mark.parametrize(
    ("parser", "said", "thoughts", "content"),
    [
        ("auto", "<think>\nHm.\n</think>\n\nCold.", "Hm.", "Cold."),
        ("auto", "Hm.</think>Cold.", None, "Hm.</think>Cold."),
        ("deepseek_r1", "Hm.</think>Cold.", "Hm.", "Cold."),
        ("deepseek_r1", "<think>Hm.</think>Cold.", "Hm.", "Cold."),
        ("none", "<think>Hm.</think>Cold.", None, "<think>Hm.</think>Cold."),
    ],
)
def test_thoughts_are_read_as_the_server_is_told(
    tmp_path, monkeypatch, parser, said, thoughts, content
):
    async def main():
        async with (
            scripted(tmp_path, monkeypatch, {"reasoning_parser": parser}) as (server, script),
            httpx.AsyncClient(base_url=url(server)) as client,
        ):
            script.say(said, by_character=True)
            asked = {"messages": [{"role": "user", "content": "?"}]}
            message = (await client.post("/v1/chat/completions", json=asked)).json()["choices"][0]
            found = message["message"]
            assert (found.get("reasoning_content"), found["content"]) == (thoughts, content)

    asyncio.run(main())


# -- any text, any cut --------------------------------------------------------------------

MARKS = {
    "xml": (
        xml,
        [
            *("<tool_call>", "</tool_call>", "<function=f>", "</function>", "<function="),
            "<parameter=s>",
            "<parameter=i>",
            "</parameter>",
            "\n",
            "7",
            "a",
            "<",
            '"',
            " ",
        ],
    ),
    "llama": (
        llama,
        ["<|python_tag|>", F, G, "{", "}", '"', "\\", ";", " ", "\n", "a", '"name": "f"'],
    ),
    "mistral": (
        MistralCalls,
        ["[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", G, "[", "]", "{", "}", ",", "f", " "],
    ),
}


@pytest.mark.parametrize("form", MARKS)
@given(st.data())
def test_no_cut_changes_what_is_found(form, data):
    make, marks = MARKS[form]
    text = "".join(data.draw(st.lists(st.sampled_from(marks), max_size=14)))
    points = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    cut = [text[a:b] for a, b in zip([0, *points], [*points, len(text)], strict=True)]
    assert found(make, cut) == found(make, [text])
    assert found(make, list(text)) == found(make, [text])


def test_the_form_is_the_templates_unless_the_server_is_told():
    assert call_form("auto", "qwen3_coder") == "qwen3_coder"
    assert call_form("hermes", "qwen3_coder") == "hermes"
    assert call_form("mistral", "hermes") == "mistral"
    assert call_form("mistral", "mistral_args") == "mistral_args"
    tools = [Tool(Function("f", parameters=SCHEMA))]
    kinds = {
        form: type(call_finder(form, tools)) for form in ("qwen3_coder", "llama3_json", "mistral")
    }
    assert kinds == {
        "qwen3_coder": QwenCoderCalls,
        "llama3_json": LlamaCalls,
        "mistral": MistralCalls,
    }


@pytest.mark.parametrize(
    ("source", "form"),
    [
        ("<tool_call>{{ x }}", "hermes"),
        ("<tool_call>\n<function={{ x }}>\n<parameter=", "qwen3_coder"),
        ("[TOOL_CALLS][{{ x }}]", "mistral"),
        ("[TOOL_CALLS]{{ x }}[ARGS]", "mistral_args"),
        ('Environment: ipython {"name": x, "parameters": y}', "llama3_json"),
        ("nothing of the kind", "hermes"),
    ],
)
def test_templates_tell_their_form(tmp_path, source, form):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": source}))
    assert ChatTemplate(tmp_path).facts().call_form == form
