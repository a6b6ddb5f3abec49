"""Routes for vectors and scores, in the shapes of OpenAI, Jina, Cohere and vLLM."""
