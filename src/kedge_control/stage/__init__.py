"""The stage: its description and settings, which import no torch, and its run."""
