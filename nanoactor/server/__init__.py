"""The HTTP server: a client of `AsyncLLM` that serves the OpenAI API and others."""
