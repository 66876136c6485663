"""What a run needs of the machine: files, processes, memory, several ranks."""
