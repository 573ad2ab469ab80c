"""Advice on precision, made from observed runs."""
