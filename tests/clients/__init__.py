"""Programs of others against the server, with a model that says what makes sense."""
