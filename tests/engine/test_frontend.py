"""Which tokenizer a request goes to."""

from pathlib import Path
from types import SimpleNamespace

from nanoactor.actors.config import ActorConfig
from nanoactor.actors.frontend import FrontendActor
from nanoactor.config import EngineConfig
from nanoactor.model_files import ModelFiles


def frontend_of(tokenizers):
    engine = EngineConfig("any", num_tokenizers=tokenizers, max_waiting_tokens=10**9)
    files = ModelFiles(
        Path(),
        SimpleNamespace(),
        defaults={},
        eos_token_ids=(),
        max_model_len=100,
        ignored=(),
        tokenizer_directory=None,
    )
    return FrontendActor(ActorConfig(engine, files, b""))


def test_long_prompts_never_stand_before_short_ones_at_the_first_tokenizer():
    frontend = frontend_of(3)
    assert frontend._choose_tokenizer(100) == 0
    assert frontend._choose_tokenizer(1_000_000) == 1
    frontend._load = [0, 10**9, 10**9]
    assert frontend._choose_tokenizer(1_000_000) == 1
    assert frontend._choose_tokenizer(100) == 0
    alone = frontend_of(1)
    assert alone._choose_tokenizer(1_000_000) == 0
