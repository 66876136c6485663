"""Control tasks: Gymnasium environments, their policies, and the experience that the PPO update learns from.

environments ─▶ rollout ─▶ experience ─▶ PPO epochs (training/)
"""

from kedge.gym.actions import ActionBounds, ActionHead
from kedge.gym.environments import Environments
from kedge.gym.episodes import Episode, Episodes
from kedge.gym.evaluate import Recording, play_episodes, record_episode, save_animation
from kedge.gym.experience import ControlExperience, experience_of
from kedge.gym.learner import ControlLearner
from kedge.gym.making import AtariFrames, EnvironmentSpec, make_environment, make_environments
from kedge.gym.memory import Memory
from kedge.gym.networks import ControlActorCritic
from kedge.gym.normalization import Normalization
from kedge.gym.rollout import Steps, collect_steps
from kedge.gym.saving import ControlPolicy, load_control_policy, save_control_policy
from kedge.gym.spaces import Spaces

__all__ = [
    "ActionBounds",
    "ActionHead",
    "AtariFrames",
    "ControlActorCritic",
    "ControlExperience",
    "ControlLearner",
    "ControlPolicy",
    "EnvironmentSpec",
    "Environments",
    "Episode",
    "Episodes",
    "Memory",
    "Normalization",
    "Recording",
    "Spaces",
    "Steps",
    "collect_steps",
    "experience_of",
    "load_control_policy",
    "make_environment",
    "make_environments",
    "play_episodes",
    "record_episode",
    "save_animation",
    "save_control_policy",
]
