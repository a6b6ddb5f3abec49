"""Checkpoints and references that engine tests share."""

from pathlib import Path

import pytest

import nanoactor
from tests.engine.harness import Reference

DEMO = Path(nanoactor.__file__).parent / "models" / "demo"


@pytest.fixture(scope="session")
def demo():
    """The demo model in transformers, float32."""
    import torch
    from transformers import Qwen3ForCausalLM

    return Reference(Qwen3ForCausalLM.from_pretrained(DEMO, dtype=torch.float32))


@pytest.fixture(scope="session")
def demo_tokenizer():
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(DEMO / "tokenizer.json"))
