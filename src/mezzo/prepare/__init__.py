"""A model and its optimizer made ready for a policy: planned, applied whole or not at all, saved exactly, and put back."""
