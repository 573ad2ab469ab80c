"""Other systems' call shapes, each a thin translation: `mezzo.compat.torch`, `mezzo.compat.apex` and their neighbours. Nothing in mezzo imports them."""
