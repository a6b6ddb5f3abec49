"""Images and videos before they reach a model: validation, headers, decoding, and pixels."""
