"""Holds the memoised interpreter against the one that only has its corrections: `python tests/same_bits --help`."""
