"""Traces with every track that a test is about."""


async def complete_trace(llm, tracks, *begin):
    """Return a trace with these tracks. A process that a busy machine keeps from answering in time
    is left out of a trace, so ask until none is."""
    while True:
        trace = await llm.trace(*begin)
        if {track.track for node in trace.nodes for track in node.tracks} >= tracks:
            return trace
