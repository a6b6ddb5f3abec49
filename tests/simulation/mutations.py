"""Bugs that we planted, which the simulation must find.

A *seam* wraps a method: it drops, doubles or reorders what passes there, whatever is inside.
A *mutation* replaces a piece of a module's source, where a bug has no seam; the functions of the
running module get the code of the changed ones, in place, so that every object and every import
sees them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import inspect
from collections.abc import Callable, Iterator
from types import FunctionType, ModuleType
from typing import Any

import numpy as np

from nanoactor.actors.blocks import BlockManagerActor
from nanoactor.actors.scheduler import SchedulerActor
from nanoactor.kv.manager import BlockManager
from nanoactor.messages.engine import Answer, Plan, Turn
from nanoactor.messages.rows import Want
from nanoactor.scheduling.steps.turns import TurnBuilder


@dataclasses.dataclass(frozen=True)
class Mutation:
    """A planted bug: what it is, and how it is planted."""

    what: str
    module: str
    old: str
    new: str


@dataclasses.dataclass(frozen=True)
class Seam:
    """A planted bug at a seam: a method that is wrapped."""

    what: str
    owner: type
    method: str
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]]


Planted = Mutation | Seam

SCHEDULER = "nanoactor.scheduling.scheduler"
ADMITTING = "nanoactor.scheduling.admission"
PREEMPTION = "nanoactor.scheduling.preemption"
PIPELINE = "nanoactor.scheduling.steps.pipeline"
ADMISSION = "nanoactor.admission.admission"
BOOK = "nanoactor.grammar.book"
READMISSION = "nanoactor.recovery.readmission"
RESUMING = "nanoactor.recovery.resuming"
RESUBMISSION = "nanoactor.recovery.resubmission"
JOURNAL = "nanoactor.recovery.journal"
PROMPT_LOGPROBS = "nanoactor.recovery.prompt_logprobs"
DETOKENIZING = "nanoactor.actors.detokenizer"
TOKENIZING = "nanoactor.actors.tokenizer"
RUNNING = "nanoactor.actors.runner"
FREE_TEXT = "nanoactor.scheduling.sequences.free_text"
POOLING = "nanoactor.scheduling.features.pooling"
IDS = "nanoactor.scheduling.sequences.ids"
CONTEXT = "nanoactor.runtime.actor"
DEPTH = "nanoactor.scheduling.steps.depth"
ARRIVALS = "nanoactor.scheduling.steps.arrivals"
HOLDING = "nanoactor.scheduling.features.holding"
BUDGET = "nanoactor.scheduling.resources.budget"
QUEUES = "nanoactor.scheduling.steps.queues"
PREFILLS = "nanoactor.scheduling.steps.prefills"
TABLE = "nanoactor.scheduling.sequences.table"
TURNS = "nanoactor.scheduling.steps.turns"
PLANNED = "nanoactor.scheduling.steps.planned"
OUTPUT = "nanoactor.scheduling.steps.output"
MANAGER = "nanoactor.kv.manager"
TABLES = "nanoactor.kv.tables"
COMPUTED = "nanoactor.kv.computed"
PREFIXES = "nanoactor.kv.prefix_index"
BINDING = "nanoactor.kv.binding"
POOL = "nanoactor.kv.pool"
CHANGES = "nanoactor.kv.index_changes"
HASHING = "nanoactor.kv.hashing"
LEFTOVERS = "nanoactor.kv.leftovers"
DETOKENIZER = "nanoactor.text.detokenizer"
FRONTEND = "nanoactor.actors.frontend"
SENDING = "nanoactor.actors.request_sending"
DELIVERY = "nanoactor.actors.delivery"
WAITING = "nanoactor.admission.waiting"
BLOCKS = "nanoactor.actors.blocks"
BATCH = "nanoactor.runner.batch.batch"
TABLE_OF_RULES = "nanoactor.runner.batch.sampling_table"
ITEMS = "nanoactor.scheduling.features.items"
PIXEL_REQUESTS = "nanoactor.scheduling.features.pixel_requests"
KEPT = "nanoactor.kv.items"
ENCODER = "nanoactor.kv.encoder_cache"
PROMPT = "nanoactor.media.prompt"
GATHER = "nanoactor.vision.gather"
WORKER = "nanoactor.actors.vision"
PIXELS = "nanoactor.runner.batch.pixels"
RESULTS = "nanoactor.scheduling.steps.results"
FORKING = "nanoactor.scheduling.features.forking"
SEQUENCE = "nanoactor.scheduling.sequences.sequence"
CONSTRAINTS = "nanoactor.scheduling.features.constraints"
MASKS = "nanoactor.runner.batch.masks"
LAYOUT = "nanoactor.runner.batch.row_layout"
SCORING = "nanoactor.runner.batch.score_table"

CONTROL = "nanoactor.actors.control"

_PATCHES = [
    Mutation(
        "steps are planned though none are to be",
        DEPTH,
        "        if self.is_paused:\n            return False\n",
        "",
    ),
    Mutation(
        "who begins anew does not know that no steps are to be planned",
        CONTROL,
        "        if self.is_paused:\n            scheduler.send(Pause(True))\n",
        "",
    ),
    Mutation(
        "of the index only what nobody holds is forgotten",
        POOL,
        "for block in [*self._index.values()]:",
        "for block in [*self._cached]:",
    ),
    Mutation(
        "what was computed before the index was forgotten is indexed after it",
        PREFIXES,
        "            holding.distrusted = True\n        self._pool.forget_all()\n",
        "            pass\n        self._pool.forget_all()\n",
    ),
    Mutation(
        "an order to forget the index is lost with a process",
        CONTROL,
        "        if self._forget_number:  # it may have been under way when a process died\n",
        "        if False:\n",
    ),
    Mutation(
        "an eviction is not told of the index",
        POOL,
        "            if self.changes is not None:\n                self.changes.forget(content)\n",
        "",
    ),
    Mutation(
        "of two changes of a block that were not told the first is told",
        CHANGES,
        "if self._changes.pop(content, is_present) == is_present:",
        "if content not in self._changes:",
    ),
    Mutation(
        "what was told of the index before a death is taken for told",
        BLOCKS,
        "            self._manager.pool.publish_index()",
        "            if self._manager.pool.changes is None:\n"
        "                self._manager.pool.publish_index()",
    ),
    Mutation(
        "what was told of the index before a death stays",
        CHANGES,
        "        if events.cleared:\n            self.contents.clear()\n",
        "",
    ),
    Mutation(
        "blocks are freed without a fence",
        TABLES,
        "self.pool.release(table[::-1], fence)",
        "self.pool.release(table[::-1], 0)",
    ),
    Mutation(
        "freed credits count at once",
        BUDGET,
        "            self._fenced_blocks.append((fence, blocks))\n",
        "            self._credits += blocks\n",
    ),
    Mutation(
        "a slot is given away while steps have rows in it",
        BUDGET,
        "self._fenced_slots.append((fence, slot))",
        "self._fenced_slots.append((0, slot))",
    ),
    Mutation(
        "abort and finish both free",
        ADMITTING,
        "        self._turn.free(sequence.slot)\n",
        "        self._turn.free(sequence.slot)\n"
        "        if any(p.has_row(sequence.slot) for p in self._pipeline.in_flight):\n"
        "            self._turn.free(sequence.slot)\n",
    ),
    Mutation(
        "a block of overrun tokens is indexed",
        PREFIXES,
        "self._to_index += zip(slots[full].tolist(), known[full].tolist(), strict=True)",
        "self._to_index += zip(slots[full].tolist(), (known[full] + 2).tolist(), strict=True)",
    ),
    Mutation(
        "a block is indexed before it is computed",
        BINDING,
        "            self._index.index_full_blocks(slot, end)\n",
        "            self._index.index_full_blocks(slot, int(tables.known[slot]))\n",
    ),
    Mutation(
        "a refund is forgotten",
        BUDGET,
        "        self._credits += blocks\n",
        "        self._credits += min(blocks, 1)\n",
    ),
    Mutation(
        "every hit is refunded, even of blocks that nobody held",
        MANAGER,
        "refund = sum(map(self.pool.share, table))",
        "refund = len([self.pool.share(block) for block in table])",
    ),
    Mutation(
        "a late Stop ends a request twice",
        SCHEDULER,
        "            if (sequence := self.live.get(uid)) is not None:\n"
        '                self._end(sequence, End("stop"))',
        "            if (sequence := self.live.get(uid)) is not None:\n"
        '                self._end(sequence, End("stop"))\n'
        "            else:\n"
        '                self._output.finish(uid, End("stop"))',
    ),
    Mutation(
        "an abort of a finished request leaves a tombstone",
        SCHEDULER,
        "if self.arrivals.note_early_abort(event):",
        "if event.uid not in self.live and not self.arrivals.tombstones.add(event.uid):",
    ),
    Mutation(
        "an abort that overtakes its request is lost",
        ARRIVALS,
        "            self.tombstones.add(event.uid)",
        "            self.tombstones.discard(event.uid)",
    ),
    Mutation(
        "a result is dropped for a preempted sequence",
        OUTPUT,
        "            if not sequence.accepts(token, self._step):\n",
        '            waits = sequence.phase.name == "WAITING"\n'
        "            if waits or not sequence.accepts(token, self._step):\n",
    ),
    Mutation(
        "the result of an ended sequence is taken",
        SEQUENCE,
        "return self.phase is not Phase.FINISHED and step > self.discarded_until\n",
        "return step > self.discarded_until\n",
    ),
    Mutation(
        "a hash takes its grandparent for its parent",
        PREFIXES,
        'parent, extra = hashes[-1] if hashes else b""',
        'parent, extra = hashes[-2] if len(hashes) > 1 else b""',
    ),
    Mutation(
        "the hash does not know its parent",
        HASHING,
        "        parent = block_hash(parent, tokens[start",
        '        parent = block_hash(b"", tokens[start',
    ),
    Mutation(
        "a match leaves nothing to compute",
        MANAGER,
        "hashes[: (len(tokens) - 1) // self._block_size]",
        "hashes[: len(tokens) // self._block_size]",
    ),
    Mutation(
        "a new block comes one token late",
        TABLE,
        "eligible & (scheduled == self.capacity)",
        "eligible & (scheduled == self.capacity + 1)",
    ),
    Mutation(
        "children are evicted after their parents",
        TABLES,
        "self.pool.release(table[::-1], fence)",
        "self.pool.release(table, fence)",
    ),
    Mutation(
        "a block that a hit took out of quarantine is handed out",
        POOL,
        "if not self._references[block] and self._ticket[block] == ticket:",
        "if self._ticket[block] == ticket:",
    ),
    Mutation(
        "a second quarantine ends with the first",
        POOL,
        "if not self._references[block] and self._ticket[block] == ticket:",
        "if not self._references[block]:",
    ),
    Mutation(
        "an evicted block stays indexed",
        POOL,
        "            self.evictions += 1\n            self.forget(block)",
        "            self.evictions += 1",
    ),
    Mutation(
        "a shared block stays in the order of eviction",
        POOL,
        "        self._references[block] += 1\n        self._cached.pop(block, None)",
        "        self._references[block] += 1",
    ),
    Mutation(
        "more is planned than the token budget",
        SCHEDULER,
        "budget = self.config.max_num_batched_tokens - num_decodes",
        "budget = self.config.max_num_batched_tokens",
    ),
    Mutation(
        "what the frontend admits goes to a tokenizer too",
        SENDING,
        "        else:\n            self._send_to_tokenizer(entry, submit)\n",
        "        self._send_to_tokenizer(entry, submit)\n",
    ),
    Mutation(
        "the frontend admits an answer without its grammar",
        ADMISSION,
        "        tokens, spec = submit.token_ids, submit.spec\n",
        '        spec = dataclasses.replace(submit.spec, grammar="")\n'
        "        submit, tokens = dataclasses.replace(submit, spec=spec), submit.token_ids\n",
    ),
    Mutation(
        "the frontend admits a request without its rules",
        ADMISSION,
        "        tokens, spec = submit.token_ids, submit.spec\n",
        "        spec = dataclasses.replace(submit.spec, rules=None)\n"
        "        submit, tokens = dataclasses.replace(submit, spec=spec), submit.token_ids\n",
    ),
    Mutation(
        "the frontend admits a prompt whose images nobody has placed",
        ADMISSION,
        " or submit.item_times:\n"
        "            return None\n"
        "        if len(tokens) + len(_resumed_tokens(submit)) > DIRECT_TOKENS:\n"
        "            return None\n"
        "        if self._placeholders and np.isin(tokens, self._placeholders).any():\n",
        ":\n            return None\n        if not len(tokens):\n",
    ),
    Mutation(
        "one step more is planned than the depth",
        DEPTH,
        "if steps < self._min_depth or steps >= self._max_depth:\n"
        "            return steps < self._min_depth\n",
        "if steps < self._min_depth or steps >= self._max_depth:\n"
        "            return steps <= self._min_depth\n",
    ),
    Mutation(
        "steps are planned deep however long they are",
        DEPTH,
        "return needs_work and all(",
        "return all(",
    ),
    Mutation(
        "steps are planned deep behind prompts",
        DEPTH,
        "return needs_work and all(planned.is_decode_step for planned in in_flight)",
        "return needs_work",
    ),
    Mutation(
        "beside sequences that never decode steps are planned deep however long they are",
        DEPTH,
        "needs_work = (steps - 1) * self._seconds < STEPWISE_SECONDS",
        "needs_work = True",
    ),
    Mutation(
        "steps that decode are planned as deep as beside sequences that never do",
        DEPTH,
        "        if stepwise:\n",
        "        if self._seconds:\n",
    ),
    Mutation(
        "steps that are planned deep know no limit",
        DEPTH,
        "if steps < self._min_depth or steps >= self._max_depth:\n"
        "            return steps < self._min_depth\n",
        "if steps < self._min_depth:\n            return True\n",
    ),
    Mutation(
        "the queue is served last come, first served",
        QUEUES,
        "        heapq.heappush(self._heap, (sequence.priority_key, sequence))",
        "        key = -sequence.priority_key[0], -sequence.uid\n"
        "        heapq.heappush(self._heap, (key, sequence))",
    ),
    Mutation(
        "nobody is preempted",
        PREEMPTION,
        "while missing > 0 and len(running) > 1:",
        "while False:",
    ),
    Mutation(
        "everybody is preempted",
        PREEMPTION,
        "missing -= max(1, victim.num_freeable_blocks) + (victim in starving)",
        "missing -= 0",
    ),
    Mutation(
        "the head of the queue computes what another is about to compute",
        PREFILLS,
        "if shared and (sequence.hashes[block] == head.hashes[block]).all():",
        "if shared and (sequence.hashes[block] != head.hashes[block]).all():",
    ),
    Mutation(
        "a sequence that comes back is not introduced to the runners",
        TURNS,
        "        self._sent_slots.discard(slot)\n",
        "",
    ),
    Mutation(
        "a younger prompt is computed before an older one",
        PREFILLS,
        "        for sequence in self._sequences:\n            if budget <= 0:",
        "        for sequence in reversed(self._sequences):\n            if budget <= 0:",
    ),
    Mutation(
        "a row is computed past the last token",
        TABLE,
        "(scheduled + 2 <= self.limits)",
        "(scheduled + 1 <= self.limits)",
    ),
    Mutation(
        "more is matched than a step has tokens for",
        ADMITTING,
        "while room.budget.free_slots and budget > 0:",
        "while room.budget.free_slots:",
    ),
    Mutation(
        "a late answer does not hold up the plans",
        PIPELINE,
        "if unanswered is not None and self.planned >= unanswered + self._min_depth:",
        "if False:",
    ),
    Mutation(
        "a step is planned before it is wanted",
        PIPELINE,
        "return at_once or self._requested > self.planned",
        "return at_once or self._requested >= self.planned",
    ),
    Mutation(
        "a credits message is sent although its edge is full",
        BLOCKS,
        "if self._scheduler.ready and (answer",
        "if (answer",
    ),
    Mutation(
        "the rules of a slot's last request stay",
        TABLE_OF_RULES,
        "            self._rules.pop(slot, None)\n",
        "",
    ),
    Mutation(
        "text held back passes for a stop where a request without a choice ends",
        DETOKENIZER,
        "reason not in FAILURES",
        'reason != "failed"',
    ),
    Mutation(
        "a request without a choice goes on",
        SCHEDULER,
        "in (s for s in results.choiceless if event.step > s.discarded_until):\n",
        "in []:\n",
    ),
    Mutation(
        "what a request without a choice computed is not trusted",
        RESULTS,
        "if code == NO_TOKEN)],",
        "if code < 0)],",
    ),
    Mutation(
        "a preempted request comes back without its rules",
        TURNS,
        "rules=tuple(s.spec.rules for s in sequences if s.spec.rules)",
        "rules=tuple(s.spec.rules for s in sequences "
        "if s.spec.rules and not s.history.preemptions)",
    ),
    Mutation(
        "output is thought to begin where a preempted request comes back",
        TURNS,
        "prompt_lengths=as_int32(s.prompt_length for s in sequences)",
        "prompt_lengths=as_int32(s.length for s in sequences)",
    ),
    Mutation(
        "a request begins anew with each chunk of its prompt",
        SEQUENCE,
        "        if self.began < 0:\n",
        "        if True:\n",
    ),
    Mutation(
        "the detokenizer takes tokens past a stop string",
        DETOKENIZER,
        "if entry.ended or index < entry.tokens:",
        "if index < entry.tokens:",
    ),
    Mutation(
        "the terminal is sent when the stop string is found, and again at the finish",
        DETOKENIZER,
        "            entry.ended = True\n",
        "            entry.ended = True\n"
        '            self._finish(Finish(uid, "stop", None, "", 0, 0, -1, False))\n',
    ),
    Mutation(
        "a chunk that is too large loses its rest",
        DETOKENIZER,
        "pending.text, pending.ids = [pending_text[len(text) :]], pending.ids[len(ids) :]",
        "pending.text, pending.ids = [], []",
    ),
    Mutation(
        "an abort removes the journal's entry at once",
        FRONTEND,
        "        self._sender.abort(entry)\n",
        "        self._sender.abort(entry)\n"
        "        for uid in self.journal.live_uids(entry):\n"
        "            self.journal.remove(uid)\n",
    ),
    Mutation(
        "a request that is over still counts as waiting",
        DELIVERY,
        "        if terminal.uid in self._queue:\n",
        "        if False:\n",
    ),
    Mutation(
        "a row samples after its first token",
        BATCH,
        "(firsts + counts - 1)[ends].astype(np.int32)",
        "firsts[ends].astype(np.int32)",
    ),
    Mutation(
        "a steady decode batch stays one step too long",
        TABLE,
        "self._stable_steps = int((ends - scheduled).min())",
        "self._stable_steps = int((ends - scheduled).min()) + 1",
    ),
    Mutation(
        "a decode batch stays the same although one of it has left",
        TABLE,
        "        self.positions.end_batch()\n        self.occupied[slot]",
        "        self.positions._flush_pending()\n        self.occupied[slot]",
    ),
    Mutation(
        "a decode batch stays the same although a prompt is through",
        TABLE,
        "            self.positions.interrupt()\n        self.positions.add(slot, count)",
        "            pass\n        self.positions.add(slot, count)",
    ),
    Mutation(
        "a decode batch that has changed keeps its version",
        TABLE,
        "        self._last_version += 1\n",
        "",
    ),
    Mutation(
        "columns of slots are kept although a sequence has left one",
        TABLE,
        "        self.occupied[slot] = self.running[slot] = False\n        self._columns = None",
        "        self.occupied[slot] = self.running[slot] = False",
    ),
    Mutation(
        "text is taken from the table although a character is unfinished",
        DETOKENIZER,
        "or (entry.decoder is not None and entry.decoder.has_pending_text)",
        "or entry.decoder is None",
    ),
    Mutation(
        "the queue of waiting requests has no bound",
        WAITING,
        "if len(self._uids) + requests > config.max_waiting_requests:",
        "if False:",
    ),
    Mutation(
        "what a failing row computed stays in the prefix index",
        MANAGER,
        "        self.pool.distrust(blocks)\n",
        "",
    ),
    Mutation(
        "blocks that were read before a failure was known are indexed after it",
        PREFIXES,
        "        if holding.distrusted:\n            return\n",
        "        if False:\n            return\n",
    ),
    Mutation(
        "who has read what a failing row computed goes on",
        MANAGER,
        "        self._answers.tainted += [holding.uid for holding in readers]\n",
        "        pass\n",
    ),
    Mutation(
        "results are told before it is known whom a failure concerns",
        "nanoactor.scheduling.steps.unanswered",
        "        if self._last_failure_turn > self._answered:\n            return True\n",
        "",
    ),
    Mutation(
        "a failing row's token is taken",
        RESULTS,
        "    if event.token_ids.min(initial=0) >= 0:\n",
        "    if True:\n",
    ),
    Mutation(
        "a failure is blamed on whoever has the slot now",
        MANAGER,
        "holding = next(released, None) or self.tables.holding(slot)",
        "holding = self.tables.holding(slot)",
    ),
    Mutation(
        "pages of images are freed without a fence",
        KEPT,
        "self._add(freed=[self.cache.release(item, fence)], fences=[fence])",
        "self._add(freed=[self.cache.release(item, 0)], fences=[0])",
    ),
    Mutation(
        "an image is encoded before its pixels are there",
        ITEMS,
        "if entry.is_complete or not self.pixels.is_ready(entry):",
        "if entry.is_complete or not entry.pixels:",
    ),
    Mutation(
        "a chunk reads an image before it is encoded",
        "nanoactor.scheduling.sequences.item_state",
        "return min(token_start, target) if token_start - start > self.short else start",
        "return target",
    ),
    Mutation(
        "a block's hash does not depend on its images",
        PROMPT,
        'extras[block] = extras.get(block, b"") + name',
        'extras[block] = b""',
    ),
    Mutation(
        "a block's hash does not depend on the shape of its images",
        PROMPT,
        "numbers = (span.height, span.width, first)",
        "numbers = (first,)",
    ),
    Mutation(
        "pixels that nobody wants any more are kept",
        PIXEL_REQUESTS,
        "            self.drops.append((entry.pixels, entry.number))\n",
        "",
    ),
    Mutation(
        "a worker does not say that pixels will not come",
        WORKER,
        "        self._reports.absent += numbers\n",
        "        self._reports.absent += numbers[1:]\n",
    ),
    Mutation(
        "a half encoded image goes on without its pixels",
        KEPT,
        "item.planned = item.units.complete_units(item.planned)",
        "pass",
    ),
    Mutation(
        "pages are refunded though nobody else holds them",
        ENCODER,
        "len(item.pages) if item.references > 1 else 0",
        "len(item.pages)",
    ),
    Mutation(
        "an image that is held again is evicted",
        ENCODER,
        "        self._idle.pop(key, None)\n        item.references",
        "        item.references",
    ),
    Mutation(
        "a second quarantine of an image ends with the first",
        ENCODER,
        "if item.references or item.ticket != ticket:",
        "if item.references:",
    ),
    Mutation(
        "more pages are spent than there are",
        QUEUES,
        "if not self._parked and head.pages <= pages:",
        "if not self._parked:",
    ),
    Mutation(
        "what follows an image is not told its rotary positions",
        TURNS,
        "s.items.message.rope_delta if s.items else 0",
        "0",
    ),
    Mutation(
        "items that are still to come are awaited for a request that is over",
        GATHER,
        "            self._to_drop[uid] = missing",
        "            pass",
    ),
    Mutation(
        "pixels that were dropped before they came are kept",
        PIXELS,
        "            self._dropped.add(number)",
        "            pass",
    ),
    Mutation(
        "every temporal patch of a video reads the rows of the first",
        KEPT,
        "                    first_row + low - begin, first_row + high - begin, dtype=np.int32\n",
        "                    low - begin, high - begin, dtype=np.int32\n",
    ),
    Mutation(
        "a video is let go of behind its first temporal patch",
        KEPT,
        "stops = [max(r[3] for r in rows",
        "stops = [min(r[3] for r in rows",
    ),
    Mutation(
        "an image is let go of before its last token is computed",
        KEPT,
        "            if stop <= planned:\n                self._release(held, index, step)",
        "            if stop <= planned + 1:\n                self._release(held, index, step)",
    ),
    Mutation(
        "a victim's blocks count although another answer holds them",
        SEQUENCE,
        "return self.blocks - int(self.table.shared[self.slot])",
        "return self.blocks",
    ),
    Mutation(
        "a copy shares the last block, which is not full",
        TABLES,
        "        if rest or spare:\n"
        "            table.append(self.pool.allocate())\n"
        "        if rest:",
        "        if rest:\n"
        "            self.pool.allocate()\n"
        "            table.append(source.table[full])\n"
        "            self.pool.share(table[full])\n"
        "        elif spare:\n"
        "            table.append(self.pool.allocate())\n"
        "        if False:",
    ),
    Mutation(
        "a copy's references are not counted",
        TABLES,
        "        for block in table:\n            self.pool.share(block)\n",
        "        for block in table:\n            self.pool.is_held(block)\n",
    ),
    Mutation(
        "the last block of a copy stays empty",
        TABLES,
        "self.copies.copy_block(source.table[full], table[full])",
        "self.copies.copy_block(table[full], table[full])",
    ),
    Mutation(
        "the copy of a block costs no credit",
        FORKING,
        "        budget.debit(blocks)\n",
        "",
    ),
    Mutation(
        "a copy begins while an elder waits",
        FORKING,
        "return goes_first and self._room.budget.free_slots > 0",
        "return self._room.budget.free_slots > 0",
    ),
    Mutation(
        "copies of one prompt begin before those of a more urgent one",
        FORKING,
        "sorted(followers, key=lambda each: each[0].priority_key)",
        "followers",
    ),
    Mutation(
        "a copy samples from the step's first prompt",
        LAYOUT,
        "return np.array([by_slot[slot] for slot in others",
        "return np.array([[*by_slot.values()][0] for slot in others",
    ),
    Mutation(
        "of a refused request the first answer alone gets an end",
        ARRIVALS,
        "range(event.uid, event.uid + event.answers)",
        "range(event.uid, event.uid + 1)",
    ),
    Mutation(
        "what follows a scored position is taken to be that position",
        SCORING,
        "token_ids[concatenate_ranges(ids + 1, counts)]",
        "token_ids[concatenate_ranges(ids, counts)]",
    ),
    Mutation(
        "a prefix hit skips what is to be scored",
        MANAGER,
        "usable[: max_hits // self._block_size]",
        "usable[:]",
    ),
    Mutation(
        "a prompt is scored again after a preemption",
        PREEMPTION,
        "        is_computed = victim.is_computed\n",
        "        is_computed = victim.is_computed\n"
        "        if victim.reading is not None:\n            victim.reading.num_read = 0\n",
    ),
    Mutation(
        "scores of decodes are those of prompts that end",
        BATCH,
        "np.concatenate((parts[0], asking + first, parts[1] + after_decodes))",
        "np.concatenate((parts[0], asking, parts[1] + after_decodes))",
    ),
    Mutation(
        "scores of an output that goes on are those of the decode row in its place",
        BATCH,
        "np.concatenate((parts[0], asking + first, parts[1] + after_decodes))",
        "np.concatenate((parts[0], asking + first, parts[1] + first))",
    ),
    Mutation(
        "an output that goes on has the rules of a decode row",
        LAYOUT,
        "np.concatenate((slots[self.sampled], decode, slots[late]))",
        "np.concatenate((slots[self.sampled], slots[late], decode))",
    ),
    Mutation(
        "a chunk that goes on comes before prompts' tokens",
        LAYOUT,
        "token_ids[tokens], np.array(resumed",
        "token_ids[: len(tokens)], np.array(resumed",
    ),
    Mutation(
        "the runner remembers of whom scores were wanted",
        SCORING,
        "        self.output[slots] = self._prompt[slots] = _NOT_REQUESTED\n",
        "",
    ),
    Mutation(
        "each step's scores are of the prompt's beginning",
        DETOKENIZER,
        "                entry.scored += len(tokens)\n",
        "",
    ),
    Mutation(
        "a choice is planned before its mask is there",
        CONSTRAINTS,
        "            if self._masks.is_ready(sequence.uid):",
        "            if True:",
    ),
    Mutation(
        "a choice is planned before the position before it",
        CONSTRAINTS,
        "    return sequence.scheduled == length\n",
        "    return True\n",
    ),
    Mutation(
        "a token is chosen once more while the first choice is under way",
        CONSTRAINTS,
        "                grammar.last_sampled = sequence.length\n",
        "",
    ),
    Mutation(
        "the runners are not told which masks nobody wants any more",
        CONSTRAINTS,
        "        turn.drop_masks(DropMasks(finished))\n",
        "",
    ),
    Mutation(
        "forced tokens are known while a step that is not planned yet would compute those before",
        CONSTRAINTS,
        "sequence.phase is Phase.RUNNING and sequence.scheduled == sequence.length",
        "sequence.phase is Phase.RUNNING",
    ),
    Mutation(
        "the mask behind forced tokens is awaited one position too early",
        CONSTRAINTS,
        "self._request_mask(sequence, sequence.length + len(run))",
        "self._request_mask(sequence, sequence.length + len(run) - 1)",
    ),
    Mutation(
        "what was computed behind free text is taken",
        SEQUENCE,
        "return self.phase is not Phase.FINISHED and step > self.discarded_until\n",
        "return self.phase is not Phase.FINISHED\n",
    ),
    Mutation(
        "a sequence whose free text is over goes on where it is",
        CONSTRAINTS,
        "        if sequence.slot >= 0:\n            self._running.rewind(sequence)\n",
        "        if sequence.slot >= 0:\n            self._running.prefills.push_again(sequence)\n",
    ),
    Mutation(
        "the grammar is not told what ended the free text",
        CONSTRAINTS,
        "            self._begin_grammar(sequence, grammar, [token])\n",
        "            self._begin_grammar(sequence, grammar, [])\n",
    ),
    Mutation(
        "thoughts may end an answer whose form is to come",
        SEQUENCE,
        "        if not must_continue or token not in self.spec.stopping.eos_ids:\n",
        "        if True:\n",
    ),
    Mutation(
        "text before a call may not end an answer",
        "nanoactor.scheduling.sequences.free_text",
        "gate != NO_GATE and free.call_id == NO_GATE",
        "gate != NO_GATE",
    ),
    Mutation(
        "of what was computed too far only the latest step is dropped",
        OUTPUT,
        "        if self._step <= self._discarded_until or not",
        "        if self._step == self._discarded_until or not",
    ),
    Mutation(
        "a length is lowered by one position too few",
        QUEUES,
        "self.table.rewind(sequence.slot, sequence.length - 1, stepwise=stepwise)",
        "self.table.rewind(sequence.slot, sequence.length, stepwise=stepwise)",
    ),
    Mutation(
        "an answer that comes back from free text drops all that follows",
        OUTPUT,
        "        sequence.discard_results(step)\n",
        "        sequence.discard_results(step + 1000)\n",
    ),
    Mutation(
        "who wants log-probabilities is forced",
        CONSTRAINTS,
        "self._jumps and max(sequence.spec.logprobs, sequence.prompt_logprobs) < 0",
        "self._jumps",
    ),
    Mutation(
        "a late mask of an answer that is over is kept",
        MASKS,
        "            if uid not in self._dropped:",
        "            if True:",
    ),
    Mutation(
        "the mask of an answer that is over is kept",
        MASKS,
        "            self._masks.pop(uid, None)\n            self._end",
        "            self._end",
    ),
    Mutation(
        "the first of a chunk's states is kept, not the last",
        BATCH,
        "ends=self._read_tokens(firsts, counts, ends, len(layout.pooled))",
        "ends=np.concatenate(\n"
        "                (\n"
        "                    (firsts + counts - 1)[ends[: len(layout.sampled)]],\n"
        "                    firsts[ends[len(layout.sampled) :]],\n"
        "                )\n"
        "            ).astype(np.int32)",
    ),
    Mutation(
        "a copy that is constrained keeps no state",
        FORKING,
        "        wants = row.wants & (SAMPLE | KEEP)\n        return",
        "        wants = row.wants & SAMPLE\n        return",
    ),
    Mutation(
        "rows that continue an output are not told their tokens",
        BATCH,
        "pairs.append((layout.row_token_ids + indices, continued.token_ids.astype(np.int64)))",
        "pass",
    ),
    Mutation(
        "rows that continue an output go on where their slot's last owner was",
        BATCH,
        "            positions[decodes:end] = continued.positions\n",
        "",
    ),
    Mutation(
        "rows that decode again have the position of whoever continued an output there",
        BATCH,
        "        if len(continued.slots) or self._continued:\n            positions",
        "        if len(continued.slots):\n            positions",
    ),
    Mutation(
        "of a run the first state is kept",
        LAYOUT,
        "        unread += tokens_of_row[:-1]\n",
        "        unread += tokens_of_row[1:]\n        tokens_of_row = tokens_of_row[:1]\n",
    ),
    Mutation(
        "runs have more rows than there are",
        LAYOUT,
        "        runs &= ends <= max_rows\n",
        "",
    ),
    Mutation(
        "the end of a prompt is taken to continue an output",
        LAYOUT,
        "others.starts >= outputs[others.slots]",
        "others.starts >= 0",
    ),
    Mutation(
        "constrained sequences decode",
        TABLE,
        "        eligible &= ~self.stepwise\n",
        "        eligible &= True\n",
    ),
    Mutation(
        "constrained outputs wait behind prompts",
        PREFILLS,
        "stepwise = [s for s in self.running if s.continues and s.prefill_end > s.scheduled]",
        "stepwise = []",
    ),
    Mutation(
        "constrained outputs that need a block are not given one",
        SCHEDULER,
        "        blocked = self._running.starving\n",
        "        blocked = self._running.starving[:0]\n",
    ),
    Mutation(
        "forced tokens go on behind a sequence's end",
        OUTPUT,
        "while count < len(run) and end is None:",
        "while count < len(run):",
    ),
    Mutation(
        "a constrained output behind an image is not turned",
        KEPT,
        "dtype=np.int32) + self.delta",
        "dtype=np.int32)",
    ),
    Mutation(
        "a held answer goes on with what was sampled behind it",
        OUTPUT,
        "                self._report(sequence, token)\n",
        "                self._report(sequence, token)\n"
        "                sequence.append(token)\n"
        "                self._running.prefills.push_again(sequence)\n",
    ),
    Mutation(
        "a copy of an answer without blocks takes its tokens after they were appended to",
        HOLDING,
        "self._replace_with_copy(sequence, before[parent])",
        "self._replace_with_copy(sequence, living[parent].tokens.copy())",
    ),
    Mutation(
        "a fork that follows another takes what that one has become",
        MANAGER,
        "        for slot, (copy, tokens) in zip(slots, copies, strict=True):\n"
        "            self._release(slot, fence)\n",
        "        for slot, source in zip(slots, event.sources.tolist(), strict=True):\n"
        "            copy, tokens = tables.copy(tables.holding(slot).uid, source, spare=True)\n"
        "            self._release(slot, fence)\n",
    ),
    Mutation(
        "a fork shares the last block, which its parent goes on to write",
        TABLES,
        "        table = source.table[:full]\n",
        "        table = source.table[: full + (spare and rest > 0)]\n",
    ),
    Mutation(
        "a fork's last block stays empty",
        TABLES,
        "        if rest:\n",
        "        if rest and not spare:\n",
    ),
    Mutation(
        "what a fork gives up is not fenced by the steps of those it shared with",
        MANAGER,
        "            self._release(slot, fence)\n            tables.assign",
        "            self._release(slot, 0)\n            tables.assign",
    ),
    Mutation(
        "a fork's block costs no credit",
        HOLDING,
        "        self._room.budget.debit(len(forks))\n",
        "",
    ),
    Mutation(
        "a caller's silence ends all of its answers but one",
        HOLDING,
        "                expired += group\n",
        "                expired += group[: max(1, len(group) - 1)]\n",
    ),
    Mutation(
        "a caller's time is short by a tick",
        HOLDING,
        "_TIMEOUT_TICKS:",
        "_TIMEOUT_TICKS - 1:",
    ),
    Mutation(
        "who is held keeps its place from answers to the same request",
        HOLDING,
        "        return held[-1] if held else None\n",
        "        return None\n",
    ),
    Mutation(
        "who has given up its place while held waits in the queue",
        ADMITTING,
        "            sequence.hold()\n",
        "            self._room.waiting.push(sequence)\n",
    ),
    Mutation(
        "a preempted answer whose token is under way waits in the queue",
        PREEMPTION,
        "        is_computed = victim.is_computed\n",
        "        is_computed = False\n",
    ),
    Mutation(
        "a caller is heard before all answers have told",
        JOURNAL,
        "        due = all(len(answer.token_ids) > self.continued for answer in live)\n",
        "        due = any(len(answer.token_ids) > self.continued for answer in live)\n",
    ),
    Mutation(
        "held outputs wait behind prompts",
        SEQUENCE,
        "return self.is_stepwise and self.scheduled >= self.prompt_length",
        "return self.is_constrained and self.scheduled >= self.prompt_length",
    ),
    Mutation(
        "the block manager is not told what held answers go on with",
        HOLDING,
        "                self._turn.add_known(as_int32([sequence.slot]), as_int32([token]))\n",
        "                if sequence.history.preemptions:\n"
        "                    self._turn.add_known(as_int32([sequence.slot]), as_int32([token]))\n",
    ),
    # -- deaths: everybody begins anew --
    Mutation(
        "what was aborted before a death goes on behind it",
        FRONTEND,
        "            if entry.aborted:\n",
        "            if False:\n",
    ),
    Mutation(
        "nobody is told who lives behind a death",
        FRONTEND,
        "np.array([*self.journal.uids], np.int64)",
        "np.array([], np.int64)",
    ),
    Mutation(
        "who is over is awaited behind a death",
        IDS,
        "        self._above.update(n for n in range(self._below, below) if n not in unseen)\n",
        "",
    ),
    Mutation(
        "an answer begins again behind a death",
        RESUMING,
        "output=ToldTokens(np.array(emitted, np.int32)) if emitted else None,",
        "output=None,",
    ),
    Mutation(
        "the last token is lost in a death",
        RESUMING,
        "np.array(emitted, np.int32)) if",
        "np.array(emitted[:-1], np.int32)) if",
    ),
    Mutation(
        "text is told again behind a death",
        RESUMING,
        "delivered=characters",
        "delivered=0",
    ),
    Mutation(
        "answers change their random numbers in a death",
        RESUMING,
        "sampling=split_rows(spec.sampling)[answer.index],",
        "sampling=split_rows(spec.sampling)[0],",
    ),
    Mutation(
        "answers that are over go on behind a death",
        RESUMING,
        "live = [uid for uid in entry.uids if entry.answer(uid).terminal is None]",
        "live = list(entry.uids)",
    ),
    Mutation(
        "what was told of a prompt is told again behind a death",
        PROMPT_LOGPROBS,
        "        if not self.is_complete(length):\n            self.values = [None]",
        "        if False:\n            self.values = [None]",
    ),
    Mutation(
        "a grammar is told nothing of an answer that goes on",
        FREE_TEXT,
        "        if NO_GATE in (before, gate):",
        "        if before == 0:",
    ),
    Mutation(
        "free text has no end behind a death",
        FREE_TEXT,
        "        if free is not None:\n            gate = next_gate(free, gate, index, token)\n",
        "",
    ),
    Mutation(
        "a detokenizer keeps what it knew before a death",
        DETOKENIZING,
        "        self._detokenizer = Detokenizer(self._decoders)\n",
        "        if not hasattr(self, '_detokenizer'):\n"
        "            self._detokenizer = Detokenizer(self._decoders)\n",
    ),
    Mutation(
        "a tokenizer keeps what it knew before a death",
        TOKENIZING,
        "        self._held = HeldRequests()\n\n    def start(",
        "\n    def start(",
    ),
    Mutation(
        "pieces of images go on behind a death where they were",
        SENDING,
        "        self.media = MediaSender(vision)\n",
        "        self.media._workers = vision\n",
    ),
    Mutation(
        "a call from before a death is made behind it",
        CONTEXT,
        "        if self.retired:\n            return\n",
        "",
    ),
    Mutation(
        "requests are sent while nobody can hear them",
        FRONTEND,
        "        if not self._is_restarting and not self._readmission.defer(entry):\n",
        "        if not self._readmission.defer(entry):\n",
    ),
    Mutation(
        "who waits for a trial to end waits for ever",
        RESUBMISSION,
        "            self._resume(self._readmission.admit_next(self._context.now()))\n",
        "            self._readmission.admit_next(self._context.now())\n",
    ),
    Mutation(
        "requests run beside those on trial",
        FRONTEND,
        "        if not self._is_restarting and not self._readmission.defer(entry):\n",
        "        if not self._is_restarting and (not self._readmission.defer(entry) or True):\n",
    ),
    Mutation(
        "a request that waits for a trial to end and is aborted goes on behind it",
        FRONTEND,
        "        if not self._is_restarting and self._readmission.remove_deferred(entry):\n",
        "        if self._is_restarting and self._readmission.remove_deferred(entry):\n",
    ),
    Mutation(
        "tokens of a request that was ended for its reader are told",
        JOURNAL,
        "entry if entry is not None and entry.answer(uid).terminal is None else None",
        "entry",
    ),
    Mutation(
        "a request that was ended for its reader takes no room any more",
        FRONTEND,
        "        self._delivery.end_for_reader(entry)\n",
        "        self._delivery.end_for_reader(entry)\n"
        "        for uid in entry.uids:\n            self.journal.remove(uid)\n",
    ),
    Mutation(
        "what the machine refuses is the request's fault",
        BOOK,
        "            self._out_of_resources.add(uid)\n",
        "            pass\n",
    ),
    Mutation(
        "an answer is due once, and then forgotten",
        BOOK,
        "                sequence.position += 1\n                self._due[uid] = None\n",
        "                sequence.position += 1\n",
    ),
    Mutation(
        "more is forced than is wanted",
        BOOK,
        " or sequence.position >= sequence.end:",
        ":",
    ),
    Mutation(
        "behind a trial only new requests go on",
        READMISSION,
        "        self._deferred = {uid: entry for uid, entry in live.items() "
        "if uid not in chosen}\n",
        "        self._deferred = {}\n",
    ),
    Mutation(
        "blocks that a step was to compute are found after a death",
        PREFIXES,
        "            self._pool.forget(block)\n        self.leftovers",
        "            pass\n        self.leftovers",
    ),
    Mutation(
        "the cache is found although its memory is gone",
        BLOCKS,
        "if cache_ids == self._caches:",
        "if self._caches:",
    ),
    Mutation(
        "a block that was left half written is taken for all that is in it",
        LEFTOVERS,
        "count = count if same.all() else int(np.argmin(same))",
        "count = count if same[:1].all() else 0",
    ),
    Mutation(
        "a block in which somebody goes on stays in the index",
        LEFTOVERS,
        "        self._pool.forget(best)  # its holder writes on in it\n",
        "",
    ),
    Mutation(
        "one position more is left than was computed",
        COMPUTED,
        "            self._computed[slots] = ends\n",
        "            self._computed[slots] = ends + 1\n",
    ),
    Mutation(
        "who goes on writes in a block that others hold",
        LEFTOVERS,
        "if self._pool.find(name) != block or self._pool.is_held(block):",
        "if self._pool.find(name) != block:",
    ),
    Mutation(
        "the options of a request are kept where its message is",
        SEQUENCE,
        "copy_arrays(event.spec)",
        "event.spec",
    ),
    Mutation(
        "a prompt is kept where its message is",
        SEQUENCE,
        "event.token_ids.copy()",
        "event.token_ids",
    ),
    Mutation(
        "the hashes of a prompt are kept where its message is",
        SEQUENCE,
        "event.hashes.copy()",
        "event.hashes",
    ),
    Mutation(
        "a runner keeps token rules where their message is",
        TABLE_OF_RULES,
        "self._rules[slot] = copy_arrays(rules)",
        "self._rules[slot] = rules",
    ),
    Mutation(
        "the places of images are kept where their message is",
        "nanoactor.scheduling.sequences.item_state",
        "        message = copy_arrays(message)\n",
        "",
    ),
    Mutation(
        "a tokenizer holds a request where its message is",
        TOKENIZING,
        "self._held.hold(self.context.owned_copy(event), result)",
        "self._held.hold(event, result)",
    ),
    Mutation(
        "tokens of a constrained answer are kept where their message is",
        CONSTRAINTS,
        "np.split(event.token_ids.copy(), stops[:-1])",
        "np.split(event.token_ids, stops[:-1])",
    ),
    Mutation(
        "the detokenizer keeps a prompt where its message is",
        DETOKENIZER,
        "event.token_ids[: event.prompt_length].copy()",
        "event.token_ids[: event.prompt_length]",
    ),
    Mutation(
        "the queue is not looked at again though a sequence has left",
        PREFILLS,
        "            self._uncount(sequence)\n        self.version += 1\n",
        "            self._uncount(sequence)\n",
    ),
    Mutation(
        "a prompt under way that begins alike is overlooked",
        PREFILLS,
        "if not shareable or _first_block_hash(head) not in self._first_block_counts:",
        "if not shareable or _first_block_hash(head) in self._first_block_counts:",
    ),
    Mutation(
        "what decode rows computed is left where rows go back behind them",
        BINDING,
        "            tables.computed.discard(computing.slots, computing.starts.astype(np.int64))\n",
        "",
    ),
    Mutation(
        "a mean is that of its prompt's last row",
        POOLING,
        "total = self._sums.pop(sequence.uid, 0) + vector",
        "total = vector",
    ),
    Mutation(
        "a mean ends with its first row",
        POOLING,
        "if row.start + row.length < sequence.length:",
        "if False:",
    ),
    Mutation(
        "the sum of a request that has ended is kept",
        POOLING,
        "        self._sums.pop(sequence.uid, None)\n",
        "        pass\n",
    ),
    Mutation(
        "results of a request that has ended are pooled",
        POOLING,
        "            if not sequence.accepts_step(step):\n                continue\n",
        "",
    ),
    Mutation(
        "states that are pooled may be found in the prefix cache",
        "nanoactor.scheduling.sequences.sequence",
        "return _ALL if self.is_prompt_read or self.reading is None else self.reading.num_read",
        "return _ALL",
    ),
    Mutation(
        "the state of a prompt's first position is that of its row's last one",
        BATCH,
        '        if pooled and self._pooling == "cls":\n',
        "        if False:\n",
    ),
    Mutation(
        "a vector that is not finite answers its request",
        RESULTS,
        "finite_rows = [bool(np.isfinite(vector).all()) for vector in values]",
        "finite_rows = [True for vector in values]",
    ),
    Mutation(
        "a text that is pooled leaves room for a token of output",
        ADMISSION,
        "if tokens + (not pools) <= limit:",
        "if tokens + 1 <= limit:",
    ),
    Mutation(
        "of a row that only pools nothing is wanted",
        "nanoactor.scheduling.sequences.sequence",
        "return POOL if self.reading is None else 0",
        "return 0",
    ),
]


PARTS: dict[str, Any] = {
    "failures": None,
    "forks": None,
    "known": None,
    "frees": np.empty(0, np.int32),
    "drop_pixels": None,
    "forget_index": 0,
    "admissions": (),
    "plan": None,
    "drop_masks": None,
}
"""The parts of a turn, in their order, with their empty values."""
_Take = Callable[[Any, Turn], Any]


def _has(turn: Turn, part: str) -> bool:
    value = getattr(turn, part)
    return len(value) > 0 if isinstance(value, np.ndarray | tuple) else bool(value)


def _only(turn: Turn, parts: set[str]) -> Turn:
    return dataclasses.replace(turn, **{p: v for p, v in PARTS.items() if p not in parts})


def _dropped(part: str) -> Callable[[_Take], _Take]:
    return lambda take: lambda self, turn: take(self, _only(turn, PARTS.keys() - {part}))


def _split(part: str, *, first: bool) -> Callable[[_Take], _Take]:
    """Take one part of a turn before all others, or after them."""

    def wrap(take: _Take) -> _Take:
        def taken(self: Any, turn: Turn) -> Any:
            if not _has(turn, part):
                return take(self, turn)
            parts = [{part}, PARTS.keys() - {part}]
            steps = []
            for each in parts if first else parts[::-1]:
                self._turn = turn.number - 1
                steps.append(take(self, _only(turn, set(each))))
            return steps[0] or steps[1]

        return taken

    return wrap


def _doubled(part: str) -> Callable[[_Take], _Take]:
    def wrap(take: _Take) -> _Take:
        def taken(self: Any, turn: Turn) -> Any:
            if _has(turn, part):
                take(self, _only(turn, {part}))
                self._turn = turn.number - 1
            return take(self, turn)

        return taken

    return wrap


def _lost(take: _Take) -> _Take:
    """Lose turns that have no plan, now and then."""
    return lambda self, turn: (
        None if turn.plan is None and turn.number % 3 == 0 else take(self, turn)
    )


def _planned(change: Callable[[Plan], Plan]) -> Callable[[Callable[..., None]], Any]:
    """Change each plan before it is sent."""

    def wrap(plan: Callable[..., None]) -> Callable[..., None]:
        def planned(self: Any, *parts: Any) -> None:
            plan(self, *parts)
            self._plan = change(self._plan)

        return planned

    return wrap


def _one_further(plan: Plan) -> Plan:
    decodes = (plan.rows.wants & Want.DECODE > 0).astype(np.int32)
    return dataclasses.replace(
        plan, rows=dataclasses.replace(plan.rows, starts=plan.rows.starts + decodes)
    )


_PATCHES.append(
    Mutation(
        "a copy of a copy takes what that block held before",
        "nanoactor.kv.copies",
        "self._blocks.get(source, source)",
        "source",
    )
)
SEAMS = [
    Seam(
        "a slot that leaves the decode batch stays in it",
        TurnBuilder,
        "plan",
        _planned(lambda plan: dataclasses.replace(plan, leaves=plan.leaves[1:])),
    ),
    Seam(
        "a row that decodes begins one position too far",
        TurnBuilder,
        "plan",
        _planned(_one_further),
    ),
    *(
        Seam(f"of a turn its part {part} is dropped", BlockManagerActor, "_on_turn", _dropped(part))
        for part in PARTS
    ),
    *(
        Seam(f"of a turn its part {part} is done twice", BlockManager, "apply_turn", _doubled(part))
        for part in ("forks", "known", "frees", "admissions", "plan")
    ),
    *(
        Seam(
            f"of a turn its part {part} is done first",
            BlockManager,
            "apply_turn",
            _split(part, first=True),
        )
        for part in ("known", "frees", "admissions", "plan")
    ),
    *(
        Seam(
            f"of a turn its part {part} is done last",
            BlockManager,
            "apply_turn",
            _split(part, first=False),
        )
        for part in ("known", "admissions")
    ),
    Seam("a turn is lost", BlockManager, "apply_turn", _lost),
    Seam(
        "an answer is lost",
        SchedulerActor,
        "_handle",
        lambda handle: (
            lambda self, event: (
                None if type(event) is Answer and event.turn % 5 == 0 else handle(self, event)
            )
        ),
    ),
    Seam(
        "an answer says that a turn more was seen",
        SchedulerActor,
        "_handle",
        lambda handle: (
            lambda self, event: handle(
                self,
                dataclasses.replace(event, turn=event.turn + 1) if type(event) is Answer else event,
            )
        ),
    ),
]
_PATCHES += [
    Mutation(
        "a slot stays frozen while its sequence goes on",
        BATCH,
        "            pairs.append((self.layout.frozen + slots, np.zeros(len(slots), np.int64)))\n",
        "",
    ),
    Mutation(
        "the end of free text does not freeze a slot",
        "nanoactor.scheduling.sequences.grammar_state",
        "        return last_gate(self.free)\n",
        "        return -1\n",
    ),
    Mutation(
        "text goes on decoding behind the token that would have ended it",
        CONSTRAINTS,
        "elif not grammar.applies and token == grammar.last_gate:",
        "elif False:",
    ),
    Mutation(
        "slots are frozen by the ids of others",
        TURNS,
        "i for s in sequences for i in (*s.freeze_ids",
        "i for s in sequences[::-1] for i in (*s.freeze_ids",
    ),
    Mutation(
        "the rows of frozen slots are taken for tokens",
        "nanoactor.scheduling.steps.results",
        "    yielded = tokens >= 0\n",
        "    yielded = tokens != NO_TOKEN\n",
    ),
]
_PATCHES.append(
    Mutation(
        "results of a prompt that rides do not wait for what was found of it",
        "nanoactor.scheduling.steps.unanswered",
        "        return bool(admissions) and any("
        "0 < entry.step <= event.step for entry in admissions)\n",
        "        return False\n",
    )
)
_PATCHES += [
    Mutation(
        "copies of slots are not told where layers keep states of them",
        MANAGER,
        "        tables.copies.copy_slots(slots, event.sources.tolist())\n",
        "",
    ),
    Mutation(
        "a prefix is found though no block says what a layer's state was",
        MANAGER,
        "0 if tables.copies.has_slots else event.max_hits",
        "event.max_hits",
    ),
    Mutation(
        "a new sequence goes on with the state of the slot's last one",
        "nanoactor.runner.batch.batch",
        "return slots.astype(np.int64) if self._traits.has_slot_state and len(slots) else None",
        "return None",
    ),
    Mutation(
        "the block manager is not told that layers keep states of slots",
        "nanoactor.actors.blocks",
        "has_slot_state=self._config.files.has_slot_state",
        "has_slot_state=False",
    ),
]
RARE = [
    Mutation(
        "a slot that becomes a copy of a copy in one step is given what the copy had before",
        "nanoactor.kv.copies",
        "before.get(source, source)",
        "source",
    ),
    Mutation(
        "what decode rows compute in the place of forced tokens is left",
        TABLES,
        "        if len(event.runs):\n",
        "        if False:\n",
    ),
    Mutation(
        "what others share of a slot's blocks is told of the sequence that has the slot now",
        TABLE,
        "self.occupied[slots] & (self.admission_turns[slots] <= turn)",
        "self.occupied[slots]",
    ),
    Mutation(
        "a runner keeps masks and pixels from before a death",
        RUNNING,
        "        self._side_inputs = SideInputs(",
        "        self._side_inputs = getattr(self, '_side_inputs', None) or SideInputs(",
    ),
    Mutation(
        "a preempted sequence comes back before its results are in",
        ADMITTING,
        "head.last_step > self._pipeline.completed or room.credits",
        "room.credits",
    ),
    Mutation(
        "followers are forgotten when the first sequence ends",
        FORKING,
        "            self._room.waiting.push(followers.pop(0))\n",
        "            followers.clear()\n",
    ),
    Mutation(
        "the mask of a token that is forced is awaited",
        CONSTRAINTS,
        "            self._masks.withdraw(uid)\n",
        "",
    ),
    Mutation(
        "requests that come during a trial are forgotten",
        READMISSION,
        "            self._deferred[_uid(entry)] = entry\n",
        "            pass\n",
    ),
    Mutation(
        "the queue is not looked at again though a step has taken prompts",
        PREFILLS,
        "            self.version += 1\n            unfinished = [",
        "            unfinished = [",
    ),
]
"""Bugs that the simulation meets too seldom: `tests/scheduling/test_rare_bugs.py` finds them."""
MUTATIONS: list[Planted] = [*_PATCHES, *SEAMS]


@contextlib.contextmanager
def planted(mutation: Planted) -> Iterator[None]:
    """The engine with the bug, until the context ends."""
    if isinstance(mutation, Seam):
        original = getattr(mutation.owner, mutation.method)
        setattr(mutation.owner, mutation.method, mutation.wrap(original))
        try:
            yield
        finally:
            setattr(mutation.owner, mutation.method, original)
        return
    module = importlib.import_module(mutation.module)
    source = inspect.getsource(module)
    assert source.count(mutation.old) == 1, f"{mutation.what}: the source has changed"
    changed = ModuleType(mutation.module)
    code = compile(source.replace(mutation.old, mutation.new), str(module.__file__), "exec")
    before = dict(_functions(module))
    exec(code, vars(changed))
    originals = {name: function.__code__ for name, function in before.items()}
    try:
        for name, function in _functions(changed):
            if name in before:
                before[name].__code__ = function.__code__
        yield
    finally:
        for name, function in before.items():
            function.__code__ = originals[name]


def _functions(module: ModuleType) -> Iterator[tuple[str, FunctionType]]:
    """Every function and method that the module itself defines, by qualified name."""
    for value in vars(module).values():
        if getattr(value, "__module__", None) == module.__name__ and isinstance(value, type):
            for member in vars(value).values():
                yield from _plain(member, value.__qualname__)
        elif isinstance(value, FunctionType) and value.__module__ == module.__name__:
            yield value.__qualname__, value


def _plain(member: Any, owner: str) -> Iterator[tuple[str, FunctionType]]:
    inner = getattr(member, "__func__", getattr(member, "fget", member))
    if isinstance(inner, FunctionType) and inner.__qualname__.startswith(f"{owner}."):
        yield inner.__qualname__, inner
