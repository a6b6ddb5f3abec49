"""The actors: thin shells that receive, call the pure logic, and send."""
