"""Judges what a kernel did. Every invariant is one file in this folder; `invariants()` finds them by themselves."""
