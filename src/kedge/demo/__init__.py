"""The demo: an embedded world with known facts, its recipe, examination and report."""
