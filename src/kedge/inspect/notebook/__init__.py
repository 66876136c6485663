"""Results as they show themselves: a block in a notebook, a few lines elsewhere."""
