"""Forward passes and decoding without padding: packed rows, attention layouts, key–value cache."""
