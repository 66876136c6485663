"""Tasks for language models: verifiers, environments and tools, and the sandbox that runs their programs."""
