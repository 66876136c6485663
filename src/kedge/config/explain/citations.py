"""The works that defaults come from, by the short names that fields cite."""

import re

__all__ = ["SOURCES", "cited_works"]

SOURCES = {
    "S0": "Roy, The Full PPO Training Step",
    "S1": "Post-Training (4/8): PPO",
    "S2": "an introduction to PPO and its hyperparameters",
    "S3": "Wolfe, PPO for LLMs (2025)",
    "S4": "an introduction to PPO and the data flow of RLHF",
    "PPO": "Schulman et al. 2017, arXiv 1707.06347",
    "GAE": "Schulman et al. 2015, arXiv 1506.02438",
    "A3C": "Mnih et al. 2016, arXiv 1602.01783",
    "Ziegler": "Ziegler et al. 2019, arXiv 1909.08593, and openai/lm-human-preferences",
    "Stiennon": "Stiennon et al. 2020, arXiv 2009.01325, and openai/summarize-from-feedback",
    "InstructGPT": "Ouyang et al. 2022, arXiv 2203.02155",
    "Gao": "Gao et al. 2022, arXiv 2210.10760",
    "N+": "Huang et al. 2024, arXiv 2403.17031, and vwxyzjn/summarize_from_feedback_details",
    "HFB": "Huang et al. 2023, The N Implementation Details of RLHF with PPO",
    "GRPO": "Shao et al. 2024, arXiv 2402.03300",
    "Dr. GRPO": "Liu et al. 2025, arXiv 2503.20783",
    "DAPO": "Yu et al. 2025, arXiv 2503.14476",
    "VAPO": "Yue et al. 2025, arXiv 2504.05118",
    "RLOO": "Ahmadian et al. 2024, arXiv 2402.14740",
    "GSPO": "Zheng et al. 2025, arXiv 2507.18071",
    "MiniMax-M1": "MiniMax 2025, arXiv 2506.13585",
    "ScaleRL": "Khatri et al. 2025, arXiv 2510.13786",
    "SAO": "Hou et al. 2026, arXiv 2607.07508",
    "VC-PPO": "Yuan et al. 2025, arXiv 2503.01491",
    "REINFORCE++": "Hu et al. 2025, arXiv 2501.03262",
    "OPO": "Hao et al. 2025, arXiv 2505.23585",
    "ReMax": "Li et al. 2023, arXiv 2310.10505",
    "dual-clip PPO": "Ye et al. 2019, arXiv 1912.09729",
    "Open-Reasoner-Zero": "Hu et al. 2025, arXiv 2503.24290",
    "VinePPO": "Kazemnejad et al. 2024, arXiv 2410.01679",
    "Farebrother": "Farebrother et al. 2024, arXiv 2403.03950 (HL-Gauss)",
    "C51": "Bellemare et al. 2017, arXiv 1707.06887",
    "DQN": "Mnih et al. 2015, Human-level control through deep reinforcement learning, Nature 518",
    "PaLM": "Chowdhery et al. 2022, arXiv 2204.02311",
    "LoRA": "Hu et al. 2021, arXiv 2106.09685",
    "DoRA": "Liu et al. 2024, arXiv 2402.09353",
    "rsLoRA": "Kalajdzievski 2023, arXiv 2312.03732",
    "QLoRA": "Dettmers et al. 2023, arXiv 2305.14314",
    "LoRA Without Regret": "Schulman et al. 2025, Thinking Machines Lab",
    "OpenAI Baselines": "github.com/openai/baselines",
    "TRPO": "Schulman et al. 2015, arXiv 1502.05477",
    "Spinning Up": "github.com/openai/spinningup",
    "Stable-Baselines3": "Raffin et al. 2021, JMLR 22, and the settings of its zoo",
    "CleanRL": "Huang et al. 2022, JMLR 23",
    "What Matters in On-Policy RL": "Andrychowicz et al. 2020, arXiv 2006.05990",
}


def cited_works(text: str) -> dict[str, str]:
    """The works whose short names appear in a text, in the order of `SOURCES`."""
    return {
        name: work
        for name, work in SOURCES.items()
        if re.search(rf"(?<![\w.-]){'(?<!Dr. )' if name == 'GRPO' else ''}{re.escape(name)}(?![\w-]|\+)", text)
    }
