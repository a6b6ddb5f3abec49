"""Beam search on transformers' logits, by the definition of vLLM or by that of transformers."""

import dataclasses
import itertools

import torch

TIE = 1e-4


@dataclasses.dataclass
class Found:
    """The sequences of one search."""

    outputs: list[list[int]]
    """Tokens of output, the best first."""
    sums: list[float]
    margin: float
    """The least difference between what was chosen and what was not: below TIE rounding may choose
    otherwise."""
    ended_below: bool
    """Whether an end that was not among the `width` likeliest candidates of a step came into the
    result: transformers does not take these."""


@dataclasses.dataclass(frozen=True)
class Definition:
    """The points on which the two differ; as they stand, vLLM's."""

    counts_prompt: bool = True
    counts_eos: bool = False
    all_ends: bool = True
    """Whether every candidate may end a sequence, or only the `width` likeliest of a step."""
    early_stopping: bool | str | None = None
    """transformers'; None: never, but at `max_tokens`."""


def transformers_definition(early_stopping):
    return Definition(False, True, False, early_stopping)


@torch.inference_mode()
def search(model, prompt, width, tokens, eos=(), penalty=1.0, definition=None):
    """Search by a definition: whole sequences in each step, and no cache."""
    rule = definition or Definition()
    each = max(2 * width, width + len(eos))
    live, ended, margin, step = [([], 0.0)], [], float("inf"), 0

    def score(total, length, stopped):
        length += (len(prompt) if rule.counts_prompt else 0) - (stopped and not rule.counts_eos)
        return total / length**penalty

    while step < tokens and not _is_done(ended, live, (width, penalty, tokens), rule):
        batch = torch.tensor([[*prompt, *output] for output, _ in live])
        rows = model(batch).logits[:, -1].float().log_softmax(-1)
        candidates = []
        for (output, total), row in zip(live, rows, strict=True):
            best = row.topk(min(each + 1, len(row)))
            around = best.indices[each - 1 :].tolist()  # the last candidate, and the next token
            if rule.all_ends and len(around) == 2 and set(eos) & set(around):
                margin = min(margin, float(best.values[each - 1] - best.values[each]))
            values, ids = best.values[:each].tolist(), best.indices[:each].tolist()
            candidates += [
                ([*output, token], total + value) for token, value in zip(ids, values, strict=True)
            ]
        candidates.sort(key=lambda beam: -beam[1])
        step += 1
        last = step == tokens
        for rank, (output, total) in enumerate(candidates):
            stopped = output[-1] in eos
            cut = last and not rule.all_ends  # to transformers the last step ends as EOS does
            if (stopped or cut) and (rule.all_ends or rank < width):
                ended.append((score(total, step, stopped), output, total, rank >= width))
        if not rule.all_ends and set(eos) & {o[-1] for o, _ in candidates[width - 1 : width + 1]}:
            margin = min(margin, _gap([total for _, total in candidates], width))
        going = [beam for beam in candidates if beam[0][-1] not in eos]
        margin = min(margin, _gap([total for _, total in going], width))
        live = going[:width]
        if not rule.all_ends:  # transformers keeps no more than it returns
            ended = sorted(ended, key=lambda item: -item[0])[:width]
    if rule.all_ends:
        ended += [(score(total, step, False), output, total, False) for output, total in live]
    ended.sort(key=lambda item: -item[0])
    # In units of the sums: a high penalty makes all scores small.
    gaps = [(a[0] - b[0]) * abs(b[2] / b[0]) for a, b in itertools.pairwise(ended[: width + 1])]
    best = ended[:width]
    return Found(
        [output for _, output, _, _ in best],
        [total for _, _, total, _ in best],
        min([margin, *gaps]),
        any(below for *_, below in best),
    )


def _gap(totals, width):
    """Between the last that is taken and the first that is not."""
    return totals[width - 1] - totals[width] if len(totals) > width else float("inf")


def _is_done(ended, live, bounds, rule):
    width, penalty, tokens = bounds
    if rule.early_stopping is None or len(ended) < width:
        return False
    if rule.early_stopping is True:
        return True
    length = len(live[0][0])
    if rule.early_stopping == "never" and penalty > 0:
        length = tokens
    return live[0][1] / length**penalty <= min(item[0] for item in ended)
