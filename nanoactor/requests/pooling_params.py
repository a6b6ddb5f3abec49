"""Parameters of requests for vectors and scores."""

from __future__ import annotations

import dataclasses

from nanoactor.errors import InvalidRequest
from nanoactor.requests.params import make_numbers_plain


@dataclasses.dataclass(frozen=True, kw_only=True)
class PoolingParams:
    """Parameters of a request for an embedding vector. The constructor raises `InvalidRequest`,
    naming the invalid parameter."""

    dimensions: int | None = None
    """Truncate the vector to this length before it is normalized. Default: no truncation. Only for
    models that were trained for truncation (Matryoshka representation learning,
    arXiv:2205.13147)."""
    normalize: bool | None = None
    """Scale the vector to length 1. Default: the setting in the model's files."""
    prompt_name: str | None = None
    """Name of one of the model's own prompts, which is put before the text. Default: the model's
    default prompt."""
    prompt: str | None = None
    """Text to put before the input, instead of one of the model's own prompts."""
    truncate_prompt_tokens: int | None = None
    """Keep only this many tokens at the end of the text; -1 keeps as many as fit. Default: texts
    that are too long are rejected."""

    def __post_init__(self) -> None:
        """Check all values and normalize numbers."""
        make_numbers_plain(self)
        for name, others in (("dimensions", ()), ("truncate_prompt_tokens", (-1,))):
            value = getattr(self, name)
            is_integer = isinstance(value, int) and not isinstance(value, bool)
            if value is not None and not (is_integer and (value >= 1 or value in others)):
                listed = "".join(f", {other}" for other in others)
                raise InvalidRequest(
                    f"{name} must be an integer of at least 1{listed} or None, got {value!r:.100}"
                )
        if self.normalize not in (True, False, None):
            raise InvalidRequest(f"normalize must be true, false or None, got {self.normalize!r}")
        for name in ("prompt_name", "prompt"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise InvalidRequest(f"{name} must be a string or None, got {value!r:.100}")
        if self.prompt is not None and self.prompt_name is not None:
            raise InvalidRequest("give either prompt or prompt_name, not both")
