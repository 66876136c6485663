"""Tools for finished models and runs: evaluate, generate, sweep, chat, and the demo."""
