"""From text to token ids and back; imports neither torch nor transformers."""
