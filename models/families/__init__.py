"""Families of decoder models. Each file describes the layers and options of one family."""
