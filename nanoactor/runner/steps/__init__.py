"""Execution of steps on the device, as graphs or operator by operator, and their results."""
