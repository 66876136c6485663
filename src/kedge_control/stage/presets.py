"""Recipes of `kedge control`. Its defaults are for PPO on MuJoCo."""

from kedge.config.presets.recipe import Cited, Preset

_PPO = "PPO table 5 (arXiv 1707.06347)"
_ZOO = "Stable-Baselines3's zoo, CartPole-v1"
_TRPO = "TRPO (arXiv 1502.05477)"
_A3C = "A3C (arXiv 1602.01783)"
_SB3 = "Stable-Baselines3's TRPO"
_VPG = "Williams 1992, with a critic as the baseline"
_CRITIC = "the critic is trained as in PPO"

CLASSIC = Preset(
    name="classic-control",
    about="Short runs on small tasks with discrete actions, such as CartPole-v1.",
    values={
        "control.total_steps": Cited(80_000, "kedge: CartPole-v1 takes 52,000 to 68,000 to a mean of 475"),
        "control.num_envs": Cited(8, _ZOO),
        "control.num_steps": Cited(64, "kedge: updates of 512 steps, half as noisy as the zoo's of 256"),
        "control.num_minibatches": Cited(2, f"{_ZOO}: batches of 256"),
        "control.learning_rate": Cited(2e-3, "kedge: with half of the zoo's epochs"),
        "control.normalize_observations": Cited(False, _ZOO),
        "control.early_stop_kl": Cited(0.01, "kedge: the advantages of a solved task are noise"),
    },
)

ATARI = Preset(
    name="atari",
    about="Atari games from frames (PPO's appendix).",
    values={
        "control.total_steps": Cited(10_000_000, "PPO §6.4: 40 million frames, 4 per step"),
        "control.num_envs": Cited(8, _PPO),
        "control.num_steps": Cited(128, _PPO),
        "control.num_epochs": Cited(3, _PPO),
        "control.num_minibatches": Cited(4, f"{_PPO}: 256 of 1,024 steps"),
        "control.learning_rate": Cited(2.5e-4, _PPO),
        "control.clip_range": Cited(0.1, _PPO),
        "control.anneal_clip_range": Cited(True, _PPO),
        "control.value_coef": Cited(1.0, _PPO),
        "control.entropy_coef": Cited(0.01, _PPO),
        "control.critic": Cited("shared", _PPO),
        "control.hidden_sizes": Cited([512], "the Nature network"),
        "control.activation": Cited("relu", "the Nature network"),
        "control.reward_scaling": Cited("sign", "OpenAI Baselines; DQN"),
    },
)

TRPO = Preset(
    name="trpo",
    about="Trust region policy optimization (Schulman et al. 2015): one natural-gradient step per update.",
    values={
        "control.policy_loss": Cited("trust_region", _TRPO),
        "control.learning_rate": Cited(1e-3, f"{_SB3}, of the critic"),
        "control.schedule": Cited("constant", _SB3),
        "control.whiten_advantages": Cited("batch", "one step on the whole batch"),
        "control.max_grad_norm": Cited(None, _SB3),
    },
)

A2C = Preset(
    name="a2c",
    about="Synchronous advantage actor-critic (Mnih et al. 2016): one epoch, one unclipped step.",
    values={
        "control.policy_loss": Cited("unclipped", _A3C),
        "control.num_epochs": Cited(1, _A3C),
        "control.num_minibatches": Cited(1, _A3C),
        "control.num_envs": Cited(8, "Stable-Baselines3's zoo"),
        "control.num_steps": Cited(8, "Stable-Baselines3's zoo, MuJoCo; A3C: 5"),
        "control.gae_lambda": Cited(1.0, f"{_A3C}: the return of the piece, then the value"),
        "control.learning_rate": Cited(7e-4, "OpenAI Baselines' A2C"),
        "control.whiten_advantages": Cited("none", _A3C),
    },
)

VANILLA = Preset(
    name="vanilla-pg",
    about="The policy gradient with a learned baseline: one step per update, without ratios that move.",
    values={
        "control.policy_loss": Cited("unclipped", _VPG),
        "control.num_epochs": Cited(1, _VPG),
        "control.num_minibatches": Cited(1, _VPG),
        "control.gae_lambda": Cited(1.0, f"{_VPG}: the played return"),
        "control.learning_rate": Cited(3e-3, f"kedge: a hundredth of the steps of PPO; {_CRITIC}"),
        "control.whiten_advantages": Cited("batch", "one step on the whole batch"),
    },
)

CONTROL = (CLASSIC, ATARI, TRPO, A2C, VANILLA)
