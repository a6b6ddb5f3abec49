"""Pictures and videos before they reach a model: headers, pixels, and their places in a prompt."""
