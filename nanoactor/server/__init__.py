"""HTTP server that exposes an `AsyncLLM` through the APIs of OpenAI, Anthropic and others."""
