"""The parts of the documentation that are computed: the page of all fields, and one token's way with its pictures."""
