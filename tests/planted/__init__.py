"""Faults that end a process or never end, planted in adapters and fuzzed by the real command line."""
