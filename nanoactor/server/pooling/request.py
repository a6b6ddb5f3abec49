"""Request bodies of the routes for embeddings, reranking and scores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta, Struct

from nanoactor.api.engine import Prompt
from nanoactor.requests.pooling_params import PoolingParams
from nanoactor.server.errors import invalid

MAX_INPUTS = 2048
"""Maximum number of texts per request, as in OpenAI's API."""
_TOKENS = Meta(description="Keep this many tokens at the end of a text; -1 keeps as many as fit")


class _Pooled(Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields that requests for embeddings, reranking and scores share."""

    model: Annotated[str, Meta(description="Default: the served model")] | None = None
    priority: Annotated[int, Meta(description="Lower values run first")] | None = None
    truncate_prompt_tokens: Annotated[int, _TOKENS] | None = None
    user: Annotated[str, Meta(description="Written to the access log")] | None = None


class EmbeddingRequest(_Pooled, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /v1/embeddings`."""

    ROUTE: ClassVar[str] = "embeddings"
    input: str | list[str | int | list[int]]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    normalize: (
        Annotated[bool, Meta(description="Default: as specified in the model's files")] | None
    ) = None
    prompt_name: (
        Annotated[
            str,
            Meta(description="Name of one of the model's prompts, which is put before each text"),
        ]
        | None
    ) = None
    prompt: Annotated[str, Meta(description="Text that is put before each input text")] | None = (
        None
    )

    @property
    def params(self) -> PoolingParams:
        """Pooling parameters for the engine. Raises `InvalidRequest` if one is invalid."""
        return PoolingParams(
            dimensions=self.dimensions,
            normalize=self.normalize,
            prompt_name=self.prompt_name,
            prompt=self.prompt,
            truncate_prompt_tokens=self.truncate_prompt_tokens,
        )

    @property
    def texts(self) -> list[Prompt]:
        """The inputs as prompts: texts, or lists of token ids. Raises `APIError` if the input is
        invalid."""
        inputs = self.input
        if isinstance(inputs, str):
            return [inputs]
        if inputs and isinstance(inputs[0], int):
            return [_ids(inputs)]
        _check_count("input", inputs)
        return [text if isinstance(text, str) else _ids(text) for text in inputs]


def _ids(token_ids: Any) -> Prompt:
    if not isinstance(token_ids, list) or not all(isinstance(token, int) for token in token_ids):
        raise invalid(
            "input must be a string, a list of token ids, or a list that contains only strings "
            "and lists of token ids",
            "input",
        )
    return {"prompt_token_ids": token_ids}


def _check_count(name: str, items: Sequence[Any]) -> None:
    if not items:
        raise invalid(f"{name} must not be empty", name)
    if len(items) > MAX_INPUTS:
        raise invalid(f"{name} has {len(items)} items; at most {MAX_INPUTS} are accepted", name)


class Document(Struct, forbid_unknown_fields=True):
    """A document in the form of an object with a text."""

    text: str


class RerankRequest(_Pooled, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /rerank`, as in the APIs of Jina and Cohere."""

    ROUTE: ClassVar[str] = "rerank"
    query: str
    documents: list[str | Document]
    top_n: Annotated[int, Meta(ge=0)] | None = None
    return_documents: bool | None = None
    instruction: (
        Annotated[str, Meta(description="Description of what counts as a match")] | None
    ) = None

    @property
    def texts(self) -> list[str]:
        """Texts of the documents. Raises `APIError` if there are none, or too many."""
        _check_count("documents", self.documents)
        return [
            document if isinstance(document, str) else document.text for document in self.documents
        ]


class ScoreRequest(_Pooled, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /score`, as in vLLM."""

    ROUTE: ClassVar[str] = "score"
    text_1: str | list[str] | None = None
    text_2: str | list[str] | None = None
    queries: str | list[str] | None = None
    documents: str | list[str] | None = None
    instruction: (
        Annotated[str, Meta(description="Description of what counts as a match")] | None
    ) = None

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """Pairs of texts to score. Each second text is paired with the first text at the same index
        or, if there is only one first text, with that one. Raises `APIError` if the numbers of
        texts do not match."""
        first, second = _texts_of(self, "text_1", "queries"), _texts_of(self, "text_2", "documents")
        if len(first) == 1:
            first = first * len(second)
        if len(first) != len(second):
            raise invalid(
                "text_1 (queries) must have one text or as many texts as text_2 (documents), "
                f"got {len(first)} and {len(second)} texts"
            )
        return list(zip(first, second, strict=True))


def _texts_of(body: ScoreRequest, name: str, other: str) -> list[str]:
    present = [(key, getattr(body, key)) for key in (name, other) if getattr(body, key) is not None]
    if len(present) != 1:
        raise invalid(f"give exactly one of {name} and its newer name {other}", name)
    ((key, texts),) = present
    texts = [texts] if isinstance(texts, str) else texts
    _check_count(key, texts)
    return list(texts)
