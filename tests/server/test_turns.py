"""A turn of a conversation finds the prompt of the one before, and what it computes again shows."""

from nanoactor.server.turns import Turns

A, B, C = ({"role": "user", "content": text} for text in "abc")


def test_a_turn_is_compared_with_the_longest_that_it_continues():
    turns = Turns()
    assert turns.add([A], {}, 40, 0, 16) == (0, 0)
    assert turns.add([A, B], {}, 70, 32, 16) == (32, 0)
    assert turns.add([A, B, C], {}, 100, 48, 16) == (48, 16)
    assert turns.add([A, B, C], {}, 100, 96, 16) == (64, 0), "the same again continues [A, B]"


def test_other_options_or_messages_are_another_conversation():
    turns = Turns()
    turns.add([A], {"tools": [{"a": 1, "b": 2}]}, 40, 0, 16)
    assert turns.add([A, B], {}, 70, 0, 16) == (0, 0)
    assert turns.add([C, B], {"tools": [{"a": 1, "b": 2}]}, 70, 0, 16) == (0, 0)
    assert turns.add([A, B], {"tools": [{"b": 2, "a": 1}]}, 70, 0, 16) == (0, 32)
    reordered = {name: A[name] for name in reversed(A)}
    assert turns.add([reordered, C], {"tools": [{"b": 2, "a": 1}]}, 70, 32, 16) == (32, 0)


def test_only_the_latest_are_remembered():
    turns = Turns(max_turns=2)
    for first in (A, B, C):
        turns.add([first], {}, 40, 0, 16)
    assert turns.add([A, B], {}, 70, 0, 16) == (0, 0)
    assert turns.add([C, B], {}, 70, 32, 16) == (32, 0)
