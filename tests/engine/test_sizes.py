"""No admissible request can make a record that is larger than its edge carries."""

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest

from nanoactor import SamplingParams
from nanoactor.kv.hashing import HASH_BYTES
from nanoactor.messages.engine import (
    Admission,
    Admissions,
    Admit,
    Answer,
    Continue,
    Copies,
    Failures,
    Finish,
    Forks,
    KnownTokens,
    Open,
    Opened,
    Plan,
    RequestSpec,
    Step,
    StepDone,
    Stop,
    Stopping,
    Submit,
    TextOptions,
    TokenRules,
    Tokens,
    Turn,
)
from nanoactor.messages.grammar import (
    MAX_REASON,
    MAX_RUN,
    BeginGrammar,
    CloseGrammars,
    DropMasks,
    ForcedTokens,
    GrammarsFailed,
    GrammarTokens,
    Masks,
    MasksReady,
    OpenGrammar,
)
from nanoactor.messages.rows import Rows
from nanoactor.messages.scores import RequestScores, ScoreRequests, StepScores, TokenScores
from nanoactor.model_files.files import max_prompt_bytes, read_model_files
from nanoactor.models.limits import MAX_FREEZE_IDS
from nanoactor.models.sampling import columns
from nanoactor.options.config import EngineConfig
from nanoactor.placement.topology import engine_topology
from nanoactor.requests.grammar_spec import MAX_GRAMMAR_BYTES
from nanoactor.requests.params import (
    MAX_ANSWERS,
    MAX_BAD_WORD_LENGTH,
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_RULED_IDS,
    MAX_STOP_IDS,
    MAX_STOP_LENGTH,
    MAX_STOP_STRINGS,
)
from nanoactor.runtime.codec import encode
from nanoactor.setup.actors import MAX_DELTA_BYTES, MAX_MASKS_PER_MESSAGE, ActorConfig
from nanoactor.text.detokenizer import Detokenizer
from tests.engine.conftest import DEMO
from tests.engine.harness import collect, engine, greedy, ids
from tests.simulation.reference import LetterDecoders


def i32(*shape):
    return np.zeros(shape, np.int32)


def worst_messages(config, files):
    """(source, label, message): the largest of each kind that the protocol allows."""
    length, seqs, step = files.max_model_len, config.max_num_seqs, config.max_num_batched_tokens
    blocks = -(-length // (config.block_size or 16))
    hashes = np.zeros((blocks, HASH_BYTES), np.uint8)
    options = TextOptions(("\U0001f600" * MAX_STOP_LENGTH,) * MAX_STOP_STRINGS, True, True, 0)
    sampling = columns.pack({"seed": 2**64 - 1}) * MAX_ANSWERS
    eos = tuple(range(2**30, 2**30 + len(files.eos_token_ids)))
    stopping = Stopping(1, 1, eos, tuple(range(2**30, 2**30 + MAX_STOP_IDS)))
    ids, spellings = i32(MAX_RULED_IDS), 2 * MAX_BAD_WORDS
    words = i32(spellings * MAX_BAD_WORD_TOKENS)
    rules = TokenRules(ids, ids, ids.astype(np.float32), words, i32(spellings))
    bad_words = ("\U0001f600" * MAX_BAD_WORD_LENGTH,) * MAX_BAD_WORDS
    grammar = "x" * MAX_GRAMMAR_BYTES
    masked = i32(seqs * (MAX_STOP_IDS + len(eos)))
    rows = i32(seqs)
    admissions = Admissions(
        slots=rows,
        uids=np.zeros(seqs, np.int64),
        sampling=i32(seqs, columns.WORDS),
        unmasked_from=rows,
        masked_ids=masked,
        masked_counts=rows,
        freeze_ids=i32(seqs, MAX_FREEZE_IDS),
        rope_deltas=rows,
        prompt_lengths=rows,
        rule_rows=rows,
        rules=(rules,) * seqs,
        scores=ScoreRequests(rows, rows, rows),
    )
    most = config.max_logprobs
    scored = TokenScores(
        i32(seqs + step).view(np.float32),
        i32(seqs + step),
        i32(seqs + step),
        i32((seqs + step) * most),
        i32((seqs + step) * most).view(np.float32),
    )
    flags = np.zeros(seqs, np.bool_)
    text = "x" * max_prompt_bytes(files)
    longs = np.zeros(seqs, np.int64)
    spec = RequestSpec(0, sampling, stopping, options, rules, grammar=grammar)
    submit = Submit(0, spec, None, text, text, i32(0), bad_words=bad_words)
    yield "frontend", "tokenizer.0", submit
    yield "tokenizer.0", "scheduler", Admit(0, spec, i32(length), length, hashes)
    pairs = Rows(rows, rows, rows, np.zeros(seqs, np.uint8), rows)
    plan = Plan(1, pairs, rows, rows, admissions)
    # The last to be admitted may be as long as any, the others are what a step has tokens for.
    each = step // seqs
    admitted = [Admission(0, 0, 0, i32(length), hashes, blocks)]
    admitted += [Admission(0, 0, 0, i32(each), hashes[: each // 16], blocks)] * (seqs - 1)
    yield (
        "scheduler",
        "blocks",
        Turn(
            number=1,
            step=1,
            done=0,
            fence=0,
            failures=Failures(rows, rows),
            forks=Forks(rows, rows),
            known=KnownTokens(rows, rows, i32(seqs * MAX_RUN), rows, rows),
            frees=rows,
            drop_pixels=None,
            forget_index=1,
            admissions=tuple(admitted),
            plan=plan,
            drop_masks=DropMasks(longs),
        ),
    )
    tables = dict(table_slots=rows, table_starts=rows, table_counts=rows)
    tables["table_blocks"] = i32(seqs * blocks)
    copies, ids = Copies(rows, rows), i32(step + seqs)
    yield (
        "blocks",
        "runners",
        Step(1, pairs, rows, ids, **tables, admissions=admissions, copies=copies),
    )
    counts = dict.fromkeys(("hits", "refunds", "fences", "freed", "slots", "shared"), rows)
    yield "blocks", "scheduler", Answer(1, longs, **counts, encoder=None, tainted=longs)
    done = StepDone(1, rows, rows, 0.0, 0, scores=StepScores(rows, scored))
    yield "runner.0", "scheduler", done
    yield "scheduler", "detokenizer", Open(0, i32(length), length, options)
    runs = RequestScores(np.zeros(2 * seqs, np.int64), np.tile(flags, 2), i32(2 * seqs), scored)
    finish = Finish(2**62, "failed", "\U0001f600" * MAX_STOP_LENGTH, "e" * 100, 1, 1, 1, True)
    yield "scheduler", "detokenizer", Tokens(1, longs, rows, rows, (finish,), runs)
    many = np.zeros(seqs * MAX_RUN, np.int64), i32(seqs * MAX_RUN), i32(seqs * MAX_RUN)
    yield "scheduler", "detokenizer", Tokens(1, *many, (finish,))
    yield from worst_of_grammars(config, files)
    yield "frontend", "scheduler", Continue(2**62, i32(MAX_ANSWERS), i32(MAX_ANSWERS))
    yield "detokenizer", "scheduler", Stop(np.zeros(config.max_waiting_requests, np.int64))


def worst_of_grammars(config, files):
    seqs = config.max_num_seqs
    rows, longs, run = i32(seqs), np.zeros(seqs, np.int64), i32(seqs * MAX_RUN)
    opened = OpenGrammar(0, "x" * MAX_GRAMMAR_BYTES, 0, i32(files.max_model_len), True, 2**31 - 1)
    yield "scheduler", "grammar", opened
    yield "scheduler", "grammar", BeginGrammar(0, 0, i32(2))
    yield "scheduler", "grammar", GrammarTokens(longs, rows, rows)
    yield "scheduler", "grammar", CloseGrammars(longs)
    yield "scheduler", "blocks", DropMasks(longs)
    yield "scheduler", "blocks", KnownTokens(rows, rows, run, rows, rows)
    yield "blocks", "runners", DropMasks(longs)
    masks = i32(MAX_MASKS_PER_MESSAGE, -(-files.config.vocab_size // 32))
    several = np.zeros(MAX_MASKS_PER_MESSAGE, np.int64), i32(MAX_MASKS_PER_MESSAGE)
    yield "grammar", "runners", Masks(*several, masks, longs)
    yield "grammar", "scheduler", ForcedTokens(longs, rows, rows, run)
    reasons = ["\U0001f600" * MAX_REASON] * seqs
    yield "grammar", "scheduler", GrammarsFailed(longs, reasons, longs)
    yield "runner.0", "scheduler", MasksReady(0, longs, rows)


def edges_of(config, files):
    return engine_topology(ActorConfig(config, files, b"s" * 16)).edges


@pytest.mark.parametrize(
    "options",
    [
        dict(),
        dict(max_num_seqs=1, max_num_batched_tokens=1, max_model_len=2),
        dict(max_num_seqs=2000, max_num_batched_tokens=2000),
        dict(block_size=1, max_num_seqs=512),
        dict(max_num_batched_tokens=200_000),
        dict(max_logprobs=1000),
    ],
    ids=str,
)
def test_every_message_fits_its_edge_at_its_largest(options):
    config = EngineConfig(str(DEMO), **options)
    files = read_model_files(config)
    edges = {(e.source, e.label): e for e in edges_of(config, files)}
    for source, label, message in worst_messages(config, files):
        size = encode(message).nbytes
        capacity = edges[source, label].capacity
        assert size <= capacity // 2, (source, label, type(message).__name__, size, capacity)


def test_a_chunk_stays_within_its_edge_however_much_is_pending():
    config = EngineConfig(str(DEMO))
    files = read_model_files(config)
    (edge,) = [e for e in edges_of(config, files) if e.label == "frontend"]
    detokenizer = Detokenizer(None)
    options = TextOptions((), False, True, 0)
    for uid in range(300):
        prompt = i32(files.max_model_len)
        detokenizer.open(Open(uid, prompt, len(prompt), options))
    for uid in range(300):
        detokenizer._pending[uid].text.append("\U0001f600" * 100_000)
    seen = 0
    while (chunk := detokenizer.pop_delta(MAX_DELTA_BYTES)) is not None:
        assert encode(chunk).nbytes <= edge.capacity // 2
        seen += len(chunk.opened)
        assert all(isinstance(opened, Opened) for opened in chunk.opened)
    assert seen == 300


@pytest.mark.parametrize("most", [20, 1000])
def test_log_probabilities_stay_within_a_chunks_edge_however_long_tokens_are(most):
    config = EngineConfig(str(DEMO), max_logprobs=most)
    files = read_model_files(config)
    (edge,) = [e for e in edges_of(config, files) if e.label == "frontend"]
    factory = SimpleNamespace(piece=lambda token: b"x" * 5000, new=LetterDecoders().new)
    detokenizer = Detokenizer(factory)
    options = TextOptions((), False, True, 0)
    detokenizer.open(Open(0, i32(100), 100, options))
    counts = np.full(99, most, np.int32)
    floats = np.zeros(99 * most, np.float32)
    scores = TokenScores(floats[:99], counts, counts, i32(99 * most), floats)
    runs = RequestScores(np.zeros(1, np.int64), np.ones(1, np.bool_), i32(1) + 99, scores)
    none = np.empty(0, np.int64), i32(0), i32(0)
    detokenizer.process(Tokens(1, *none, (), runs))
    told = 0
    while (chunk := detokenizer.pop_delta(MAX_DELTA_BYTES)) is not None:
        assert encode(chunk).nbytes <= edge.capacity // 2
        told += int(chunk.scores.counts.sum()) if chunk.scores else 0
    assert told == 99


def test_many_long_prefix_hits_with_many_stop_ids_join_one_step():
    """The step that admits all of them carries every block table and every masked id."""

    async def main():
        changes = dict(
            max_num_seqs=48,
            max_num_batched_tokens=512,
            num_kv_blocks=1100,
            block_size=1,
            placement="default",
            max_model_len=1024,
        )
        async with engine(DEMO, **changes) as llm:
            prompt = [(7 * i) % 2048 for i in range(900)]
            await collect(llm, ids(prompt), greedy(1))
            stops = list(range(MAX_STOP_IDS))
            params = SamplingParams.for_model(max_tokens=3, min_tokens=2, stop_token_ids=stops)
            outputs = await asyncio.gather(*(collect(llm, ids(prompt), params) for _ in range(48)))
            assert all(output.num_cached_tokens == 899 for output in outputs)

    asyncio.run(main())
