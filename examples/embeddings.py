"""Compare texts by their vectors, and rank documents for a query.

    python examples/embeddings.py --model Qwen/Qwen3-Embedding-0.6B
    python examples/embeddings.py --model Qwen/Qwen3-Reranker-0.6B --pooling yes_no

This needs an embedding model (it turns each text into a vector) or a reranker (it reads a query and
a document together and gives a score). Without arguments the demo model runs, whose vectors are
real but mean little: it was not trained for this.
"""

import argparse

import numpy as np

from nanoactor import LLM, PoolingParams

QUERY = "What light shines through the window?"
DOCUMENTS = [
    "The king gave the merchant three bags of gold.",
    "It is the east, and Juliet is the sun.",
    "A candle was burning behind the window all night.",
]


def compare(llm: LLM) -> None:
    """Print the vectors' length and the similarity of all pairs of texts."""
    # Some models expect an instruction before a query, and their checkpoint has it:
    # PoolingParams(prompt_name="query"). Documents are embedded as they are. `normalize` makes each
    # vector as long as 1, so that the product of two vectors is the cosine of their angle.
    outputs = llm.embed([QUERY, *DOCUMENTS], PoolingParams(normalize=True), use_tqdm=False)
    vectors = np.stack([output.outputs.embedding for output in outputs])
    print(f"{vectors.shape[0]} vectors of {vectors.shape[1]} numbers")
    print("cosine similarities, query first:")
    for row in vectors @ vectors.T:
        print(" ".join(f"{cosine:9.6f}" for cosine in row))


def rank(llm: LLM) -> None:
    """Print the documents, the best match first."""
    # A reranker's score is the probability of a match. An embedding model's is the cosine of the
    # two vectors; `score` puts its instruction before the query.
    scores = [output.outputs.score for output in llm.score(QUERY, DOCUMENTS, use_tqdm=False)]
    print(f"\n{QUERY}")
    for score, document in sorted(zip(scores, DOCUMENTS, strict=True), reverse=True):
        print(f"{score:9.6f}  {document}")


def main() -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description="Compare and rank texts.")
    parser.add_argument("--model", default="demo", help="a directory, or a name on the hub")
    parser.add_argument("--pooling", default="auto", help="auto, last, mean, cls or yes_no")
    given = parser.parse_args()
    # "auto" follows the checkpoint's own description. The demo's has none: take the last state.
    pooling = "last" if given.model == "demo" and given.pooling == "auto" else given.pooling
    with LLM(given.model, pooling=pooling) as llm:
        if pooling != "yes_no":  # a reranker has no vectors
            compare(llm)
        rank(llm)


if __name__ == "__main__":
    main()
