"""What a device holds, told nothing but deltas, and what its kernels would read from it."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from nanoactor.models.limits import CANDIDATES
from nanoactor.models.sampling.columns import column_views
from nanoactor.runner.batch.batch import BatchTraits, HostBatch
from nanoactor.runner.batch.inputs import Prefill, Update
from nanoactor.runner.batch.pixels import with_vision
from nanoactor.runner.batch.staging import words_of
from tests.simulation.scenario import rules_of

_TOKENS_PER_PROGRAM = 3
_NONE = np.empty(0, np.int64)


@dataclasses.dataclass(frozen=True)
class Row:
    """A prompt's chunk: where its tokens lie, its context, and all blocks of its table."""

    first: int
    tokens: int
    context: int
    blocks: Any


@dataclasses.dataclass(frozen=True)
class StepInputs:
    """All that a step runs on. The decode rows' token ids are the device's own."""

    step: int
    token_ids: Any
    positions: Any
    rope_positions: Any
    """(3, tokens)."""
    update: Update
    slot_mapping: Any
    prefills: list[Row]
    prefill_slots: Any
    """Of each token of the prompts' rows."""
    decode_slots: Any
    decode_tables: Any
    decode_contexts: Any
    sampling_slots: list[int]
    """Those of the step's samplers, in their order."""
    token_index: list[int]
    """The token of the step after which each of these samples, but for choices."""
    sampling_positions: list[int]
    """The position that each sampled token will have."""
    seeds: list[int]
    masked: list[tuple[int, int]]
    """(sampler, id) of each logit that must not be chosen."""
    choices: int
    """The number of the last samplers, which choose under masks."""
    masks: Any
    """These masks, (rows, words)."""
    kept: list[tuple[int, int]]
    """Which token's state is kept in which slot."""
    pooled: list[int]
    """The token of each row that pools, whose state is read."""
    continued: int
    """The number of the last decode rows, which have a token of the host's."""
    thawed: list[int]
    """Slots that are not frozen from this step on."""
    freeze_ids: Any
    """(decode rows, ids): which ids freeze the slot of each."""
    copies: list[tuple[int, int]]
    """Blocks: sources and targets."""

    @property
    def rows(self) -> int:
        """Tokens that go through the layers."""
        return self.update.rows


class ResidentState:
    """The array that a device holds. Two hosts lay the steps out: for a device whose fused sampler
    does what it can, and for one without; they must tell the device the same."""

    def __init__(
        self,
        max_num_seqs: int,
        max_blocks: int,
        block_size: int,
        runs_from: int,
        pooling: str,
        slot_state: bool,
    ) -> None:
        fused = BatchTraits(
            _TOKENS_PER_PROGRAM,
            needs_host_seq_lens=True,
            fused_sampling="all",
            min_rows_for_runs=runs_from,
            has_slot_state=slot_state,
        )
        plain = BatchTraits(
            fused_sampling="none",
            fallback_at_once=2,
            min_rows_for_runs=runs_from,
            has_slot_state=slot_state,
        )
        self._fused = HostBatch(max_num_seqs, max_blocks, fused, pooling)
        self._plain = HostBatch(max_num_seqs, max_blocks, plain, pooling)
        self._layout = self._fused.layout
        self._block_size = block_size
        self._state = np.zeros(self._layout.size, np.int32)
        self._column(self._layout.rows)[:] = self._layout.dummy
        self._column(self._layout.row_positions)[:] = -1

    def apply(self, step: Any, pixels: Any, dropped: Any, masks: Any) -> StepInputs:
        """Apply a step's deltas; what it runs on then."""
        update = with_vision(self._fused.update(step, masks), step, pixels, dropped)
        plain = self._plain.update(step, masks)
        changes, same = (one.inputs.changes or (_NONE, _NONE) for one in (update, plain))
        assert len(np.unique(changes[0])) == len(changes[0]), "one place written twice"
        assert [part.tolist() for part in changes] == [part.tolist() for part in same]
        assert str(update.inputs.scored) == str(plain.inputs.scored)
        assert str(update.scored) == str(plain.scored)
        assert str(update.pooled) == str(plain.pooled)
        assert words_of(update.inputs) >= sum(part.nbytes // 4 for part in changes)
        self._state[changes[0]] = changes[1]
        thawed = changes[0] - self._layout.frozen
        thawed = thawed[(thawed >= 0) & (thawed < self._layout.slots)].tolist()
        assert not self._column(self._layout.frozen).any()
        return self._inputs(update, plain, thawed)

    def _inputs(self, update: Update, plain: Update, thawed: list[int]) -> StepInputs:
        decodes, positions, contexts = self._advance(update)
        prefill, kept_rows = update.prefill, update.inputs.kept
        token_ids, places = np.empty(0, np.int32), np.empty(0, np.int64)
        rows, ends, slots = [], [], []
        own_positions = token_ids
        if prefill is not None:
            token_ids, own_positions = prefill.token_ids, prefill.positions
            places = self._places(prefill.slots, prefill.positions)
            rows, ends, slots = (
                self._rows(prefill),
                prefill.ends.tolist(),
                prefill.sampling.tolist(),
            )
        first, known = len(token_ids), update.decodes + update.resumed
        reads = len(ends) - (0 if update.pooled is None else len(update.pooled.numbers))
        ends, pooled = ends[:reads], ends[reads:]
        self._check_lengths(update, rows, contexts)
        slots += decodes[:known].tolist()
        masked = self._check_fallback(update, plain, slots)
        late = [slot for part in update.inputs.choices for slot in part.slots.tolist()]
        masked += self._check_choices(update, plain, len(slots))
        slots += late
        lengths = self._column(self._layout.lengths)[slots]
        assert lengths.tolist() == update.positions.tolist()
        kept: list[tuple[int, int]] = []
        if kept_rows is not None:
            last = ends[len(ends) - len(kept_rows.prompts) :]
            kept = list(zip(last, kept_rows.prompts.tolist(), strict=True))
            ends = ends[: len(ends) - len(last)]
            behind = update.decode_rows - len(kept_rows.continued)
            tokens = range(first + behind, first + update.decode_rows)
            kept += zip(tokens, kept_rows.continued.tolist(), strict=True)
            assert behind >= known
            assert kept_rows.continued.tolist() == decodes[behind:].tolist()
        ends += [first + n for n in range(known)]
        own = self._column(self._layout.row_token_ids)[update.decodes : update.decode_rows]
        return StepInputs(
            update.step,
            token_ids=np.concatenate((token_ids, np.zeros(update.decodes, np.int32), own)),
            positions=np.concatenate((own_positions, positions)),
            rope_positions=self._rope_positions(update, own_positions, decodes, positions),
            update=update,
            slot_mapping=np.concatenate((places, self._places(decodes, positions))),
            prefills=rows,
            prefill_slots=() if prefill is None else prefill.slots.tolist(),
            decode_slots=decodes,
            decode_tables=self._tables[decodes],
            decode_contexts=contexts,
            sampling_slots=slots,
            token_index=ends,
            sampling_positions=lengths.tolist(),
            seeds=self._seeds(slots),
            masked=masked,
            copies=list(zip(*(blocks.tolist() for blocks in update.inputs.copies), strict=True)),
            choices=len(late),
            masks=np.concatenate([part.masks for part in update.inputs.choices]) if late else (),
            kept=kept,
            pooled=pooled,
            continued=update.continued,
            thawed=thawed,
            freeze_ids=self._freeze_ids[:, decodes].T.copy(),
        )

    def _check_choices(self, update: Update, plain: Update, first: int) -> list[tuple[int, int]]:
        """All deferred rows are listed, each in one group, with its own rules; both hosts' are the
        same. Returns (row, id) of each logit that must not be chosen; rows count from `first`."""
        found = []
        for one in (update, plain):
            choices = one.inputs.choices
            assert all((part.index == part.slots).all() for part in choices)
            ends = np.cumsum([0, *(len(part.slots) for part in choices)])
            parts = [
                dataclasses.replace(part, index=np.arange(begin, begin + len(part.slots)))
                for part, begin in zip(choices, ends[:-1], strict=True)
            ]
            slots = [slot for part in parts for slot in part.slots.tolist()]
            self._check_rules(parts, slots)
            masks = [part.masks.tolist() for part in parts]
            rows = [(first + row, token) for row, token in self._masked(parts)]
            found.append((slots, [row for part in masks for row in part], rows))
        assert found[0] == found[1]
        return found[0][2]

    def _rope_positions(
        self, update: Update, own: Any, decodes: Any, positions: Any
    ) -> np.ndarray[Any, Any]:
        prompts = np.tile(own, (3, 1))
        if update.inputs.visual is not None:
            prompts = update.inputs.visual.positions
        turned = positions + self._column(self._layout.rope_deltas)[decodes]
        return np.concatenate((prompts, np.tile(turned, (3, 1))), axis=1)

    def _column(self, start: int) -> Any:
        return self._state[start : start + self._layout.slots]

    @property
    def _tables(self) -> Any:
        return self._state[: self._layout.lengths].reshape(self._layout.slots, -1)

    @property
    def _freeze_ids(self) -> Any:
        ids = self._state[self._layout.freeze_ids : self._layout.sampling]
        return ids.reshape(-1, self._layout.slots)

    @property
    def _columns(self) -> Any:
        words = self._state[self._layout.sampling : self._layout.rows]
        return column_views(words.reshape(-1, self._layout.slots), np.float32)

    def _seeds(self, slots: list[int]) -> list[int]:
        low, high = self._columns.seed[:, slots].view(np.uint32).tolist()
        return [a | b << 32 for a, b in zip(low, high, strict=True)]

    def _places(self, slots: Any, positions: Any) -> Any:
        size = self._block_size
        return self._tables[slots, positions // size].astype(np.int64) * size + positions % size

    def _advance(self, update: Update) -> Any:
        """As `BatchOperators.advance`: (slots, positions, contexts) of the decode rows."""
        listed = self._column(self._layout.rows)
        rows = listed[: update.decode_rows].copy()
        assert (listed[update.decode_rows :] == self._layout.dummy).all()
        lengths = self._column(self._layout.lengths)
        own = self._column(self._layout.row_positions)
        assert (own[: update.decodes] == -1).all()
        assert (own[update.decode_rows :] == -1).all()
        own = own[: update.decode_rows]
        positions = np.where(own < 0, lengths[rows], own)
        lengths[rows[own < 0]] += 1
        return rows, positions, positions + 1

    def _rows(self, prefill: Prefill[Any]) -> list[Row]:
        rows, tiles, ends = [], set(), []
        for number, (slot, first, tokens, context) in enumerate(prefill.rows.T.tolist()):
            rows.append(Row(first, tokens, context, self._tables[slot]))
            assert (prefill.slots[first : first + tokens] == slot).all()
            groups = -(-tokens // _TOKENS_PER_PROGRAM)
            tiles |= {(number, group) for group in range(groups)}
        for number, group in prefill.tiles.T.tolist():
            tiles.remove((number, group))
            _, _, tokens, context = prefill.rows.T[number]
            ends.append(context - tokens + min(tokens, (group + 1) * _TOKENS_PER_PROGRAM))
        assert not tiles
        assert ends == sorted(ends, reverse=True), "the longest goes first"
        return rows

    def _check_lengths(self, update: Update, rows: list[Row], contexts: Any) -> None:
        known = update.lengths
        assert known.prefill_tokens == [row.tokens for row in rows]
        assert known.prefill_contexts == [row.context for row in rows]
        assert known.decode_contexts == contexts.tolist()

    def _check_fallback(
        self, update: Update, plain: Update, slots: list[int]
    ) -> list[tuple[int, int]]:
        """Without a fused sampler all rows are listed, each in one group; else those that it does
        not do. Returns (row, id) of each logit that must not be chosen."""
        masked = self._masked(plain.inputs.fallback)
        assert [s for part in plain.inputs.fallback for s in part.slots.tolist()] == slots
        assert [i for part in plain.inputs.fallback for i in part.index] == [*range(len(slots))]
        assert set(self._masked(update.inputs.fallback)) == set(masked)
        columns = self._columns
        fallback = {row for row, _ in masked} | self._check_rules(plain.inputs.fallback, slots)
        greedy = set()
        for row, slot in enumerate(slots):
            if columns.temperature[slot] == 0:
                greedy.add(row)
            elif columns.top_k[slot] > CANDIDATES:
                fallback.add(row)
        assert [i for part in update.inputs.fallback for i in part.index] == sorted(fallback)
        found = [part.index[part.groups.greedy].tolist() for part in plain.inputs.fallback]
        assert {row for rows in found for row in rows} == greedy
        for part in (*update.inputs.fallback, *plain.inputs.fallback):
            found = part.groups
            groups = (found.greedy, found.plain, found.limited, found.unlimited, found.nucleus)
            assert sorted(np.concatenate(groups)) == [*range(len(part.slots))]
        return masked

    def _check_rules(self, parts: Any, slots: list[int]) -> set[int]:
        """Every row has the rules of its own request, whose seed is its position. Returns the rows
        that have any."""
        due = set()
        for row, slot in enumerate(slots):
            if (rules := rules_of(int(self._columns.seed[0, slot]))) is not None:
                biases = zip(rules.bias_ids.tolist(), rules.biases.tolist(), strict=True)
                due |= {(row, *pair) for pair in biases}
        found = set()
        for part in parts:
            if part.rules is not None:
                pairs = (part.rules.biased_ids.tolist(), part.rules.biases.tolist())
                rows = part.index[part.rules.biased_rows].tolist()
                found |= {*zip(rows, *pairs, strict=True)}
        assert found == due
        return {row for row, *_ in due}

    def _masked(self, parts: Any) -> list[tuple[int, int]]:
        return [
            (int(part.index[row]), int(token))
            for part in parts
            for row, token in zip(part.groups.masked_rows, part.groups.masked_ids, strict=True)
        ]
