"""Access to the machine: files, processes, memory, several ranks."""
