"""Parameters of requests for vectors and scores."""

from __future__ import annotations

import dataclasses

from nanoactor.errors import InvalidRequest
from nanoactor.requests.params import make_numbers_plain


@dataclasses.dataclass(frozen=True, kw_only=True)
class PoolingParams:
    """Parameters of a request for a vector. Raises `InvalidRequest` on construction, naming the
    parameter."""

    dimensions: int | None = None
    """Truncate the vector to this length before it is normalized. Default: no truncation. For
    models that were trained for truncation (Matryoshka representation learning,
    arXiv:2205.13147)."""
    normalize: bool | None = None
    """Scale the vector to length 1. Default: as in the model's files."""
    prompt_name: str | None = None
    """Name of the model's prompt to put before the text. Default: the model's default prompt."""
    prompt: str | None = None
    """Prompt to put before the text instead of one of the model's own."""
    truncate_prompt_tokens: int | None = None
    """Keep this many tokens at the end of the text; -1: as many as fit. Default: longer texts are
    rejected."""

    def __post_init__(self) -> None:
        """Check each value and normalize numbers."""
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
