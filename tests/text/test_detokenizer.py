"""From the scheduler's messages to the frontend's chunks: text, ids, stops, one terminal each."""

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from nanoactor.errors import ProtocolBug
from nanoactor.messages.engine import Finish, Open, OutputDelta, TextOptions, Tokens
from nanoactor.text.decoding import DecoderFactory, byte_alphabet
from nanoactor.text.detokenizer import Detokenizer
from tests.text.tokenizers_for_tests import EVERY, SPECIALS, TEXTS, byte_level, single_bytes

PHASES = [Phase.explicit, Phase.reuse, Phase.generate]
ALL = 1 << 30
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
LETTERS = {byte: letter for letter, byte in byte_alphabet().items()}


def array(values, dtype=np.int32):
    return np.array(list(values), dtype)


def finish(uid=0, reason="length", stop_reason=None, error="", hide_last=False):
    return Finish(uid, reason, stop_reason, error, 5, 1, 7, hide_last)


class Driver:
    """A detokenizer between a scheduler that counts indices and a frontend that collects."""

    def __init__(self, tokenizer=None):
        self.logic = Detokenizer(None if tokenizer is None else DecoderFactory(tokenizer))
        self.tokenizer = tokenizer
        self.index = {}
        self.prompts, self.text, self.ids, self.terminals = {}, {}, {}, {}

    def open(self, uid=0, prompt=(7, 8), output=(), **options):
        values = dict(stop=(), include_stop=False, skip_special=True, min_tokens=0) | options
        tokens = array([*prompt, *output])
        self.index[uid] = len(output)
        self.logic.open(Open(uid, tokens, len(prompt), TextOptions(**values)))
        return self

    def step(self, tokens, *finishes):
        """A step's message; `tokens` maps uids to the next token of each."""
        indices = [self.index[uid] for uid in tokens]
        for uid in tokens:
            self.index[uid] += 1
        columns = array(tokens, np.int64), array(indices), array(tokens.values())
        self.logic.process(Tokens(1, *columns, finishes))
        return self

    def feed(self, ids, *finishes, uid=0):
        """A step for each of `ids`; `finishes` travel with the last."""
        for token in ids[:-1]:
            self.step({uid: token})
        return self.step({uid: ids[-1]} if len(ids) else {}, *finishes)

    def say(self, text, *finishes, uid=0):
        return self.feed(self.tokenizer.encode(text).ids, *finishes, uid=uid)

    def read(self, budget=ALL):
        """One chunk, taken in as the frontend would; None where there is none."""
        chunk = self.logic.pop_delta(budget)
        if chunk is None:
            return None
        assert chunk.uids.dtype == np.int64
        assert chunk.counts.dtype == chunk.token_ids.dtype == np.int32
        assert len(chunk.uids) == len(chunk.texts) == len(chunk.counts)
        assert len(set(chunk.uids.tolist())) == len(chunk.uids)
        assert chunk.counts.sum() == len(chunk.token_ids)
        for opened in chunk.opened:
            assert opened.uid not in self.prompts
            self.prompts[opened.uid] = opened.prompt_token_ids.tolist()
        ids = iter(chunk.token_ids.tolist())
        for uid, text, count in zip(chunk.uids.tolist(), chunk.texts, chunk.counts, strict=True):
            assert uid in self.prompts
            assert uid not in self.terminals, "something came after the terminal"
            self.text[uid] = self.text.get(uid, "") + text
            self.ids.setdefault(uid, []).extend(next(ids) for _ in range(count))
        for terminal in chunk.terminals:
            assert terminal.uid not in self.terminals
            self.terminals[terminal.uid] = terminal
        return chunk

    def read_all(self, budget=ALL):
        while self.read(budget) is not None:
            pass
        return self

    def end(self, budget=ALL):
        """Read the rest; nothing may be left, and every terminal's counts must be true."""
        self.read_all(budget)
        assert self.logic.entries == self.logic.pending == 0
        for uid, terminal in self.terminals.items():
            assert terminal.tokens == len(self.ids.get(uid, []))
            assert terminal.characters == len(self.text.get(uid, ""))
        return self


def byte_ids(raw):
    return [single_bytes().token_to_id(LETTERS[byte]) for byte in raw]


# -- text, ids and counts ---------------------------------------------------------------------


@pytest.mark.parametrize("name", EVERY)
def test_text_ids_and_counts_are_those_of_decoding_at_once(name):
    driver = Driver(EVERY[name]())
    encoded = {uid: EVERY[name]().encode(text).ids for uid, text in enumerate(TEXTS)}
    for uid in encoded:
        driver.open(uid, prompt=range(uid + 1), skip_special=uid % 2 == 0)
    for at in range(max(map(len, encoded.values()))):
        tokens = {uid: ids[at] for uid, ids in encoded.items() if at < len(ids)}
        ends = [finish(uid) for uid, ids in encoded.items() if at == len(ids) - 1]
        driver.step(tokens, *ends)
        if at % 3 == 0:
            driver.read()
    driver.end()
    for uid, ids in encoded.items():
        assert driver.prompts[uid] == list(range(uid + 1))
        assert driver.ids[uid] == ids
        assert driver.text[uid] == EVERY[name]().decode(ids, skip_special_tokens=uid % 2 == 0)
        terminal = driver.terminals[uid]
        assert (terminal.reason, terminal.stop_reason, terminal.error) == ("length", None, "")
        assert (terminal.cached_tokens, terminal.preemptions) == (5, 1)


def test_without_decoders_ids_pass_and_there_is_no_text():
    driver = Driver().open().feed([5, 2**31 - 1, 0], finish(hide_last=True)).end()
    assert driver.ids == {0: [5, 2**31 - 1, 0]}
    assert driver.text == {0: ""}
    assert (driver.terminals[0].tokens, driver.terminals[0].characters) == (3, 0)


def test_a_request_that_wants_no_text_has_ids_alone():
    driver = Driver(single_bytes()).open(0, detokenize=False).open(1)
    for token in byte_ids(b"abc"):
        driver.step({0: token, 1: token})
    driver.step({}, finish(0), finish(1)).end()
    assert driver.ids == {0: byte_ids(b"abc"), 1: byte_ids(b"abc")}
    assert driver.text == {0: "", 1: "abc"}
    assert (driver.terminals[0].tokens, driver.terminals[0].characters) == (3, 0)


def test_a_finish_lets_out_an_incomplete_character_and_what_was_held_back():
    driver = Driver(single_bytes()).open(stop=("x" + REPLACEMENT * 2,)).say("ax")
    driver.feed(byte_ids(b"\xe5\x92")).read()
    assert driver.text[0] == "a"
    driver.step({}, finish(reason="abort")).end()
    assert driver.text[0] == f"ax{REPLACEMENT}"
    assert (driver.terminals[0].reason, driver.terminals[0].stop_reason) == ("abort", None)


def test_the_last_tokens_text_is_hidden_but_not_its_id():
    driver = Driver(byte_level()).open(skip_special=False, stop=("b",))
    ids = byte_level().encode(f"a{SPECIALS[0]}").ids
    driver.feed(ids).step({0: byte_level().token_to_id("b")}, finish(reason="stop", hide_last=True))
    driver.end()
    assert driver.text[0] == f"a{SPECIALS[0]}"
    assert driver.ids[0] == [*ids, byte_level().token_to_id("b")]
    assert (driver.terminals[0].reason, driver.terminals[0].stop_reason) == ("stop", None)


def test_a_stop_tokens_id_is_the_reason_that_the_scheduler_gives():
    end = finish(reason="stop", stop_reason=17, hide_last=True)
    driver = Driver(single_bytes()).open().feed(byte_ids(b"ab"), end).end()
    assert (driver.text[0], driver.terminals[0].stop_reason) == ("a", 17)


def test_only_the_finishing_request_hides_its_token():
    driver = Driver(single_bytes()).open(0).open(1)
    letter = byte_ids(b"a")[0]
    driver.step({0: letter, 1: letter}, finish(1, hide_last=True)).step({0: letter}, finish(0))
    driver.end()
    assert driver.text == {0: "aa", 1: ""}


# -- stop strings -----------------------------------------------------------------------------


def every_cut(raw):
    """(tokenizer, lists of ids): all ways of writing these bytes as tokens."""
    parts = {raw[a:b] for a in range(len(raw)) for b in range(a + 1, len(raw) + 1)}
    vocabulary = {"".join(LETTERS[b] for b in part): i for i, part in enumerate(sorted(parts))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    ways = []
    for mask in range(2 ** (len(raw) - 1)):
        ends = [at for at in range(1, len(raw)) if mask >> (at - 1) & 1] + [len(raw)]
        pieces = [raw[a:b] for a, b in zip([0, *ends], ends, strict=False)]
        ways.append([vocabulary["".join(LETTERS[b] for b in piece)] for piece in pieces])
    return tokenizer, ways


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_cut_into_tokens_in_every_way_never_leaks(include):
    text, stop = "a和é!ü", "和é!"
    tokenizer, ways = every_cut(text.encode())
    assert len(ways) == 256
    driver = Driver(tokenizer)
    for uid, ids in enumerate(ways):
        completing = next(n for n in range(len(ids)) if stop in tokenizer.decode(ids[: n + 1]))
        driver.open(uid, stop=("nothing", stop), include_stop=include)
        for at, token in enumerate(ids):
            driver.step({uid: token}).read()
            assert driver.logic.stopped == ([uid] if at >= completing else [])
            if at < completing:
                assert driver.text.get(uid, "") in ("", "a")
        driver.logic.stopped.clear()
        driver.step({}, finish(uid, reason="stop")).read()
        assert driver.text[uid] == ("a" + stop if include else "a")
        assert driver.ids[uid] == ids[: completing + 1]
        assert driver.terminals[uid].stop_reason == stop
    driver.end()


@pytest.mark.parametrize("reason", ["stop", "length", "abort", "refused"])
def test_after_a_stop_string_nothing_follows_but_one_terminal_at_the_finish(reason):
    driver = Driver(single_bytes()).open(stop=("和",)).open(1).say("x和").read_all()
    assert driver.logic.stopped == [0]
    driver.logic.stopped.clear()
    for letter in byte_ids("yz和".encode()):  # in flight while the scheduler hears of it
        driver.step({0: letter, 1: letter})
    driver.read_all()
    assert not driver.terminals
    error = "its grammar cannot be held" if reason == "refused" else ""
    last = finish(0, reason, error=error, hide_last=True)
    driver.step({0: letter}, last).step({}, finish(1)).end()
    assert driver.terminals[0].error == ""
    assert driver.text == {0: "x", 1: "yz和"}
    assert driver.ids[0] == byte_ids("x和".encode())
    assert (driver.terminals[0].reason, driver.terminals[0].stop_reason) == ("stop", "和")
    assert driver.logic.stopped == []


def test_a_stop_string_that_only_the_finish_completes_counts_too():
    driver = Driver(single_bytes()).open(stop=(REPLACEMENT,)).feed(byte_ids(b"a\xe5"), finish())
    driver.end()
    assert (driver.text[0], driver.terminals[0].stop_reason) == ("a", REPLACEMENT)


def test_a_skipped_special_token_neither_makes_nor_breaks_a_stop_string():
    text = f"a{SPECIALS[0]}b"
    driver = Driver(single_bytes()).open(0, stop=("ab", SPECIALS[0])).say(text, finish(0))
    driver.open(1, stop=("ab", SPECIALS[0]), skip_special=False).say(text, finish(1), uid=1).end()
    assert driver.terminals[0].stop_reason == "ab"
    assert driver.terminals[1].stop_reason == SPECIALS[0]
    assert driver.text == {0: "", 1: "a"}


@pytest.mark.parametrize(
    ("min_tokens", "text", "tokens", "reason"),
    [
        (0, "", 2, "ab"),
        (1, "ab", 4, "ab"),  # the b comes late enough, but its a did not
        (2, "ab", 4, "ab"),
        (4, "abab", 6, "ab"),
        (6, "ababab", 6, None),
    ],
)
def test_no_part_of_a_stop_string_may_lie_before_min_tokens(min_tokens, text, tokens, reason):
    driver = Driver(single_bytes()).open(stop=("ab",), min_tokens=min_tokens)
    for count, letter in enumerate(byte_ids(b"ababab"), 1):
        driver.step({0: letter}).read()
        if count <= min_tokens:
            assert driver.text[0] == "ababab"[:count], "early text must not be held back"
    driver.step({}, finish()).end()
    assert (driver.text[0], len(driver.ids[0])) == (text, tokens)
    assert driver.terminals[0].stop_reason == reason


# -- what the frontend reads ------------------------------------------------------------------


def test_one_merged_entry_for_each_request_however_many_tokens_came():
    driver = Driver(single_bytes()).open(0).open(1)
    letters = byte_ids(b"ab")
    for _ in range(100):
        driver.step({0: letters[0], 1: letters[1]})
    assert driver.logic.pending == 2
    chunk = driver.step({}, finish(0), finish(1)).read()
    assert isinstance(chunk, OutputDelta)
    assert chunk.uids.tolist() == [0, 1]
    assert chunk.texts == ["a" * 100, "b" * 100]
    assert chunk.counts.tolist() == [100, 100]
    assert [len(chunk.opened), len(chunk.terminals)] == [2, 2]
    driver.end()


@settings(max_examples=150, deadline=None, phases=PHASES)
@given(st.data())
def test_budgets_and_times_of_reading_change_nothing(data):
    tokenizer = byte_level()
    budgets = st.one_of(st.integers(1, 40), st.integers(1, 600), st.just(ALL))
    driver = Driver(tokenizer)
    waiting = {}
    for uid in range(data.draw(st.integers(1, 4))):
        text = data.draw(st.sampled_from(TEXTS))
        start = data.draw(st.integers(0, 20))
        ids = tokenizer.encode(text).ids[start : start + data.draw(st.integers(0, 25))]
        driver.open(uid, prompt=range(data.draw(st.integers(1, 30))))
        waiting[uid] = ids
    expected = {uid: list(ids) for uid, ids in waiting.items()}
    while waiting:
        some = data.draw(st.lists(st.sampled_from(sorted(waiting)), min_size=1, unique=True))
        tokens = {uid: waiting[uid].pop(0) for uid in some if waiting[uid]}
        over = [uid for uid in some if not waiting[uid]]
        driver.step(tokens, *(finish(uid, "length", error="no" * uid) for uid in over))
        for uid in over:
            del waiting[uid]
        for budget in data.draw(st.lists(budgets, max_size=3)):
            driver.read(budget)
    driver.end(data.draw(budgets))
    for uid, ids in expected.items():
        assert driver.ids.get(uid, []) == ids
        assert driver.text.get(uid, "") == tokenizer.decode(ids)
        assert driver.terminals[uid].error == "no" * uid
    assert driver.prompts.keys() == driver.terminals.keys() == expected.keys()


def test_a_chunk_carries_no_more_text_and_ids_than_its_budget():
    driver = Driver(single_bytes())
    for uid in range(3):
        driver.open(uid).say("和" * 500, finish(uid), uid=uid)
    chunks = 0
    while (chunk := driver.read(1000)) is not None:
        chunks += 1
        assert sum(len(text.encode()) for text in chunk.texts) + chunk.token_ids.nbytes <= 1000
    assert chunks < 100
    driver.end()
    assert driver.text == dict.fromkeys(range(3), "和" * 500)


def test_nothing_to_tell_is_no_chunk():
    driver = Driver(single_bytes()).open()
    assert driver.read().opened[0].uid == 0
    assert driver.read() is None
    assert (driver.logic.entries, driver.logic.pending) == (1, 0)
    driver.step({}, finish()).end()


def test_the_prompt_survives_the_message_it_came_in():
    driver = Driver(single_bytes())
    tokens = array([3, 1, 4])
    driver.logic.open(Open(0, tokens, 3, TextOptions((), False, True, 0)))
    tokens[:] = -1  # the ring's bytes are written again once the message is released
    driver.step({}, finish()).end()
    assert driver.prompts[0] == [3, 1, 4]


def test_a_finish_without_open_is_a_terminal_with_its_error():
    end = finish(9, reason="error", error="the prompt is too long")
    driver = Driver(single_bytes()).step({}, end).end()
    terminal = driver.terminals[9]
    assert (terminal.reason, terminal.error) == ("error", "the prompt is too long")
    assert (terminal.tokens, terminal.characters) == (0, 0)
    assert not driver.prompts


# -- restarts ---------------------------------------------------------------------------------


@pytest.mark.parametrize("min_tokens", [0, 3])
@pytest.mark.parametrize("stop", [(), ("和é",)], ids=["no_stop", "stop"])
@pytest.mark.parametrize("name", ["single_bytes", "byte_level", "llama_like"])
def test_a_continuing_request_gives_the_text_that_an_uninterrupted_one_would(
    name, stop, min_tokens
):
    tokenizer = EVERY[name]()
    ids = tokenizer.encode("to be 和é or not", add_special_tokens=False).ids
    options = dict(stop=stop, min_tokens=min_tokens)
    for begin in range(1, len(ids)):
        whole = Driver(tokenizer).open(**options).feed(ids[:begin]).read_all()
        if whole.logic.stopped:
            break
        before = whole.text.get(0, "")
        whole.feed(ids[begin:], finish()).end()
        driver = Driver(tokenizer).open(output=ids[:begin], **options)
        driver.feed(ids[begin:], finish()).read_all()
        assert before + driver.text.get(0, "") == whole.text[0]
        assert ids[:begin] + driver.ids[0] == whole.ids[0]
        assert driver.prompts[0] == [7, 8]
        assert driver.terminals[0].stop_reason == whole.terminals[0].stop_reason
        assert driver.terminals[0].tokens == whole.terminals[0].tokens
        assert driver.logic.entries == driver.logic.pending == 0
    assert begin > 3


@pytest.mark.parametrize("stop", [(), ("zz",)])
@pytest.mark.parametrize("name", EVERY)
def test_text_that_was_told_in_part_goes_on_where_it_was(name, stop):
    """Deltas may be cut anywhere: text may be ahead of the tokens, or behind them."""
    tokenizer = EVERY[name]()
    ids = tokenizer.encode("to be 和é or not", add_special_tokens=False).ids
    whole = Driver(tokenizer).open(stop=stop).feed(ids, finish()).end().text[0]
    for begin in (1, len(ids) // 2, len(ids)):
        for delivered in range(len(whole) + 1):
            driver = Driver(tokenizer).open(output=ids[:begin], stop=stop, delivered=delivered)
            driver.feed(ids[begin:], finish()).read_all()
            assert whole[:delivered] + driver.text.get(0, "") == whole
            assert driver.terminals[0].characters == len(whole)


def test_a_continuing_requests_terminal_counts_its_whole_text():
    driver = Driver(single_bytes()).open(output=byte_ids(b"abc")).say("de", finish()).read_all()
    assert (driver.text[0], driver.terminals[0].tokens) == ("de", 5)
    assert driver.terminals[0].characters == 5


def test_a_request_that_continues_past_its_stop_string_ends_at_once():
    # It restarted between the stop string and the scheduler's Finish, a token was on its way.
    driver = Driver(single_bytes()).open(output=byte_ids(b"xabc"), stop=("ab",))
    driver.say("d").read_all()
    assert driver.logic.stopped == [0], "the scheduler must hear of it again"
    driver.say("e", finish()).read_all()
    assert (driver.text.get(0, ""), driver.ids.get(0, [])) == ("", [])
    terminal = driver.terminals[0]
    assert (terminal.reason, terminal.stop_reason, terminal.tokens) == ("stop", "ab", 3)


def test_tokens_that_were_seen_are_ignored():
    driver = Driver(single_bytes()).open(output=byte_ids(b"ab"))
    driver.index[0] = 0
    driver.say("abcd").read()
    driver.index[0] = 3
    driver.say("de", finish()).read_all()
    assert driver.text[0] == "cde"
    assert driver.ids[0] == byte_ids(b"cde")
    assert driver.terminals[0].tokens == 5


@pytest.mark.parametrize("gap", [1, 5])
def test_a_gap_in_the_tokens_is_a_bug(gap):
    driver = Driver(single_bytes()).open(3).say("ab", uid=3)
    driver.index[3] += gap
    with pytest.raises(ProtocolBug, match=r"request 3: token \d arrived, but token 2 was expected"):
        driver.say("c", uid=3)


def test_tokens_of_a_request_that_is_not_open_are_a_bug():
    driver = Driver(single_bytes())
    driver.index[4] = 0
    with pytest.raises(ProtocolBug, match="request 4"):
        driver.say("a", uid=4)
    driver.open(4).say("a", finish(4), uid=4)
    with pytest.raises(ProtocolBug, match="request 4"):
        driver.say("a", uid=4)
