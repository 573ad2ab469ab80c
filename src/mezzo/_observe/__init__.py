"""Collectors: they watch tensors go by and give plain data."""
