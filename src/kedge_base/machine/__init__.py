"""The machine: files, memory, streams, servers, and how this process was started."""
