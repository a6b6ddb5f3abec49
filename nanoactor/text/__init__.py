"""Conversion of text to token ids and back, chat templates, and stop strings. Importing this
package loads neither torch nor transformers."""
