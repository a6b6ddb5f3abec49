"""Names, flags and modules of other engines, and their equivalents in nanoactor."""
