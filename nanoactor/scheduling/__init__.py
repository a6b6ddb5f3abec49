"""The scheduler's logic: chooses what runs in each step. Events in, messages out, no I/O."""
