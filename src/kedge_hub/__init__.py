"""Model cards, and the Hugging Face hub."""
