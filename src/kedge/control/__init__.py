"""Control tasks: Gymnasium environments, their policies, and the experience that the PPO update learns from.

environments ─▶ rollout ─▶ experience ─▶ PPO epochs (training/)
"""

from kedge.control.actions import ActionBounds, ActionHead
from kedge.control.environments import Environments
from kedge.control.episodes import Episode, Episodes
from kedge.control.evaluate import Recording, play_episodes, record_episode, save_animation
from kedge.control.experience import ControlExperience, experience_of
from kedge.control.learner import ControlLearner
from kedge.control.making import AtariFrames, EnvironmentSpec, make_environment, make_environments
from kedge.control.networks import ControlActorCritic
from kedge.control.normalization import Normalization
from kedge.control.rollout import Steps, collect_steps
from kedge.control.saving import ControlPolicy, load_control_policy, save_control_policy
from kedge.control.spaces import Spaces

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
