"""The dense oracles: float64 over the logical tokens, never a page. One file an operation."""
