"""The roles: each worker class is one rank's object."""

from hybridrl.workers.actor import Actor, ActorConfig
from hybridrl.workers.base import RankContext, Worker
from hybridrl.workers.critic import Critic, CriticConfig
from hybridrl.workers.learner import Learner, LearnerConfig
from hybridrl.workers.packed_model import ModelConfig
from hybridrl.workers.reference import Reference, ReferenceConfig
from hybridrl.workers.reward import Reward, RewardConfig, RewardWorkerConfig
from hybridrl.workers.rollout import NativeRollout, RolloutConfig, VLLMRollout
from hybridrl.workers.trainer import OptimizerConfig

__all__ = [
    "Actor",
    "ActorConfig",
    "Critic",
    "CriticConfig",
    "Learner",
    "LearnerConfig",
    "ModelConfig",
    "NativeRollout",
    "OptimizerConfig",
    "RankContext",
    "Reference",
    "ReferenceConfig",
    "Reward",
    "RewardConfig",
    "RewardWorkerConfig",
    "RolloutConfig",
    "VLLMRollout",
    "Worker",
]
