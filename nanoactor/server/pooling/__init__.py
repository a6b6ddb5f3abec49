"""Routes for embeddings, reranking and scores, in the formats of OpenAI, Jina, Cohere and vLLM."""
