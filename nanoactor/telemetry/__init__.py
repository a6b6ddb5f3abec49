"""OpenTelemetry spans of requests. OpenTelemetry is imported only if an engine's
`otlp_traces_endpoint` is set."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanoactor.errors import InvalidConfig
from nanoactor.model_files.files import ModelFiles
from nanoactor.options.config import EngineConfig

if TYPE_CHECKING:
    from nanoactor.telemetry.exporting import Telemetry

_INSTALL = 'pip install "nanoactor[otel]"'


def open_telemetry(config: EngineConfig, files: ModelFiles) -> Telemetry | None:
    """Return the exporter of an engine's spans, or None if `otlp_traces_endpoint` is not set.
    Raises `InvalidConfig` if OpenTelemetry is not installed, or if one of its environment variables
    has a value that is not supported."""
    if config.otlp_traces_endpoint is None:
        return None
    scores = files.pooling is not None and files.pooling.returns_scores
    pooled = "score" if scores else "embeddings"
    return load_telemetry()(config.otlp_traces_endpoint, config.model, pooled)


def load_telemetry() -> type[Telemetry]:
    """Import OpenTelemetry, and return the class `Telemetry`, which depends on it. Raises
    `InvalidConfig`, with the command that installs OpenTelemetry, if it is missing."""
    try:
        from nanoactor.telemetry.exporting import Telemetry
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("nanoactor"):
            raise
        raise InvalidConfig(
            f"otlp_traces_endpoint needs OpenTelemetry, but the module {error.name} is not "
            f"installed: {_INSTALL}"
        ) from None
    return Telemetry
