"""Products of a mixture of experts: rows sorted by expert, and each expert's weight for its rows."""
