"""Routes for embeddings and scores, in the formats of OpenAI, Jina, Cohere and vLLM."""
