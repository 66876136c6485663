"""The sums of a stage's memory on one machine; imports neither torch nor numpy."""
