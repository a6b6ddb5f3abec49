"""The HTTP server: one more user of `AsyncLLM`, in the shapes of the OpenAI API."""
