"""Names, flags and modules of other engines, and what stands for them here."""
