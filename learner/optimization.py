"""One model with its optimizer: forward passes, and updates that either happen whole or not at all.

Invariant: the gradient of an update is (sum of the loss over all actions of all ranks) / (their global number), however
the batch is cut into micro-batches or spread over ranks. A loss or gradient that is not finite changes nothing: neither
a weight nor the optimizer's state, on any rank, because every rank looks at the same global norm.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func

from . import ranks
from .model import Critic, Policy
from .packing import MicroBatch
from .settings import OptimizerSettings

Loss = Callable[[MicroBatch, Any], tuple[torch.Tensor, Sequence[torch.Tensor]]]
"""(micro-batch, model output) -> (loss summed over its actions, arrays to hand back)."""


@dataclass(frozen=True)
class Update:
    """What one update did."""

    outputs: list[list[np.ndarray]]
    """By array the loss handed back: its value per micro-batch, from before the update."""
    loss: float
    """Mean loss per action over all ranks."""
    grad_norm: float
    """Global L2 norm before clipping."""
    finite: bool
    """Whether loss and gradient were finite; if not, the update was refused."""

    @property
    def applied(self) -> bool:
        """Whether weights changed."""
        return self.finite and self.grad_norm > 0


class Evaluator:
    """A Policy or Critic that answers; without gradients or an optimizer it stays what it is."""

    def __init__(self, model: Policy | Critic):
        self.model = model
        self._wrapped: Any = model

    def forward(self, microbatches: Sequence[MicroBatch], outputs: Loss) -> list[list[np.ndarray]]:
        """Runs the model without gradient and returns what `outputs` hands back, per array and micro-batch."""
        with torch.no_grad():
            return self._schedule(microbatches, outputs, forward_only=True)[0]

    def _schedule(
        self, microbatches: Sequence[MicroBatch], loss: Loss, forward_only: bool
    ) -> tuple[list[list[np.ndarray]], float, int]:
        """-> (arrays handed back, by array then micro-batch; sum of the losses; number of actions) of this rank."""

        def reduce(batch: MicroBatch, output: Any) -> tuple[torch.Tensor, torch.Tensor, Any]:
            value, arrays = loss(batch, output)
            count = torch.tensor(len(batch.which), dtype=torch.int, device=value.device)
            return value, count, (value.detach(), [array.detach() for array in arrays])

        def step(batches: Iterator[MicroBatch], model: Any) -> tuple[Any, Any]:
            batch = next(batches)
            return model(batch), partial(reduce, batch)

        results = get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=iter(microbatches),
            model=[self._wrapped],
            num_microbatches=len(microbatches),
            seq_length=max(batch.tokens.shape[1] for batch in microbatches),
            micro_batch_size=1,
            forward_only=forward_only,
        )
        local = None
        if self.model.post_process:
            losses = np.array([float(value) for value, _ in results])
            arrays = [[array.float().cpu().numpy() for array in arrays] for _, arrays in results]
            local = [losses, *(array for per_microbatch in arrays for array in per_microbatch)]
        losses, *flat = ranks.from_last_stage(local)
        width = len(flat) // len(microbatches)
        outputs = [flat[index::width] for index in range(width)]
        return outputs, float(losses.sum()), sum(len(batch.which) for batch in microbatches)


class Trainee(Evaluator):
    """A Policy or Critic wrapped in Megatron's data parallelism, with AdamW over a distributed optimizer."""

    def __init__(self, model: Policy | Critic, settings: OptimizerSettings):
        super().__init__(model)
        self.settings = settings
        if settings.frozen == "attention":
            _freeze_attention(model)
        config = model.config
        self._wrapped = DistributedDataParallel(
            config,
            DistributedDataParallelConfig(
                grad_reduce_in_fp32=True,
                use_distributed_optimizer=True,
                average_in_collective=False,  # gloo has no AVG
                check_for_nan_in_grad=False,  # `update` looks at the global norm and refuses, Megatron would abort
            ),
            model,
        )
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=settings.lr,
                weight_decay=settings.weight_decay,
                adam_beta1=settings.beta1,
                adam_beta2=settings.beta2,
                adam_eps=1e-8,
                clip_grad=settings.clip,
                bf16=config.bf16,
                params_dtype=config.params_dtype,
                use_distributed_optimizer=True,
            ),
            [self._wrapped],
        )
        config.finalize_model_grads_func = finalize_model_grads
        config.grad_scale_func = self.optimizer.scale_loss
        config.no_sync_func = self._wrapped.no_sync

    def update(self, microbatches: Sequence[MicroBatch], loss: Loss, lr: float | None = None) -> Update:
        """One optimizer step on the mean of `loss`, at `lr` if given.

        No step is made if loss or gradient are not finite, nor without any gradient: momentum alone would move weights.
        """
        self._wrapped.zero_grad_buffer()
        self.optimizer.zero_grad()
        outputs, loss_sum, actions = self._schedule(microbatches, loss, forward_only=False)
        loss_sum, actions = ranks.total(np.array([loss_sum, actions], np.float64))
        overflow = self.optimizer.prepare_grads()
        norm = float(self.optimizer.get_grad_norm())
        mean = loss_sum / max(actions, 1.0)
        update = Update(outputs, mean, norm, not overflow and math.isfinite(norm) and math.isfinite(mean))
        if update.applied:
            for group in self.optimizer.param_groups:
                group["lr"] = self.settings.lr if lr is None else lr
            self.optimizer.step()
        return update


def _freeze_attention(model: Policy | Critic) -> None:
    for name, parameter in model.named_parameters():
        fused = ".layer_norm_" in name  # TransformerEngine keeps the norm before attention inside its first projection
        if ".self_attention." in name and not fused:
            parameter.requires_grad_(False)
