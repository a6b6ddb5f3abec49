"""Scheduling logic: decides what runs in each step. It maps events to messages and does no I/O."""
