"""Events for a scheduler without actors, and what is read from its turns."""

import numpy as np

from nanoactor.kv.hashing import block_hashes
from nanoactor.messages.engine import (
    Admit,
    Answer,
    RequestSpec,
    StepDone,
    Stopping,
    TextOptions,
    Tokens,
    Turn,
)
from nanoactor.messages.rows import Want
from nanoactor.models.sampling.columns import pack
from nanoactor.scheduling.config import SchedulerConfig
from nanoactor.scheduling.scheduler import Scheduler

SALT = b"0123456789abcdef"
NONE = np.empty(0, np.int32)


def int32(*values):
    return np.array(values, np.int32)


def scheduler(**changes):
    values = dict(
        blocks=20, block_size=4, max_num_seqs=4, max_num_batched_tokens=32, max_model_len=64
    )
    return Scheduler(SchedulerConfig(**{**values, **changes}))


def admit(prompt, answers, uid=0, priority=0, **asked):
    tokens = np.array(prompt, np.int32)
    sampling = b"".join(pack({"seed": number}) for number in range(answers))
    options, stopping = TextOptions((), False, True, 0), Stopping(20, 0, (), ())
    spec = RequestSpec(priority, sampling, stopping, options, **asked)
    return Admit(uid, spec, tokens, len(tokens), block_hashes(tokens, 4, SALT))


def answered(turn, admitted=(), *, freed=(), shared=(), tainted=()):
    """The block manager's answer: nothing is found. `freed` are (fence, blocks), `shared` (slot,
    blocks)."""
    zeros = np.zeros(len(admitted), np.int32)
    fences, blocks = zip(*freed, strict=True) if freed else ((), ())
    slots, counts = zip(*shared, strict=True) if shared else ((), ())
    return Answer(
        turn.number,
        np.array(admitted, np.int64),
        hits=zeros,
        refunds=zeros,
        fences=int32(*fences),
        freed=int32(*blocks),
        slots=int32(*slots),
        shared=int32(*counts),
        encoder=None,
        tainted=np.array(tainted, np.int64),
    )


def of_kind(sent, kind):
    return [message for _, message in sent if isinstance(message, kind)]


def turn_of(sent):
    """The first turn to which an event has led."""
    return of_kind(sent, Turn)[0]


def finishes(sent):
    """By uid: the reasons of ends."""
    every = [finish for tokens in of_kind(sent, Tokens) for finish in tokens.finishes]
    return {finish.uid: finish.reason for finish in every}


def begun(logic, prompt, answers):
    """Have a request's prompt planned to its end; returns the turn with the plan, which is
    answered."""
    turn = turn_of(logic.handle(admit(prompt, answers)))
    size = logic.config.block_size
    assert [(one.uid, one.blocks) for one in turn.admissions] == [(0, -(-len(prompt) // size))]
    sent = logic.handle(answered(turn, [0]))
    return turn if turn.plan else turn_of(sent)


def done(plan, tokens, counts=(), step=None):
    return StepDone(step or plan.step, int32(*counts), int32(*tokens), 0.0, 1)


def rows_of(plan):
    """(slot, start, count) of the rows of a plan."""
    columns = plan.rows.slots, plan.rows.starts, plan.rows.counts
    return [*zip(*(column.tolist() for column in columns), strict=True)]


def copies_of(turn):
    """(request, source slot) of the sequences that begin as copies."""
    rows = turn.plan.rows.take(turn.plan.rows.copies)
    new = turn.plan.admissions
    uids = dict(zip(new.slots.tolist(), new.uids.tolist(), strict=True))
    pairs = zip(rows.slots.tolist(), rows.sources.tolist(), strict=True)
    return [(uids[slot], source) for slot, source in pairs]


def joining(plan):
    """The slots whose rows decode from this plan on."""
    return plan.rows.slots[plan.rows.wants & Want.DECODE > 0].tolist()
