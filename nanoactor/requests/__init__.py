"""Parameters and outputs of requests, with the same names as in vLLM."""
