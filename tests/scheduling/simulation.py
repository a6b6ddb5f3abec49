"""The scheduler and the block manager alone, message by message as a test likes it.

The simulated runner keeps a KV cache in which each position holds the hash of all tokens up
to it. A row may only run if every position of its context holds the hash that its own
sequence has there; the token it samples is a function of that hash. So a wrong block, a
block written too early, a stale table or a wrong token shows at once, as garbage would.

Messages wait on one queue per edge; whoever drives the simulation picks the next edge.
"""

import random
from collections import defaultdict, deque

import numpy as np

from nanoactor.kv.hashing import block_hashes
from nanoactor.kv.manager import BlockManager
from nanoactor.messages import (
    Abort,
    Admit,
    Free,
    Match,
    Plan,
    Reject,
    RequestSpec,
    SampledTokens,
    Step,
    StepDone,
    StepWanted,
    Stop,
    Stopping,
    TextOptions,
)
from nanoactor.models.columns import pack
from nanoactor.scheduling.config import SchedulerConfig
from nanoactor.scheduling.scheduler import Scheduler

SALT = b"0123456789abcdef"
VOCABULARY = 50
EOS = 7


def extend(state, token):
    return hash((state, token))


def sample(state):
    return state % VOCABULARY


def reference(prompt, max_tokens, stop_ids, min_tokens, max_model_len):
    """What one sequence alone would say."""
    state = 0
    for token in prompt:
        state = extend(state, token)
    output = []
    while True:
        output.append(sample(state))
        state = extend(state, output[-1])
        if output[-1] in stop_ids and len(output) >= min_tokens:
            return output
        if len(output) == max_tokens or len(prompt) + len(output) == max_model_len:
            return output


class Runner:
    """Executes steps in order, as a device does: later rows see what earlier steps wrote."""

    def __init__(self, config):
        self.size = config.block_size
        self.kv = np.zeros(config.blocks * config.block_size, object)
        self.tables = defaultdict(list)
        self.lengths = {}
        self.state = {}
        self.next_token = {}
        self.decoding = set()
        self.steps = 0

    def run(self, step: Step) -> StepDone:
        assert step.step == self.steps + 1
        self.steps = step.step
        self.update_tables(step)
        for slot in step.leaves.tolist():
            self.decoding.remove(slot)
        for slot in step.joins.tolist():
            assert slot not in self.decoding
            self.decoding.add(slot)
        tokens, at = [], 0
        columns = (step.slots, step.starts, step.counts, step.samples)
        rows = zip(*(column.tolist() for column in columns), strict=True)
        for slot, start, count, samples in rows:
            chunk = step.token_ids[at : at + count].tolist()
            at += count
            tokens += self.row(slot, start, chunk, samples)
        assert at == len(step.token_ids)
        for slot in sorted(self.decoding):
            tokens += self.row(slot, self.lengths[slot], [self.next_token[slot]], True)
        none = np.zeros(0, np.int32)
        return StepDone(step.step, np.array(tokens, np.int32), 0.001, 0, none, [], none)

    def update_tables(self, step):
        at = 0
        changes = (step.table_slots, step.table_starts, step.table_counts)
        for slot, start, count in zip(*(array.tolist() for array in changes), strict=True):
            del self.tables[slot][start:]
            assert len(self.tables[slot]) == start
            self.tables[slot] += step.table_blocks[at : at + count].tolist()
            at += count
        assert at == len(step.table_blocks)

    def row(self, slot, start, chunk, samples):
        state = self.kv[self.address(slot, start - 1)] if start else 0
        if slot in self.decoding:  # no other sequence can have had the slot since its last row
            assert self.state[slot][1] == state, f"slot {slot}: its KV was overwritten"
        for offset, token in enumerate(chunk):
            state = extend(state, token)
            self.kv[self.address(slot, start + offset)] = state
        self.lengths[slot] = start + len(chunk)
        self.state[slot] = (self.lengths[slot], state)
        self.check_context(slot)
        if not samples:
            return []
        self.next_token[slot] = sample(state)
        return [self.next_token[slot]]

    def address(self, slot, position):
        return self.tables[slot][position // self.size] * self.size + position % self.size

    def check_context(self, slot):
        """No two positions of a context may share a place: that would be one overwritten."""
        blocks = self.tables[slot][: -(-self.lengths[slot] // self.size)]
        assert len(set(blocks)) == len(blocks)


class Simulation:
    def __init__(self, config: SchedulerConfig, seed=0):
        self.config = config
        self.scheduler = Scheduler(config)
        self.manager = BlockManager(
            config.blocks, config.block_size, config.max_num_seqs, config.max_model_len, SALT
        )
        self.runner = Runner(config)
        self.rng = random.Random(seed)
        self.edges = {name: deque() for name in ("to_s", "credits", "done", "stop", "to_b", "to_r")}
        self.outputs = {}
        self.finished = {}
        self.opened = set()
        self.expected = {}
        self.uid = 0
        self.stop_after = {}
        self.decode_batch = set()
        self.in_flight = {}
        """By step that is planned and not done: the slots whose rows it has."""

    # -- what happens from outside --

    def request(self, prompt, max_tokens=20, stop_ids=(EOS,), min_tokens=0, priority=0, stop=None):
        uid, self.uid = self.uid, self.uid + 1
        tokens = np.array(prompt, np.int32)
        self.expected[uid] = reference(
            prompt, max_tokens, stop_ids, min_tokens, self.config.max_model_len
        )
        if stop is not None:
            self.stop_after[uid] = stop
        spec = RequestSpec(
            priority,
            pack({"temperature": 0.0, "seed": uid}),
            Stopping(max_tokens, min_tokens, tuple(stop_ids), ()),
            TextOptions((), False, True, 0),
        )
        hashes = block_hashes(tokens, self.config.block_size, SALT)
        self.edges["to_s"].append(Admit(uid, spec, tokens, len(tokens), hashes))
        return uid

    def reject(self):
        uid, self.uid = self.uid, self.uid + 1
        self.expected[uid] = None
        self.edges["to_s"].append(Reject(uid, "too long"))
        return uid

    def abort(self, uid):
        # From the frontend, which has an edge of its own: it may overtake the admission.
        self.scheduler_gets(Abort(uid))

    # -- one delivery --

    def step(self):
        """Deliver one message from a random edge; False where none waits."""
        ready = [name for name, queue in self.edges.items() if queue]
        if not ready:
            return False
        self.deliver(self.rng.choice(ready))
        return True

    def deliver(self, name):
        message = self.edges[name].popleft()
        if name in ("to_s", "credits", "done", "stop"):
            self.scheduler_gets(message)
        elif name == "to_b":
            self.manager_gets(message)
        else:
            done = self.runner.run(message)
            self.edges["done"].append(done)
            if self.config.plan_lead == "late":
                self.edges["done"].append(StepWanted(done.step + 2))

    def scheduler_gets(self, message):
        if isinstance(message, StepDone):
            del self.in_flight[message.step]
        for edge, out in self.scheduler.handle(message):
            if edge == "blocks":
                self.watch_slots(out)
                self.edges["to_b"].append(out)
            else:
                self.text_gets(out)
        assert len(self.scheduler._in_flight) <= self.config.depth

    def watch_slots(self, message):
        """No slot goes to another sequence while a step in flight has a row for it."""
        if isinstance(message, Plan):
            self.decode_batch -= set(message.leaves.tolist())
            self.decode_batch |= set(message.joins.tolist())
            self.in_flight[message.step] = self.decode_batch | set(message.slots.tolist())
        elif isinstance(message, Match):
            assert not any(message.slot in slots for slots in self.in_flight.values())

    def manager_gets(self, message):
        match message:
            case Match():
                self.manager.match(message)
            case Plan():
                step = self.manager.bind_blocks(message)
                used = len(step.token_ids) + int(self.manager._decoding.sum())
                assert 0 < used <= self.config.max_num_batched_tokens
                self.edges["to_r"].append(step)
            case SampledTokens():
                self.manager.record_tokens(message)
            case Free():
                self.manager.free(message)
        self.manager.check()
        if (credits_ := self.manager.take_credits()) is not None:
            self.edges["credits"].append(credits_)

    def text_gets(self, message):
        if not hasattr(message, "finishes"):
            assert message.uid not in self.opened
            self.opened.add(message.uid)
            self.outputs[message.uid] = []
            return
        for uid, index, token in zip(
            message.uids.tolist(),
            message.indices.tolist(),
            message.token_ids.tolist(),
            strict=True,
        ):
            assert uid not in self.finished, "a token after the end"
            assert index == len(self.outputs[uid])
            self.outputs[uid].append(token)
            if self.stop_after.get(uid) == index:
                self.edges["stop"].append(Stop(np.array([uid], np.int64)))
        for finish in message.finishes:
            assert finish.uid not in self.finished, "a second terminal"
            self.finished[finish.uid] = finish

    # -- the end --

    def drain_until(self, condition):
        while not condition():
            assert self.step()

    def drain(self, limit=60_000):
        for _ in range(limit):
            if not self.step():
                break
        else:
            raise AssertionError("it does not come to an end: " + self.stories())
        self.check_end()

    def check_end(self):
        assert set(self.finished) == set(self.expected), self.stories()
        for uid, expected in self.expected.items():
            output, finish = self.outputs.get(uid, []), self.finished[uid]
            if expected is None:
                assert finish.reason in ("error", "abort")
            elif finish.reason in ("abort",) or uid in self.stop_after:
                assert output == expected[: len(output)]
            else:
                assert output == expected, f"request {uid}: {output} != {expected}"
        self.scheduler.check_idle()
        assert not self.scheduler.live
        assert not self.scheduler.arrivals.tombstones
        assert not self.manager.held
        assert self.manager.pool.available == self.config.blocks
        assert self.scheduler.budget.credits == self.config.blocks

    def stories(self):
        return "; ".join(s.describe() for s in self.scheduler.live.values())
