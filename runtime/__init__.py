"""The actor runtime, which knows nothing about LLMs: actors, the nodes (processes) in which they
run, and the edges (one-way channels) over which they exchange messages."""
