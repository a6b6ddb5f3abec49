"""The choice of what runs in each step: pure logic, events in, messages out."""
