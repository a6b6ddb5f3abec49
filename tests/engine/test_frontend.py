"""Which tokenizer a request goes to."""

from nanoactor.actors.frontend import FrontendActor, FrontendConfig


def test_long_prompts_never_stand_before_short_ones_at_the_first_tokenizer():
    frontend = FrontendActor(FrontendConfig(3, 10, 10**9))
    assert frontend._choose_tokenizer(100) == 0
    assert frontend._choose_tokenizer(1_000_000) == 1
    frontend._load = [0, 10**9, 10**9]
    assert frontend._choose_tokenizer(1_000_000) == 1
    assert frontend._choose_tokenizer(100) == 0
    alone = FrontendActor(FrontendConfig(1, 10, 10**9))
    assert alone._choose_tokenizer(1_000_000) == 0
