"""The doctor on runs of other libraries: runs with injected faults and healthy ones, and published logs."""
