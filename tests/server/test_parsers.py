"""Thoughts and calls in a model's text: what they are, and that no cut of the text matters."""

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from nanoactor.server.choices import ChatChoice
from nanoactor.server.reasoning import ReasoningParser, ends_in_thoughts
from nanoactor.server.tool_calls import Arguments, Call, CallsAfterReasoning, ToolCallParser
from tests.growth import growth
from tests.server.parsing import found

# -- thoughts -----------------------------------------------------------------------------


def separated(pieces, opened=False):
    parser = ReasoningParser("open" if opened else "optional")
    parts = [parser.push(piece) for piece in pieces] + [parser.finish()]
    return "".join(t for t, _ in parts), "".join(c for _, c in parts)


@pytest.mark.parametrize(
    ("text", "opened", "thoughts", "content"),
    [
        ("Hello", False, "", "Hello"),
        ("<think>\nHm.\n\nYes.\n</think>\n\nHello", False, "Hm.\n\nYes.", "Hello"),
        ("\n<think>Hm</think>Hello\n", False, "Hm", "Hello\n"),
        ("<think>\n\n</think>\n\nHello", False, "", "Hello"),
        ("Hm.\n</think>\n\nHello", True, "Hm.", "Hello"),
        ("<think>\nHm.\n</think>\n\nHello", True, "Hm.", "Hello"),
        ("Hm.\n", True, "Hm.", ""),
        ("<think>\nHm. </thi", False, "Hm. </thi", ""),
        ("<thi", False, "", "<thi"),
        ("<thi", True, "<thi", ""),
        ("  \n", False, "", "  \n"),
        ("Say <think>no</think>", False, "", "Say <think>no</think>"),
        ("<think>a</think><think>b</think>c", False, "a", "<think>b</think>c"),
        ("", False, "", ""),
    ],
)
def test_thoughts_are_separated_from_content(text, opened, thoughts, content):
    assert separated([text], opened) == (thoughts, content)
    assert separated(list(text), opened) == (thoughts, content)


THINKING = st.lists(
    st.sampled_from(["<think>", "</think>", "<th", "ink>", "</thi", "nk>", "\n", " ", "a", "<"]),
    max_size=12,
).map("".join)


@given(THINKING, st.booleans(), st.data())
def test_thoughts_do_not_depend_on_the_cut(text, opened, data):
    assert separated(cut(text, data), opened) == separated([text], opened)


def cut(text, data):
    """The text in pieces, some of them empty."""
    points = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    return [text[a:b] for a, b in zip([0, *points], [*points, len(text)], strict=True)]


# -- calls --------------------------------------------------------------------------------


def called(pieces):
    """(text, [(name, arguments)]) of the Hermes form."""
    return found(ToolCallParser, pieces)


def block(text):
    return f"<tool_call>\n{text}\n</tool_call>"


OSLO = '{"name": "weather", "arguments": {"city": "Oslo"}}'
CASES = [
    ("Hello ", "Hello ", []),
    (block(OSLO), "", [("weather", '{"city": "Oslo"}')]),
    (f"I look.\n\n{block(OSLO)}", "I look.", [("weather", '{"city": "Oslo"}')]),
    (f"{block(OSLO)}\n{block(OSLO)}\n", "", [("weather", '{"city": "Oslo"}')] * 2),
    (f"{block(OSLO)}\n then", "then", [("weather", '{"city": "Oslo"}')]),
    (block('{"name": "f", "arguments": {}}'), "", [("f", "{}")]),
    (block('{"name": "f"}'), "", [("f", "{}")]),
    (block('{"name": "f", "arguments": null}'), "", [("f", "{}")]),
    (block('{"arguments": {"a": 1}, "name": "f"}'), "", [("f", '{"a": 1}')]),
    (block('{"name": "f", "arguments": "{\\"a\\": 1}"}'), "", [("f", '{"a": 1}')]),
    (
        block('{"name": "f", "arguments": {"a": "}</tool_call>\\"{", "b": [{}]}}'),
        "",
        [("f", '{"a": "}</tool_call>\\"{", "b": [{}]}')],
    ),
    (block("no call"), block("no call"), []),
    (block('{"name": 3, "arguments": {}}'), block('{"name": 3, "arguments": {}}'), []),
    (block('{"name": "f", "arguments": [1]}'), block('{"name": "f", "arguments": [1]}'), []),
    (f"<tool_call>{OSLO}", "", [("weather", '{"city": "Oslo"}')]),
    (f"<tool_call>{OSLO[:-5]}", "", [("weather", '{"city": "Os')]),
    ('<tool_call>{"name": "f"}', "", [("f", "{}")]),
    ('<tool_call>{"name": "wea', '<tool_call>{"name": "wea', []),
    (f"<tool_call>{OSLO}<tool_call>{OSLO}", "", [("weather", '{"city": "Oslo"}')] * 2),
    (f"a <tool_cal{block(OSLO)}", "a <tool_cal", [("weather", '{"city": "Oslo"}')]),
    (block(json.dumps({"name": "wëß", "arguments": {}})), "", [("wëß", "{}")]),
    (block('{"name": "a\\ud83d", "arguments": {}}'), "", [("a\ufffd", "{}")]),
    (
        block('{"arguments": {"a": "\\udc00"}, "name": "f"}'),
        "",
        [("f", '{"a": "\\udc00"}')],
    ),
    (block('{"name": "f", "arguments": "\\ud800"}'), "", [("f", "\ufffd")]),
    # A missing brace or tag does not swallow what follows.
    (
        f'<tool_call>{{"name": "f", "arguments": {{"a": 1</tool_call>\n{block(OSLO)}',
        "",
        [("f", '{"a": 1'), ("weather", '{"city": "Oslo"}')],
    ),
    (f"<tool_call>{OSLO}\n{OSLO}</tool_call>", "", [("weather", '{"city": "Oslo"}')] * 2),
    (f"<tool_call>{OSLO}\nsays</tool_call> more", "more", [("weather", '{"city": "Oslo"}')]),
    ("The tag \n<tool_call> is a tag.", "The tag \n<tool_call> is a tag.", []),
    ("a <tool_call>\n[1]", "a <tool_call>\n[1]", []),
]


@pytest.mark.parametrize(("text", "said", "calls"), CASES, ids=[text for text, _, _ in CASES])
def test_calls_are_found(text, said, calls):
    assert called([text]) == (said, calls)
    assert called(list(text)) == (said, calls)


PARTS = ["<tool_call>", "</tool_call>", "<tool", "_call>", OSLO, '{"name": "f", "arguments": ']
PARTS += ['{"name": "a</tool_call>b", "arguments": {', '"{', '\\"', '"', "{", "}", "\n", " ", "x"]
PARTS += ['"arguments": {"k": "v"}, "name": "g"', "null", "\\", "é", "<", ","]
CALLING = st.lists(st.sampled_from(PARTS), max_size=14).map("".join)


@given(CALLING, st.data())
@example("<tool_call>" + '{"name": "' + 5000 * "x" + '", "arguments": {}}</tool_call>', None)
def test_calls_do_not_depend_on_the_cut(text, data):
    pieces = list(text) if data is None else cut(text, data)
    assert called(pieces) == called([text])


def test_arguments_are_streamed():
    parser = ToolCallParser()
    assert parser.push('<tool_call>\n{"name": "f", "arguments": {"a": "') == [
        Call(0, "f"),
        Arguments(0, '{"a": "'),
    ]
    assert parser.push("some") == [Arguments(0, "some")]
    assert parser.push("thing") == [Arguments(0, "thing")]
    assert parser.push('"}') == [Arguments(0, '"}')]
    assert parser.push("}\n</tool_call>") == parser.finish() == []


def test_a_tag_that_is_only_mentioned_holds_nothing_back():
    parser = ToolCallParser()
    assert parser.push("Write <tool_call> ") == ["Write"]
    assert parser.push("first") == [" <tool_call>", " first"]


@pytest.mark.parametrize(
    "text",
    [
        lambda size: '<tool_call>{"name": "f", "arguments": "' + size * "x" + '"}</tool_call>',
        lambda size: '<tool_call>{"name": "' + size * "x" + '", "arguments": {}}</tool_call>',
        lambda size: (
            '<tool_call>{"name": "f", "arguments": {"a": "' + size * "x" + '"}}</tool_call>'
        ),
        lambda size: "<think>" + size // 2 * "\n" + "</think>" + size // 2 * " ",
        lambda size: size * " ",
        lambda size: "<think>Hm." + size * "\n",
        lambda size: "Hello" + size * " ",
        lambda size: f"{block(OSLO)}{size * ' '}",
        lambda size: "<tool_call>" + size * " ",
        lambda size: f"{block(OSLO)}{size * ' '}{block(OSLO)}",
    ],
    ids=[
        *("string", "name", "object", "space", "space first", "lines in thoughts"),
        *("space after content", "space after a call", "space after a tag", "space between calls"),
    ],
)
def test_a_long_answer_costs_little_for_each_piece(text):
    """Time that grows with the square of the length would be sixteenfold here."""

    def parse(text):
        choice = ChatChoice(0, ReasoningParser(), ToolCallParser())
        for at in range(0, len(text), 4):
            choice.push(text[at : at + 4])
        choice.finish("stop")

    assert growth(lambda: parse(text(25_000)), lambda: parse(text(100_000)), 9) < 9


def test_text_is_not_held_back_for_longer_than_it_must():
    parser = ToolCallParser()
    assert parser.push("Hello <") == ["Hello"]
    assert parser.push("b") == [" <b"]
    thoughts = ReasoningParser()
    assert thoughts.push("<think>So ") == ("So ", "")
    assert thoughts.push("it\n<") == ("it", "")
    assert thoughts.push("/b") == ("\n</b", "")


# -- both, as a choice of an answer -------------------------------------------------------


def answered(pieces, opened, reason):
    """A choice put together from its deltas must be the one that is told as a whole."""
    choice = ChatChoice(0, ReasoningParser("open" if opened else "optional"), ToolCallParser())
    members = choice.begin() + [m for piece in pieces for m in choice.push(piece)]
    members += choice.finish(reason)
    whole = choice.complete()
    deltas = [member["delta"] for member in members]
    assert [m["finish_reason"] for m in members[:-1]] == [None] * (len(members) - 1)
    assert members[-1]["finish_reason"] == whole["finish_reason"]
    content = "".join(delta.get("content", "") for delta in deltas)
    thoughts = "".join(delta.get("reasoning_content", "") for delta in deltas)
    assert content == (whole["message"]["content"] or "")
    assert thoughts == whole["message"].get("reasoning_content", "")
    calls = whole["message"].get("tool_calls", [])
    arguments = [""] * len(calls)
    for delta in deltas:
        for call in delta.get("tool_calls", []):
            arguments[call["index"]] += call["function"]["arguments"]
    assert arguments == [call["function"]["arguments"] for call in calls]
    names = [call["function"]["name"] for call in calls]
    return thoughts, content, list(zip(names, arguments, strict=True)), whole["finish_reason"]


@given(
    st.lists(st.sampled_from(["<think>", "</think>", "hm\n", *PARTS]), max_size=14).map("".join),
    st.booleans(),
    st.sampled_from(["stop", "length"]),
    st.data(),
)
def test_an_answer_does_not_depend_on_the_cut(text, opened, reason, data):
    found = answered(cut(text, data), opened, reason)
    assert found == answered([text], opened, reason)
    expected = "tool_calls" if found[2] and reason == "stop" else reason
    assert found[3] == expected


UNUSUAL = [
    # The closing tag may stand in a string, in any order of members.
    (
        '<tool_call>\n{"arguments": {"x": "</tool_call>"}, "name": "f"}\n</tool_call>',
        '{"x": "</tool_call>"}',
    ),
    (
        '<tool_call>{"name":"f","parameters":{"x":"</tool_call>"}}</tool_call>',
        '{"x":"</tool_call>"}',
    ),
    # Numbers stand as they were written: read and written again they would be others, or no JSON.
    (
        '<tool_call>{"arguments": {"a": 1e400, "b": 1E5, "c": 0.1000}, "name": "f"}</tool_call>',
        '{"a": 1e400, "b": 1E5, "c": 0.1000}',
    ),
    (
        '<tool_call>{"arguments": {"a": 12345678901234567890}, "name": "f"}</tool_call>',
        '{"a": 12345678901234567890}',
    ),
]


@pytest.mark.parametrize(("text", "arguments"), UNUSUAL)
@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_a_call_in_an_unusual_order_keeps_its_arguments_as_they_were_written(text, arguments, size):
    parser = ToolCallParser()
    pieces = []
    for at in range(0, len(text), size):
        pieces += parser.push(text[at : at + size])
    pieces += parser.finish()
    assert pieces == [Call(0, "f"), Arguments(0, arguments)]


@pytest.mark.parametrize("size", [1, 5, 1000])
def test_a_quotation_mark_that_is_left_open_hides_no_later_call(size):
    good = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    text = '<tool_call>{"arguments": "no end, "name": "f}</tool_call>' + good
    parser = ToolCallParser()
    pieces = []
    for at in range(0, len(text), size):
        pieces += parser.push(text[at : at + size])
    pieces += parser.finish()
    assert Call(0, "f") in pieces
    assert "".join(piece.text for piece in pieces if isinstance(piece, Arguments)) == "{}"


@pytest.mark.parametrize("size", [1, 26, 10_000])
def test_quotation_marks_that_are_left_open_lose_no_text(size):
    """Thousands of them once exceeded the recursion limit."""
    text = '<tool_call>{\\"</tool_call>' * 3000
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    assert found(ToolCallParser, pieces) == (text, [])


@pytest.mark.parametrize("count", [1, 31, 32, 33])
@pytest.mark.parametrize("size", [1, 1000])
def test_a_call_behind_quotation_marks_that_are_left_open_is_found(count, size):
    unclosed = '<tool_call>{\\"</tool_call>' * count
    call = '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1'  # cut off
    text = unclosed + call
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    if count <= 32:
        assert found(ToolCallParser, pieces) == (unclosed, [("f", '"{\\"a\\": 1')])
    else:
        assert found(ToolCallParser, pieces) == (text, [])


def test_finishing_again_gives_nothing():
    parser = ToolCallParser()
    assert parser.push("a <tool_call>{") + parser.finish() == ["a", " <tool_call>{"]
    assert parser.finish() == []


def test_no_number_that_is_no_json_becomes_an_argument():
    parser = ToolCallParser()
    text = '<tool_call>{"arguments": {"a": NaN}, "name": "f"}</tool_call>'
    assert parser.push(text) == [text]


@pytest.mark.parametrize("size", [1, 4, 1000])
def test_what_thoughts_mention_is_no_call_where_they_stay_in_the_content(size):
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    text = f"<think>maybe {call} no</think>No.{call}"
    for begins, said in (("optional", text), ("open", text.removeprefix("<think>"))):
        parser = CallsAfterReasoning(begins)
        pieces = []
        for at in range(0, len(said), size):
            pieces += parser.push(said[at : at + size])
        pieces += parser.finish()
        content = "".join(piece for piece in pieces if isinstance(piece, str))
        assert content == said.removesuffix(call)
        assert [piece for piece in pieces if isinstance(piece, Call)] == [Call(0, "f")]


@pytest.mark.parametrize(
    ("text", "thinks"),
    [
        ("<think>hm", True),
        ("  <think>hm", True),
        ("<think>a</think>b <think>", False),
        ("Use the `<think>` tag: ", False),
        ("", False),
    ],
)
def test_a_begun_answer_is_in_its_thoughts_where_it_began_with_them(text, thinks):
    assert ends_in_thoughts(text) == thinks


def test_no_thoughts_are_looked_for_behind_what_was_said():
    parser = ReasoningParser("content")
    assert parser.push("<think> is the tag") == ("", "<think> is the tag")
