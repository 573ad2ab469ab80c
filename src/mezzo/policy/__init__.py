"""Policies, the ops that they apply to, and op lists: pure data and pure functions."""
