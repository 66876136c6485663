"""The life of a run: open, resume, fingerprint, load prompts and rewards, log, finish."""
