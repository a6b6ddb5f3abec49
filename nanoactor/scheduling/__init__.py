"""Which sequences run in which step: pure logic, events in, messages out."""
