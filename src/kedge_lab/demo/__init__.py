"""The demo: an embedded world with known facts, its recipe, gold evaluation and report."""
