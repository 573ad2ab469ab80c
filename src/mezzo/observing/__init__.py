"""Observe a run: its log, op statistics, numerics, and the op that overflowed."""
