"""The public classes of the engine: `AsyncLLM`, `LLM` and their shared base classes."""
