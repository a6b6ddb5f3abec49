"""Planning of steps, from waiting sequences to planned rows, and processing of their results."""
