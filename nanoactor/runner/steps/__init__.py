"""Steps on the device, replayed from graphs or run operator by operator, and their results."""
