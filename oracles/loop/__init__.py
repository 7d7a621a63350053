"""The loop oracles: plain Python that walks the pages of the very arguments, scalar by scalar. One file an operation.

They share no code with the dense oracles; the two are held against each other on every case.
"""
