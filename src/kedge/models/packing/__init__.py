"""Forward passes and decoding over real tokens only: packed rows, attention layouts, key-value cache."""
