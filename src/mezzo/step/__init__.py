"""Whole training and evaluation steps as one call, captured as CUDA graphs where possible."""
