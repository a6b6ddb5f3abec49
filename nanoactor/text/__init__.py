"""From text to token ids and back; importing it loads neither torch nor transformers."""
