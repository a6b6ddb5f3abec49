"""The parts of the scheduler that only some requests need."""
