"""What a user decides about learning. One small frozen model per subject; a wrong key or value is an error at start.

Numbers only an expert would touch are constants in the module that uses them, with their reason.
"""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class _Settings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class OptimizerSettings(_Settings):
    lr: float = Field(default=1e-6, gt=0)
    """Learning rate (AdamW)."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the mean of gradients."""
    beta2: float = Field(default=0.95, ge=0, lt=1)
    """Decay of the mean of squared gradients; nearer to 1 for the critic, whose gradients are noisier."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay."""
    clip: float = Field(default=1.0, gt=0)
    """The gradient's global norm is clipped to this."""


class SupervisedSettings(_Settings):
    data: str
    """Archive of trajectories to imitate; their sampled tokens are the targets."""
    steps: int = Field(gt=0)
    """Number of optimizer steps."""
    batch_size: int = Field(default=64, gt=0)
    """Trajectories per step, drawn anew at each step."""
    lr: float = Field(default=2e-3, gt=0)
    """Peak learning rate; a cosine takes it to 5 % of the peak."""
    warmup_steps: int = Field(default=30, ge=0)
    """Steps over which the learning rate rises from zero."""


class ValueSettings(_Settings):
    batches: int = Field(gt=0)
    """Batches of the unchanged policy to claim before the first policy step."""
    updates: int = Field(default=8, gt=0)
    """Critic updates per batch, on average; each is on one batch drawn from all that were claimed so far."""


class StopSettings(_Settings):
    steps: int = Field(gt=0)
    """Policy steps to take at most."""
    success: float | None = None
    """Stop as soon as the mean reward of the newest trained trajectories is at least this; never when not set."""
    window: int = Field(default=256, gt=0)
    """How many of the newest trained trajectories that mean is taken over."""


class AdvantageSettings(_Settings):
    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount per action token."""
    lambda_policy: float | None = Field(default=None, ge=0, le=1)
    """GAE lambda of the policy's advantages; when not set 1 - 1 / (1.5 l) with l action tokens in the episode."""
    lambda_critic: float = Field(default=1.0, ge=0, le=1)
    """GAE lambda of the critic's targets; 1 makes the target the discounted return."""
    bootstrap_truncated: bool = False
    """Whether a truncated episode goes on, in expectation, with the critic's value of its last position, as a segment
    of an unfinished episode always does. Off, because a truncated episode is graded as it stands: its reward is the
    outcome, and a value on top of it would reward running out of turns."""
    whiten: bool = False
    """Divide the advantages of a batch by their standard deviation after subtracting their mean."""


class ObjectiveSettings(_Settings):
    name: Literal["dis", "ppo"] = "dis"
    """dis: direct double-sided importance sampling against the engine; ppo: clipped ratio to the claimed policy."""
    low: float = Field(default=0.8, gt=0, le=1)
    """A ratio below 1 - low is masked (dis) or clipped (ppo)."""
    high: float = Field(default=3.0, gt=0)
    """A ratio above 1 + high is masked (dis) or clipped (ppo)."""
    entropy: float = Field(default=0.0, ge=0)
    """Weight of the entropy bonus."""


class ParallelSettings(_Settings):
    tensor: int = Field(default=1, gt=0)
    """Ranks that share every layer."""
    pipeline: int = Field(default=1, gt=0)
    """Ranks that share the stack of layers; what is left of the world is data parallel."""


class LearnerSettings(_Settings):
    stop: StopSettings
    """When the policy stage ends."""
    supervised: SupervisedSettings | None = None
    """Imitation before anything else; left out when the model already knows its tools."""
    value: ValueSettings | None = None
    """Value pretraining; a critic that explains nothing makes the first policy steps noise."""
    policy: OptimizerSettings = OptimizerSettings()
    """The policy's optimizer."""
    critic: OptimizerSettings = OptimizerSettings(lr=5e-6, beta2=0.999)
    """The critic's optimizer."""
    critic_updates: int = Field(default=1, gt=0)
    """Critic updates per policy step."""
    minibatches: int = Field(default=1, gt=0)
    """Optimizer steps of the policy per claimed batch, each on its share of the batch."""
    advantage: AdvantageSettings = AdvantageSettings()
    """From rewards and values to advantages."""
    objective: ObjectiveSettings = ObjectiveSettings()
    """From advantages to the policy's loss."""
    parallel: ParallelSettings = ParallelSettings()
    """How one model is spread over ranks."""
    tokens_per_microbatch: int = Field(default=8192, gt=0)
    """Positions packed into one forward pass; a longer trace gets one of its own."""
    checkpoint_every: int = Field(default=25, gt=0)
    """Steps between checkpoints; a crash repeats at most this many."""
    publish_seconds: float = Field(default=60.0, gt=0)
    """How long to wait for the engines to serve a new version before going on without those that do not."""
    claim_seconds: float = Field(default=3600.0, gt=0)
    """How long a batch may take to become claimable before the learner gives up and says so."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of parameters and activations."""
    seed: int = 0
    """Seed of every random choice the learner makes."""
