"""Guards against non-finite values, loss spikes, and a sampler that disagrees with the trainer."""
