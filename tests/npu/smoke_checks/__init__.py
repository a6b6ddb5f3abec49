"""What `tests.npu.smoke` checks, a module for each kind; none is imported by its parent process."""
