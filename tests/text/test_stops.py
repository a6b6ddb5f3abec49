"""Stop strings are found wherever the text is cut, and nothing of one gets out before."""

import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from nanoactor.text.stops import StopMatcher

SETTINGS = settings(
    max_examples=400,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)


def reference(text, stops, include):
    """(text out, stop that matched): one character at a time, looking at all there is."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def feed(matcher, cuts):
    """The piece that each cut let out, up to a match; `finish` follows where there is none."""
    out = []
    for piece in cuts:
        out.append(matcher.push(piece))
        if matcher.matched is not None:
            return out
    return [*out, matcher.finish()]


@st.composite
def cases(draw):
    alphabet = draw(st.sampled_from(["ab", "abc", "aé和"]))
    stops = draw(st.lists(st.text(alphabet, min_size=1, max_size=6), max_size=4))
    cuts = draw(st.lists(st.text(alphabet, max_size=5), max_size=12))
    return tuple(stops), cuts


@SETTINGS
@given(cases(), st.booleans())
@example((("aab", "ab"), ["a", "aab"]), False)
@example((("abab", "ba"), ["ab", "ab"]), False)
@example((("b", "abb"), ["ab", "b"]), True)
def test_the_outcome_is_the_references_however_the_text_is_cut(case, include):
    stops, cuts = case
    matcher = StopMatcher(stops, include)
    out = "".join(feed(matcher, cuts))
    assert (out, matcher.matched) == reference("".join(cuts), stops, include)


@SETTINGS
@given(cases())
def test_no_part_of_the_stop_that_matches_is_ever_out(case):
    stops, cuts = case
    expected, _ = reference("".join(cuts), stops, include=False)
    out = ""
    for piece in feed(StopMatcher(stops, include=False), cuts):
        out += piece
        assert expected.startswith(out)
    assert out == expected


@SETTINGS
@given(cases(), st.booleans())
def test_exactly_what_may_begin_a_stop_is_held_back(case, include):
    stops, cuts = case
    matcher = StopMatcher(stops, include)
    fed = out = ""
    longest = max(map(len, stops), default=1)
    for piece in cuts:
        fed, out = fed + piece, out + matcher.push(piece)
        if matcher.matched is not None:
            return
        begun = [size for s in stops for size in range(len(s)) if fed.endswith(s[:size])]
        assert len(fed) - len(out) == max(begun, default=0) <= longest - 1


def test_held_back_text_is_exact_for_every_cut_of_a_near_miss():
    """Every way of cutting a text that begins the stop string again and again."""
    text, stop = "aabaabaaab", "aabaaab"
    for mask in range(2 ** (len(text) - 1)):
        cuts, begin = [], 0
        for at in range(1, len(text)):
            if mask >> (at - 1) & 1:
                cuts.append(text[begin:at])
                begin = at
        matcher = StopMatcher((stop,), include=False)
        assert "".join(feed(matcher, [*cuts, text[begin:]])) == "aab"
        assert matcher.matched == stop


@pytest.mark.parametrize(
    ("stops", "text", "out", "matched"),
    [
        (("ab", "abc"), "xabc", "x", "ab"),  # a prefix of the other ends first
        (("abc", "ab"), "xabc", "x", "ab"),
        (("bc", "abc"), "xabc", "x", "abc"),  # a suffix ends together: the longest wins
        (("abc", "bc"), "xabc", "x", "abc"),
        (("abcd", "bc"), "xabcd", "xa", "bc"),  # inside of the other: ends first
        (("abcz", "bcd"), "xabcd", "xa", "bcd"),  # the longer beginning fails
        (("aa",), "xaaa", "x", "aa"),  # overlaps itself
        (("ab", "ab"), "ab", "", "ab"),
        (("\n\n",), "a\n\n\nb", "a", "\n\n"),
        (("和",), "天和地", "天", "和"),
        (("ab",), "xa", "xa", None),
        ((), "anything", "anything", None),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 100])
def test_which_of_several_stops_wins(stops, text, out, matched, size):
    cuts = [text[at : at + size] for at in range(0, len(text), size)]
    for include in (False, True):
        matcher = StopMatcher(stops, include)
        tail = matched if include and matched else ""
        assert "".join(feed(matcher, cuts)) == out + tail
        assert matcher.matched == matched


def test_without_stops_nothing_is_held_back():
    matcher = StopMatcher((), include=False)
    assert [matcher.push(piece) for piece in ("a", "", "bc")] == ["a", "", "bc"]
    assert matcher.finish() == ""
    assert matcher.matched is None


def test_after_a_match_nothing_is_left_to_finish():
    matcher = StopMatcher(("ab", "bcd"), include=True)
    assert matcher.push("xabc") == "xab"
    assert matcher.finish() == ""
