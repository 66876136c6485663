"""Adapters of libraries; each imports its library when it is made."""
