"""The grammars of the events of two APIs: what may follow what, and what it must add up to."""

from __future__ import annotations

import json


def decoded(stream):
    """The events of a stream, whose names stand twice."""
    events = []
    for block in stream.decode().split("\n\n")[:-1]:
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events


# -- Messages -----------------------------------------------------------------------------

_DELTAS = {
    "text": {"text_delta": "text"},
    "thinking": {"thinking_delta": "thinking", "signature_delta": "signature"},
    "tool_use": {"input_json_delta": "partial_json"},
}


def message_of(events):
    """The message that events of the Messages API add up to; fails where their order is wrong."""
    events = [event for event in events if event["type"] != "ping"]
    assert events[0]["type"] == "message_start"
    message = events[0]["message"]
    assert (message["content"], message["stop_reason"]) == ([], None)
    at = 1
    while events[at]["type"] == "content_block_start":
        at = _block(events, at, message)
    told, stop = events[at:]
    assert (told["type"], stop["type"]) == ("message_delta", "message_stop")
    message |= told["delta"]
    message["usage"] |= told["usage"]
    return message


def _block(events, at, message):
    start = events[at]
    block, index = start["content_block"], start["index"]
    assert index == len(message["content"])
    members = dict.fromkeys(_DELTAS[block["type"]].values(), "")
    at += 1
    while events[at]["type"] == "content_block_delta":
        assert events[at]["index"] == index
        delta = events[at]["delta"]
        name = _DELTAS[block["type"]][delta["type"]]
        assert set(delta) == {"type", name}
        assert delta[name], "a delta says something"
        members[name] += delta[name]
        at += 1
    assert events[at] == {"type": "content_block_stop", "index": index}
    if block["type"] == "tool_use":
        assert block["input"] == {}
        members = {"input": _loaded(members["partial_json"])}
    message["content"].append(block | members)
    return at + 1


def _loaded(text):
    try:
        return json.loads(text or "{}")
    except ValueError:
        return {}


# -- Responses ----------------------------------------------------------------------------

_TEXTS = {
    "message": ("output_text", "text"),
    "reasoning": ("reasoning_text", "text"),
    "function_call": ("function_call_arguments", "arguments"),
}


def response_of(events):
    """The response that events of the Responses API add up to; fails where their order is wrong,
    or where an event that ends something differs from what came before."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    created, begun, *others, last = events
    assert (created["type"], begun["type"]) == ("response.created", "response.in_progress")
    assert created["response"] == begun["response"]
    assert created["response"]["output"] == []
    output, at = [], 0
    while at < len(others):
        at = _item(others, at, output)
    final = last["response"]
    assert last["type"] == f"response.{final['status']}"
    assert final["output"] == output
    assert final["id"] == created["response"]["id"]
    return final


def _item(events, at, output):
    added = events[at]
    assert added["type"] == "response.output_item.added"
    item = added["item"]
    assert added["output_index"] == len(output)
    assert item["status"] == "in_progress"
    place = {"output_index": len(output), "item_id": item["id"]}
    stem, member = _TEXTS[item["type"]]
    has_parts = item["type"] != "function_call"
    at += 1
    if has_parts:
        assert events[at]["type"] == "response.content_part.added"
        assert events[at]["part"]["text"] == ""
        at += 1
    text = ""
    while events[at]["type"] == f"response.{stem}.delta":
        assert place.items() <= events[at].items()
        assert events[at]["delta"], "a delta says something"
        text += events[at]["delta"]
        at += 1
    assert events[at]["type"] == f"response.{stem}.done"
    assert events[at][member] == text
    at += 1
    if has_parts:
        assert events[at]["type"] == "response.content_part.done"
        assert events[at]["part"]["text"] == text
        at += 1
    done = events[at]
    assert done["type"] == "response.output_item.done"
    shown = done["item"]["content"][0]["text"] if has_parts else done["item"]["arguments"]
    assert shown == text
    assert done["item"]["status"] in ("completed", "incomplete")
    output.append(done["item"])
    return at + 1
