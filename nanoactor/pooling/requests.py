"""Validation of requests for embeddings and scores, and construction of their prompts. Performs no
I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nanoactor.errors import InvalidRequest
from nanoactor.options.pooling import PoolingConfig
from nanoactor.requests.pooling_params import PoolingParams


def check_pooling(params: Any, pooling: PoolingConfig | None, hidden_size: int) -> PoolingConfig:
    """Return `pooling`, the model's pooling configuration, if it allows the request.

    Raises `InvalidRequest` if the model does not support pooling, or if `params` are invalid or
    request more than `hidden_size` dimensions.
    """
    if pooling is None:
        raise InvalidRequest(
            "this model generates text; for vectors and scores, load an embedding model or a "
            'reranker, or set the option pooling (for example, to "last")'
        )
    if not isinstance(params, PoolingParams):
        raise InvalidRequest(f"pooling_params must be a PoolingParams object, got {params!r:.100}")
    if params.dimensions is not None and params.dimensions > hidden_size:
        raise InvalidRequest(
            f"dimensions is {params.dimensions}, but the model's vectors have only "
            f"{hidden_size} dimensions"
        )
    return pooling


def truncation_length(params: PoolingParams, limit: int) -> int:
    """Return the number of tokens to keep at the end of a text; 0 keeps all.

    `limit` is `max_model_len`. Raises `InvalidRequest` if `params` request more than that.
    """
    requested = params.truncate_prompt_tokens
    if requested is not None and requested > limit:
        raise InvalidRequest(
            f"truncate_prompt_tokens must be at most max_model_len ({limit}), got {requested}"
        )
    return limit if requested == -1 else requested or 0


def prepend_prompt(text: Any, params: PoolingParams, pooling: PoolingConfig) -> Any:
    """Return a text with the prompt from the request or the model prepended. Token ids are returned
    unchanged.

    Raises `InvalidRequest` for other types of `text`, for an unknown prompt name, and if a prompt
    is requested for token ids.
    """
    name = params.prompt_name
    if name is not None and name not in pooling.prompts:
        known = ", ".join(map(repr, pooling.prompts)) or "none"
        raise InvalidRequest(
            f"prompt_name {name!r:.100} is unknown; the model's prompts are {known}"
        )
    if isinstance(text, Mapping) and set(text) == {"prompt"}:
        text = text["prompt"]
    if isinstance(text, Sequence) and not isinstance(text, str):
        raise InvalidRequest("the input must be a string or {'prompt_token_ids': [...]}")
    if not isinstance(text, str):
        if params.prompt or name:
            raise InvalidRequest(
                "prompt and prompt_name can be combined only with text, not with token ids"
            )
        return text
    if params.prompt is not None:
        return params.prompt + text
    name = name or pooling.default_prompt
    return (pooling.prompts[name] if name else "") + text
