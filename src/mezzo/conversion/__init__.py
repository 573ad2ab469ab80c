"""Conversion of a trained model for inference: plan the casts, apply them, verify, save."""
