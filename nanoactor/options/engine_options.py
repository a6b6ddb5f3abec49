"""Engine options under their own names, and under those that vLLM and SGLang use."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from nanoactor.errors import InvalidConfig
from nanoactor.options.config import EngineConfig
from nanoactor.requests.known_names import ENGINE, ForeignOption
from nanoactor.requests.named_parameters import suggestion

_BY_NAME: Mapping[str, ForeignOption] = {name.theirs: name for name in ENGINE}


def engine_config(model: str, options: Mapping[str, Any]) -> EngineConfig:
    """Create a configuration from options with our, vLLM's or SGLang's names. Raises
    `InvalidConfig` for an unknown or invalid option. The message suggests a known name."""
    known_names = [
        field.name for field in dataclasses.fields(EngineConfig) if field.name != "model"
    ]
    chosen: dict[str, Any] = {}
    for name, value in options.items():
        foreign = _BY_NAME.get(name)
        ours = foreign.ours if foreign is not None and foreign.ours else name
        if value is None and foreign is not None:
            continue  # vLLM's default
        if ours in chosen or (ours != name and ours in options):
            raise InvalidConfig(
                f"{name} and {ours} are two names for the same option; give only one of them"
            )
        if ours in known_names:
            chosen[ours] = not value if foreign is not None and foreign.inverts else value
        elif foreign is None or foreign.ours:
            raise InvalidConfig(
                f"unknown engine option {name!r:.100}{suggestion(name, [*known_names, *_BY_NAME])}"
            )
        elif not foreign.allows(value):
            raise InvalidConfig(foreign.error_message(value))
    return EngineConfig(model, **chosen)
