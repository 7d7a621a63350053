"""Mutants: kernels with one planted, realistic bug each, as edits of the good kernels' own sources."""
