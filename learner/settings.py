"""What a user decides about learning. One small frozen model per subject; a wrong key or value is an error at start.

Numbers only an expert would touch are constants in the module that uses them, with their reason.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from . import baselines, corrections, objectives
from .advantages import gae
from .aggregation import Aggregation
from .lookup import check, find, signature

# What functions may ask for, by name: an objective, a correction, an advantage per action, one against the group.
ACTION = ("theta", "old", "mu", "advantage", "drift", "mismatch", "length", "entropy", "reference")
CORRECTION = ("old", "mu", "mismatch", "length")
EPISODE = ("rewards", "values", "bootstrap", "boundaries")
GROUP = ("scores", "groups", "attempts")


class _Settings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class OptimizerSettings(_Settings):
    lr: float = Field(default=1e-6, gt=0)
    """Learning rate (AdamW)."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the mean of gradients."""
    beta2: float = Field(default=0.95, ge=0, lt=1)
    """Decay of the mean of squared gradients."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay."""
    clip: float = Field(default=1.0, gt=0)
    """The gradient's global norm is clipped to this."""
    frozen: Literal["nothing", "attention"] = "nothing"
    """What keeps the weights it has when the process starts: nothing, or attention (its projections and norms)."""


class CriticSettings(OptimizerSettings):
    lr: float = Field(default=5e-6, gt=0)
    """Learning rate (AdamW); above the policy's, whose values it has to follow."""
    beta2: float = Field(default=0.999, ge=0, lt=1)
    """Decay of the mean of squared gradients; nearer to 1 than the policy's, as its gradients are noisier."""
    updates: int = Field(default=1, gt=0)
    """Critic updates per policy step, each on the whole batch."""
    value_clip: float | None = Field(default=None, gt=0)
    """With several updates per step: how far a value may move from where it was before the first; 0.2 is usual."""
    warmup: int = Field(default=0, ge=0)
    """First steps of the policy stage in which the critic learns alone."""


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
    name: str = "gae"
    """gae: by the critic. grpo, dr-grpo or rloo: against the other attempts of the group, without a critic.
    package.module:function: your own (see learner/advantages.py)."""
    gamma: float = Field(default=1.0, gt=0, le=1)
    """gae: discount per action token."""
    lambda_policy: float | None = Field(default=None, ge=0, le=1)
    """GAE lambda of the policy's advantages; when not set 1 - 1 / (1.5 l) with l action tokens in the episode."""
    lambda_critic: float = Field(default=1.0, ge=0, le=1)
    """GAE lambda of the critic's targets; 1 makes the target the discounted return."""
    bootstrap_truncated: bool = False
    """gae: whether a truncated episode goes on, in expectation, with the critic's value of its last position, as a
    segment of an unfinished episode always does. Off, because a truncated episode is graded as it stands: its reward is
    the outcome, and a value on top of it would reward running out of turns."""
    per_turn: bool = False
    """Against the group: compare what each turn earned, and give an action the sum of its turn's and the later ones,
    instead of comparing what whole episodes earned."""
    whiten: bool = False
    """Divide the advantages of a batch by their standard deviation after subtracting their mean."""
    parameters: dict[str, Any] = {}
    """What your own function takes besides."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        asks = signature(self.function).asks
        given = GROUP if "scores" in asks else EPISODE
        check("advantage", self.name, self.function, given, self.parameters)
        if self.name != "gae" and self.lambda_policy is not None:
            raise ValueError(f"lambda_policy is for gae, not {self.name}")
        if not self.by_critic and (self.gamma, self.lambda_critic, self.bootstrap_truncated) != (1.0, 1.0, False):
            raise ValueError(f"{self.name} has no critic that gamma, lambda_critic or bootstrap_truncated are for")
        if self.per_turn and not self.by_group:
            raise ValueError(f"per_turn is for advantages against the group; {self.name} takes rewards where they fall")
        return self

    @property
    def function(self) -> Callable[..., Any]:
        return find("advantage", self.name, {"gae": gae, **baselines.BY_NAME})

    @property
    def by_group(self) -> bool:
        return "scores" in signature(self.function).asks

    @property
    def by_critic(self) -> bool:
        return "values" in signature(self.function).asks


class KlSettings(_Settings):
    weight: float = Field(gt=0)
    """What the penalty is multiplied by."""
    estimator: Literal["k1", "k2", "k3"] = "k2"
    """How the divergence is estimated from one action (learner/objectives/kl.py): k2 in the loss, k1 in the reward."""
    place: Literal["loss", "reward"] = "loss"
    """loss: a term of it, for the policy as it is. reward: taken off what each action earned, for the policy that
    sampled it."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.estimator == "k1" and self.place == "loss":
            raise ValueError("the gradient of k1 in the loss is zero on average: take k2, or k1 in the reward")
        return self

    def penalty(self, logprob: Any, reference: Any) -> Any:
        """weight x estimate for each action, of tensors."""
        return self.weight * getattr(objectives, self.estimator)(logprob, reference)


class ObjectiveSettings(_Settings):
    name: str = "dis"
    """dis: direct double-sided importance sampling against the engine. ppo, grpo, cispo: by the ratio of each action to
    the policy that claimed the batch; gspo, gspo-token: by that of whole episodes; decoupled-ppo: ppo, weighted for the
    engine's age. package.module:function: your own (see learner/objectives)."""
    low: float | None = Field(default=None, gt=0, le=1)
    """A ratio below 1 - low is masked (dis) or clipped. Not set: dis 0.8, ppo 0.2, gspo 3e-4, cispo no bound."""
    high: float | None = Field(default=None, gt=0)
    """A ratio above 1 + high is masked (dis) or clipped. Not set: dis 3, ppo 0.2, gspo 4e-4, cispo 4."""
    dual: float | None = Field(default=None, gt=1)
    """ppo and its kin: the ratio of an action with negative advantage counts at most this; 3 is usual."""
    old: Literal["learner", "engine"] = "learner"
    """What ratios are to: the learner that claimed the batch, or the engine that sampled it."""
    aggregation: Aggregation | None = None
    """How losses are averaged. Not set: seq-mean-token-mean for grpo and gspo, token-mean for the others."""
    length: int = Field(default=1024, gt=0)
    """What seq-mean-token-sum-norm divides the sum over a sequence by."""
    entropy: float = Field(default=0.0, ge=0)
    """Weight of the entropy bonus."""
    kl: KlSettings | None = None
    """Penalty for leaving the policy that the policy stage began with; none when not set."""
    parameters: dict[str, Any] = {}
    """What your own function takes besides."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        check("objective", self.name, self.function, ACTION, self.arguments)
        if self.old == "engine" and not self.asks & {"old", "drift"}:
            raise ValueError(f"{self.name} has no ratio to an old policy that `old: engine` could mean")
        if self.old == "engine" and "mu" in self.asks:
            raise ValueError(f"{self.name} tells the learner that claimed from the engine: `old` cannot be the engine")
        return self

    @property
    def function(self) -> Callable[..., Any]:
        return find("objective", self.name, objectives.BY_NAME)

    @property
    def asks(self) -> frozenset[str]:
        return signature(self.function).asks

    @property
    def arguments(self) -> dict[str, Any]:
        """What the recipe sets of the function's own settings."""
        ours = {"low": self.low, "high": self.high, "dual": self.dual}
        return {name: value for name, value in ours.items() if value is not None} | self.parameters

    @property
    def averaged(self) -> Aggregation:
        return self.aggregation or ("seq-mean-token-mean" if self.name in objectives.SEQUENCE_MEAN else "token-mean")


class CorrectionSettings(_Settings):
    name: str = "off"
    """off. icepop: an action weighs by its ratio, and is masked outside a range. tis: by its ratio, capped.
    sequence-mask: episodes outside a range are masked. sequence-tis: they weigh by their ratio, capped.
    package.module:function: your own (see learner/corrections.py)."""
    low: float | None = Field(default=None, gt=0)
    """Lower bound of the ratio learner / engine. Not set: icepop 0.5, sequence-mask 0.999."""
    high: float | None = Field(default=None, gt=0)
    """Upper bound of the ratio learner / engine. Not set: icepop, tis and sequence-tis 2, sequence-mask 1.002."""
    parameters: dict[str, Any] = {}
    """What your own function takes besides."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.function is not None:
            check("correction", self.name, self.function, CORRECTION, self.arguments)
        elif self.arguments:
            raise ValueError("correction is off and takes no bounds: name one")
        return self

    @property
    def function(self) -> Callable[..., Any] | None:
        return find("correction", self.name, corrections.BY_NAME)

    @property
    def asks(self) -> frozenset[str]:
        return frozenset() if self.function is None else signature(self.function).asks

    @property
    def arguments(self) -> dict[str, Any]:
        ours = {"low": self.low, "high": self.high}
        return {name: value for name, value in ours.items() if value is not None} | self.parameters


class SourceSettings(_Settings):
    advantage: AdvantageSettings | None = None
    """Instead of learner.advantage."""
    objective: ObjectiveSettings | None = None
    """Instead of learner.objective."""
    correction: CorrectionSettings | None = None
    """Instead of learner.correction."""


@dataclass(frozen=True)
class Method:
    """How one task source is learned from. Raises ValueError for parts that make no sense together."""

    advantage: AdvantageSettings
    objective: ObjectiveSettings
    correction: CorrectionSettings

    def __post_init__(self) -> None:
        correction, objective = self.correction.name, self.objective.name
        if correction != "off" and self.objective.old == "engine":
            raise ValueError(f"{correction} corrects for the engine, which {objective} with `old: engine` does already")
        if correction not in ("off", "sequence-mask") and "mu" in self.objective.asks:
            raise ValueError(
                f"{objective} weighs by the engine's probabilities itself: with {correction} they would count twice"
            )
        if objective == "gspo" and (self.advantage.by_critic or self.advantage.per_turn):
            raise ValueError("gspo needs one advantage for a whole episode: compare with the group, or take gspo-token")

    @property
    def asks(self) -> frozenset[str]:
        """What its functions ask for of each action."""
        return self.objective.asks | self.correction.asks


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
    critic: CriticSettings = CriticSettings()
    """The critic's optimizer, and how much of it there is."""
    minibatches: int = Field(default=1, gt=0)
    """Optimizer steps of the policy per claimed batch, each on its share of the batch."""
    advantage: AdvantageSettings = AdvantageSettings()
    """From rewards and values to advantages."""
    objective: ObjectiveSettings = ObjectiveSettings()
    """From advantages to the policy's loss."""
    correction: CorrectionSettings = CorrectionSettings()
    """For the difference between engine and learner, where the objective does not see to it."""
    per_source: dict[str, SourceSettings] = {}
    """What is different for the episodes of a task source, by its name."""
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

    @model_validator(mode="after")
    def _makes_sense(self) -> Self:
        for source in (None, *self.per_source):
            try:
                self.method(source)
            except ValueError as error:
                raise ValueError(f"per_source.{source}: {error}" if source else str(error)) from None
        if self.value is not None and not self.uses_critic:
            raise ValueError("value pretrains a critic that no advantage uses: leave it out")
        return self

    def method(self, source: str | None) -> Method:
        """How the episodes of a task source are learned from; that of None is what is not said otherwise."""
        own = self.per_source.get(source or "", SourceSettings())
        return Method(
            own.advantage or self.advantage, own.objective or self.objective, own.correction or self.correction
        )

    @property
    def methods(self) -> list[Method]:
        """That of every source with settings of its own, behind the one for all others."""
        return [self.method(source) for source in (None, *self.per_source)]

    def which(self, source: str) -> int:
        """The place of a source's method among `methods`."""
        return 1 + list(self.per_source).index(source) if source in self.per_source else 0

    @property
    def uses_reference(self) -> bool:
        """Whether anything is compared with the policy that the policy stage began with."""
        return any(method.objective.kl or "reference" in method.asks for method in self.methods)

    @property
    def uses_critic(self) -> bool:
        """Whether anything is learned by a critic."""
        return any(method.advantage.by_critic for method in self.methods)
