"""Recovery after the death of a process: the journal of requests, their resumption, and the search
for requests that cause crashes."""
