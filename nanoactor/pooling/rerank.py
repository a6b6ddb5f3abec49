"""The prompt with which a reranker judges whether a document answers a query.

Source: the model card of Qwen3-Reranker; arXiv:2506.05176.
"""

from __future__ import annotations

INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
"""Task description that is used if a request has no instruction."""
_SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".'
)


def judgement_prompt(query: str, document: str, instruction: str | None = None) -> str:
    """Return the prompt for a query and a document, which the model completes with "yes" or "no".

    `instruction` describes the task; None means `INSTRUCTION`.
    """
    return (
        f"<|im_start|>system\n{_SYSTEM}<|im_end|>\n<|im_start|>user\n"
        f"<Instruct>: {INSTRUCTION if instruction is None else instruction}\n"
        f"<Query>: {query}\n<Document>: {document}<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
