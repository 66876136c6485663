"""One page per stage: sft, reward, ppo, rlhf, generate, evaluate, demo."""
