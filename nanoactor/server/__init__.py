"""The HTTP server, which serves OpenAI's API and others with an `AsyncLLM`."""
