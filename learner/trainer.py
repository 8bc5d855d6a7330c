"""The learner's loop: claim, judge, improve, publish, record (and, every few steps, checkpoint and commit).

Invariant: a step is done in this order, so that whoever sees its version sees weights that hold its gradient, and the
buffer makes room only for a batch that has been trained on. `Run` guarantees that a crash at any point repeats whole
steps and loses none.

Each line that waits says for whom in `Run`: `claim` for the actors, `publish` for the engines.
"""

from collections import deque

import numpy as np

from . import critic, metrics, policy, ranks, samples, supervised, value
from .critic import CriticStep
from .estimates import Estimate, estimate
from .packing import Batch, flatten
from .policy import PolicyStep
from .reference import Reference, penalise
from .run import Claim, LearnerConfig, Run

DONE, INTERRUPTED = 0, 3  # exit codes


class Trainer:
    """One learner process: Trainer(config).run() goes through the stages that are left and returns the exit code."""

    def __init__(self, config: LearnerConfig):
        self.state = Run(config)
        self._history: deque[tuple[float, float]] = deque(maxlen=metrics.SPAN)  # (entropy, reward) of the newest steps

    def run(self) -> int:
        """Trains until the end or a SIGTERM; either way the last checkpoint is durable and committed."""
        run = self.state
        if run.progress.stage == "done" and not self.finished():  # more steps are asked for since
            run.progress.stage = "policy"
            run.publish_again()
        if run.progress.stage == "supervised" and supervised.imitate(run):
            run.enter("value")
        if run.progress.stage == "value" and value.pretrain(run):
            run.enter("policy")
        if run.progress.stage == "policy" and self.train():
            run.enter("done")
        if run.progress.stage == "done":
            return DONE
        run.checkpoint()
        return INTERRUPTED

    def train(self) -> bool:
        """The policy stage: one claimed batch a step. Returns whether it is finished (or else was interrupted)."""
        run, settings = self.state, self.state.settings
        frozen = Reference(run)
        while not self.finished():
            if (claim := run.claim()) is None:
                return False
            batch = flatten(claim.trajectories)
            reference = frozen.look(batch)
            batch = penalise(batch, reference, settings)
            judged = critic.learn(run.critic, batch, settings, settings.critic.updates)
            learned = estimate(batch, judged.values, settings)
            step = self._learn_policy(batch, learned, reference)
            run.guard(*judged.updates, *step.updates, batch=claim.trajectories)
            run.finish(claim)
            publish_seconds = run.publish(changed=step.moved)
            self._record(claim, batch, judged, learned, step, publish_seconds)
        return True

    def finished(self) -> bool:
        """Whether the policy stage has taken all its steps or earns what it should."""
        stop, progress = self.state.settings.stop, self.state.progress
        known = len(progress.rewards) >= stop.window
        good = stop.success is not None and known and sum(progress.rewards) / len(progress.rewards) >= stop.success
        return progress.step >= stop.steps or good

    def _learn_policy(self, batch: Batch, learned: Estimate, reference: np.ndarray | None) -> PolicyStep:
        run, settings = self.state, self.state.settings
        if self._warming_up():
            return policy.watch(run.policy, batch, settings)
        return policy.improve(run.policy, batch, learned, settings, reference)

    def _warming_up(self) -> bool:
        """Whether the critic still learns alone."""
        settings = self.state.settings
        return settings.uses_critic and self.state.progress.step < settings.critic.warmup

    def _record(
        self,
        claim: Claim,
        batch: Batch,
        judged: CriticStep,
        learned: Estimate,
        step: PolicyStep,
        publish_seconds: float,
    ) -> None:
        run = self.state
        contents = metrics.contents(batch)
        if "entropy" in step.diagnostics:
            self._history.append((step.diagnostics["entropy"], contents["reward"]))
        return_mean, return_std = ranks.moments(learned.returns.astype(np.float64))
        run.progress.skipped += not step.moved and not self._warming_up()
        run.progress.zero_variance += contents["reward_std"] == 0
        run.record(
            steps=run.settings.stop.steps,
            wait_seconds=claim.wait_seconds,
            publish_seconds=publish_seconds,
            version=run.progress.version,
            loss=float(np.mean([update.loss for update in step.updates])) if step.updates else None,
            grad_norm=max((update.grad_norm for update in step.updates), default=None),
            critic_loss=judged.updates[0].loss if judged.updates else None,
            critic_grad_norm=judged.updates[0].grad_norm if judged.updates else None,
            explained_variance=critic.explained_variance(batch, judged.values, learned.returns, run.settings),
            return_mean=return_mean if judged.updates else None,
            return_std=return_std if judged.updates else None,
            advantage_mean=learned.mean,
            advantage_std=learned.spread,
            zero_variance_groups=metrics.zero_variance_groups(batch),
            entropy_trend=metrics.narrowing(list(self._history)),
            engine_error=metrics.engine_error(batch, step.before, claim.version),
            **step.diagnostics,
            **metrics.staleness(batch, claim.age),
            **contents,
        )
        last = self.finished() or run.stopping()
        samples.write(run.config.run_dir, run.progress.step, last, batch, judged.values, learned)
