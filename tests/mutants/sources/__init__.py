"""Good kernels of other algorithms than the project's own, to plant bugs in."""
