"""Gradient scaling: the scale as a value, on a device, and the scaler that moves it."""
