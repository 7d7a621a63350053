"""The operations, the registry of kernels, and the kernels of the project itself.

Importing this package registers nothing; `pagefuzz.kernels.own` registers the project's kernels.
"""
