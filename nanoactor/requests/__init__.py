"""Parameters and outputs of requests, with vLLM's names."""
