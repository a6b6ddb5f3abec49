"""The host's side of steps: rows and their sampling parameters, laid out in arrays for the
device."""
