"""The rules of logits written down once more, in NumPy and Python's loops."""

import numpy as np


def ruled(
    logits,
    prompt,
    output,
    *,
    allowed_token_ids=None,
    bad_words=(),
    logit_bias=None,
    repetition_penalty=1.0,
    frequency_penalty=0.0,
    presence_penalty=0.0,
):
    """float32 logits (vocabulary,) after a prompt and an output; `bad_words` are lists of ids."""
    logits = np.array(logits, np.float32)
    if allowed_token_ids is not None:
        others = np.setdiff1d(np.arange(len(logits)), allowed_token_ids)
        logits[others] = -np.inf
    for *before, last in bad_words:
        if list(output[len(output) - len(before) :]) == before and len(before) <= len(output):
            logits[last] = -np.inf
    for token, bias in (logit_bias or {}).items():
        logits[token] += np.float32(bias)
    penalty = np.float32(repetition_penalty)
    for token in {*prompt, *output}:
        logits[token] = logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
    for token in set(output):
        logits[token] -= np.float32(list(output).count(token)) * np.float32(frequency_penalty)
        logits[token] -= np.float32(presence_penalty)
    return logits
