"""A model that says what a test tells it to: each request its script, token by token."""

from __future__ import annotations

import contextlib
import json
import shutil

import numpy as np

from nanoactor.models.config import read_config
from nanoactor.runner import simulated
from nanoactor.text.tokenizer import load_tokenizer
from tests.server.harness import here
from tests.text.test_chat import DEMO, THINKING

END = 2
_decode = load_tokenizer(DEMO).decode
SPACES = [token for token in range(2048) if _decode([token]).isspace()]
"""Tokens with which the demo model, which has never seen JSON, would fill an answer in JSON."""


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


@contextlib.asynccontextmanager
async def scripted(tmp_path, monkeypatch, config=None, *, template=None, **engine):
    """(a server in this process whose model is called "m", the script that its model reads)."""
    script = Script(monkeypatch)
    options = {"placement": "single", "device": "simulated:1", "max_num_seqs": 4, **engine}
    config = {"served_model_name": "m", **(config or {})}
    model = directory(tmp_path, **({} if template is None else {"template": template}))
    async with here(model, config=config, **options) as server:
        yield server, script


def with_weights(path):
    """The demo's weights in such a directory, too."""
    for name in ("model.safetensors", "generation_config.json"):
        (path / name).symlink_to(DEMO / name)
    return path


class Script:
    """Replaces what the simulated device samples; tokens of a text may be single characters."""

    def __init__(self, monkeypatch):
        self._tokenizer = load_tokenizer(DEMO)
        self._tokens = [END]
        self._begins = {}
        device = simulated.SimulatedExecutor
        monkeypatch.setattr(device, "_tokens", lambda _, *rows: self._sampled(*rows))
        monkeypatch.setattr(device, "_masked", lambda _, *rows: self._masked(*rows))
        self.refused = []
        """Tokens of scripts that a mask did not allow; another is taken in their place."""

    def say(self, text, by_character=False):
        parts = list(text) if by_character else [text]
        found = [self._tokenizer.encode(p, add_special_tokens=False).ids for p in parts]
        self._tokens = [token for tokens in found for token in tokens] + [END]
        self._begins = {}

    def _masked(self, masks, positions, seeds):
        tokens = self._sampled(positions, seeds)
        for row, (token, mask) in enumerate(zip(tokens.tolist(), masks, strict=True)):
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            if token not in allowed:
                self.refused.append(token)
                tokens[row] = allowed[0]
        return tokens

    def _sampled(self, positions, seeds):
        tokens = []
        for seed, position in zip(seeds.tolist(), positions.tolist(), strict=True):
            at = position - self._begins.setdefault(seed, position)
            tokens.append(self._tokens[min(at, len(self._tokens) - 1)])
        return np.array(tokens, np.int32)
