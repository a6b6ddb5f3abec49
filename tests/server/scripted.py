"""A model that says what a test tells it to: each request its script, token by token."""

from __future__ import annotations

import json
import shutil

import numpy as np

from nanoactor.models.config import read_config
from nanoactor.runner import simulated
from nanoactor.text.tokenizer import load_tokenizer
from tests.text.test_chat import DEMO, THINKING

END = 2


def directory(path, template=THINKING):
    """The demo's tokenizer with a template for tools and thoughts; no weights."""
    shutil.copy(DEMO / "tokenizer.json", path)
    config = json.loads((DEMO / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 4096}))
    assert read_config(path)
    (path / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<|im_end|>", "chat_template": template})
    )
    return path


class Script:
    """Replaces what the simulated device samples; tokens of a text may be single characters."""

    def __init__(self, monkeypatch):
        self._tokenizer = load_tokenizer(DEMO)
        self._tokens = [END]
        self._begins = {}
        monkeypatch.setattr(simulated.SimulatedExecutor, "_tokens", self._sampled)

    def say(self, text, by_character=False):
        parts = list(text) if by_character else [text]
        found = [self._tokenizer.encode(p, add_special_tokens=False).ids for p in parts]
        self._tokens = [token for tokens in found for token in tokens] + [END]
        self._begins = {}

    def _sampled(self, positions, seeds):
        tokens = []
        for seed, position in zip(seeds.tolist(), positions.tolist(), strict=True):
            at = position - self._begins.setdefault(seed, position)
            tokens.append(self._tokens[min(at, len(self._tokens) - 1)])
        return np.array(tokens, np.int32)
