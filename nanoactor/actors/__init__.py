"""The actors: thin shells that receive messages, call the pure logic, and send messages."""
