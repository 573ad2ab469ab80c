"""Prepare a model and its optimizer for a policy: plan, apply, save and load, restore."""
