"""What labels of people are worth, in the world of the demo."""
