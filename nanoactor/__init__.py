"""nanoactor: an LLM inference engine made of actors, which share no state and exchange messages.

Importing this package is cheap: its modules are loaded on first use, and torch is imported only in
the processes that run the model.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nanoactor.api.engine import AsyncLLM
    from nanoactor.api.llm import LLM
    from nanoactor.errors import (
        ComputationFailed,
        EngineClosed,
        EngineDead,
        EngineFault,
        EngineOverloaded,
        HoldExpired,
        InvalidConfig,
        InvalidRequest,
        ModelError,
        NanoactorError,
        NodeDied,
        NotEnoughMemory,
        NotUsableHere,
        OutOfResources,
        PoisonRequest,
        ProtocolBug,
        RequestAborted,
        StartupFailed,
        UnsupportedModel,
        UnsupportedPlatform,
        WeightsError,
    )
    from nanoactor.options.config import EngineConfig
    from nanoactor.requests.outputs import (
        BeamSearchOutput,
        BeamSearchSequence,
        CompletionOutput,
        OutputSoFar,
        RequestOutput,
        RequestOutputKind,
    )
    from nanoactor.requests.params import BeamSearchParams, SamplingParams
    from nanoactor.requests.pooling_outputs import EmbeddingRequestOutput, ScoringRequestOutput
    from nanoactor.requests.pooling_params import PoolingParams
    from nanoactor.requests.structured_outputs import StructuredOutputsParams
    from nanoactor.vision.video import Video

    __version__: str
    """Release number; in a git checkout, followed by "+g" and the commit's hash."""

RELEASE = "0.2.0"
"""Version of the latest release, or of the next one while it is being prepared. Read by
pyproject.toml."""
__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "CompletionOutput",
    "ComputationFailed",
    "EmbeddingRequestOutput",
    "EngineClosed",
    "EngineConfig",
    "EngineDead",
    "EngineFault",
    "EngineOverloaded",
    "HoldExpired",
    "InvalidConfig",
    "InvalidRequest",
    "ModelError",
    "NanoactorError",
    "NodeDied",
    "NotEnoughMemory",
    "NotUsableHere",
    "OutOfResources",
    "OutputSoFar",
    "PoisonRequest",
    "PoolingParams",
    "ProtocolBug",
    "RequestAborted",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "ScoringRequestOutput",
    "StartupFailed",
    "StructuredOutputsParams",
    "UnsupportedModel",
    "UnsupportedPlatform",
    "Video",
    "WeightsError",
]

_HOMES = {
    "WeightsError": "nanoactor.errors",
    "UnsupportedPlatform": "nanoactor.errors",
    "UnsupportedModel": "nanoactor.errors",
    "StartupFailed": "nanoactor.errors",
    "RequestAborted": "nanoactor.errors",
    "ProtocolBug": "nanoactor.errors",
    "PoisonRequest": "nanoactor.errors",
    "OutOfResources": "nanoactor.errors",
    "NotUsableHere": "nanoactor.errors",
    "NotEnoughMemory": "nanoactor.errors",
    "NodeDied": "nanoactor.errors",
    "NanoactorError": "nanoactor.errors",
    "ModelError": "nanoactor.errors",
    "InvalidRequest": "nanoactor.errors",
    "InvalidConfig": "nanoactor.errors",
    "HoldExpired": "nanoactor.errors",
    "EngineOverloaded": "nanoactor.errors",
    "EngineFault": "nanoactor.errors",
    "EngineDead": "nanoactor.errors",
    "EngineClosed": "nanoactor.errors",
    "ComputationFailed": "nanoactor.errors",
    "AsyncLLM": "nanoactor.api.engine",
    "BeamSearchOutput": "nanoactor.requests.outputs",
    "BeamSearchParams": "nanoactor.requests.params",
    "BeamSearchSequence": "nanoactor.requests.outputs",
    "CompletionOutput": "nanoactor.requests.outputs",
    "EmbeddingRequestOutput": "nanoactor.requests.pooling_outputs",
    "EngineConfig": "nanoactor.options.config",
    "LLM": "nanoactor.api.llm",
    "OutputSoFar": "nanoactor.requests.outputs",
    "PoolingParams": "nanoactor.requests.pooling_params",
    "RequestOutput": "nanoactor.requests.outputs",
    "RequestOutputKind": "nanoactor.requests.outputs",
    "SamplingParams": "nanoactor.requests.params",
    "ScoringRequestOutput": "nanoactor.requests.pooling_outputs",
    "StructuredOutputsParams": "nanoactor.requests.structured_outputs",
    "Video": "nanoactor.vision.video",
}


def check_platform() -> None:
    """Raise `UnsupportedPlatform` unless the operating system is Linux.

    Call this before importing modules that other systems lack.
    """
    if sys.platform != "linux":
        from nanoactor.errors import UnsupportedPlatform

        raise UnsupportedPlatform(
            f"nanoactor runs only on Linux, but this machine runs {sys.platform}; run it on a "
            "Linux machine, in a Linux container, or in WSL 2 on Windows"
        )


def __getattr__(name: str) -> Any:
    if name == "__version__":
        globals()[name] = importlib.import_module("nanoactor.api.version").version()
        return globals()[name]
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if home.startswith("nanoactor.api."):
        check_platform()
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
