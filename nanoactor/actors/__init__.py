"""The actors: thin shells that receive messages, call the logic of other packages, and send the
resulting messages."""
