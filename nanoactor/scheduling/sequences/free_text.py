"""Free text before a grammar applies: reasoning, and text before a tool call.

A sequence decodes like any other while its text is free. A *gate* is the id of the token that ends
the current free text. After the last gate the grammar applies: positions already computed past that
token are dropped, and the sequence continues as a constrained one.
"""

from __future__ import annotations

from collections.abc import Iterable

from nanoactor.messages.engine import FreeText

NO_GATE = -1
"""Value that replaces the gate (the id of the token that ends the free text) once the grammar
applies."""


def first_gate(free: FreeText | None) -> int:
    """Return the id of the token that ends the first free text; `NO_GATE` if there is no free
    text."""
    if free is None:
        return NO_GATE
    return free.close_id if free.thinks else free.call_id


def last_gate(free: FreeText | None) -> int:
    """Return the id of the token after which the grammar applies; `NO_GATE` if there is no free
    text."""
    if free is None:
        return NO_GATE
    return free.close_id if free.call_id == NO_GATE else free.call_id


def next_gate(free: FreeText, gate: int, index: int, token: int) -> int:
    """Return the gate (the id of the token that ends the current free text) after `token` is
    sampled at `index` in the output. If the token does not end the free text, this is still
    `gate`."""
    if index == 0 and not free.thinks and token == free.think_id >= 0:
        return free.close_id
    if gate == NO_GATE or token != gate:
        return gate
    return free.call_id if gate == free.close_id else NO_GATE


def replay_free_text(free: FreeText | None, output: Iterable[int]) -> tuple[int, list[int]]:
    """Return the gate (the id of the token that ends the current free text) of a sequence that
    resumes after `output`, and the tokens of `output` to replay to its grammar."""
    gate, replayed = first_gate(free), list[int]()
    for index, token in enumerate(output):
        before = gate
        if free is not None:
            gate = next_gate(free, gate, index, token)
        if NO_GATE in (before, gate):  # sampled under the grammar, or ends free text
            replayed.append(token)
    return gate, replayed


def watched_ids(free: FreeText | None) -> tuple[int, ...]:
    """Return the ids of all tokens that may change the gate, the token that ends the current free
    text."""
    if free is None:
        return ()
    return tuple(i for i in (free.think_id, free.close_id, free.call_id) if i != NO_GATE)


def must_continue(free: FreeText | None, gate: int) -> bool:
    """Return True if the sequence must not end in its current free text because its constrained
    part is still to come. An end-of-sequence token then only ends the reasoning, and is not part of
    the output."""
    return free is not None and gate != NO_GATE and free.call_id == NO_GATE
