"""The generated documentation: the reference of all fields, and the page about one token with its figures."""
