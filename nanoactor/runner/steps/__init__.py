"""Steps on the device, captured or operator by operator, and their results."""
