"""From waiting sequences to planned steps, and from results to tokens."""
