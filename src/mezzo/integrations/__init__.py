"""mezzo inside Lightning, Accelerate and transformers. `import mezzo` imports none of them."""
