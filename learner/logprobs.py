"""Log-probability and entropy of the next token when the vocabulary is spread over tensor-parallel ranks.

Invariant: the logits of a position exist once, as this rank's slice, and no copy of the whole vocabulary is gathered
(gathered logits are what exhausts memory first). Padded vocabulary rows have probability zero.
"""

from typing import Any

import torch
import torch.distributed as dist


class _LogprobEntropy(torch.autograd.Function):
    """d logp / d logits = onehot - p;  d H / d logits = -p (log p + H)."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, targets: torch.Tensor, vocab: int, group: dist.ProcessGroup
    ) -> tuple[torch.Tensor, torch.Tensor]:
        part, first = logits.shape[-1], dist.get_rank(group) * logits.shape[-1]
        shifted = logits.float()
        if first + part > vocab:
            shifted = shifted.clone()
            shifted[..., max(vocab - first, 0) :] = float("-inf")
        highest = shifted.amax(-1)
        if dist.get_world_size(group) > 1:
            dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
        shifted = shifted - highest.unsqueeze(-1)
        weights = shifted.exp()
        shifted = shifted.clamp_min(-1e30)  # 0 * -inf would be nan
        mine = (targets >= first) & (targets < first + part)
        local = (targets - first).clamp(0, part - 1).unsqueeze(-1)
        chosen = torch.where(mine, shifted.gather(-1, local).squeeze(-1), 0.0)
        sums = torch.stack([weights.sum(-1), (weights * shifted).sum(-1), chosen])
        if dist.get_world_size(group) > 1:
            dist.all_reduce(sums, group=group)
        total, weighted, chosen = sums.unbind(0)
        log_total = total.log()
        entropy = log_total - weighted / total
        probabilities = weights.div_(total.unsqueeze(-1))
        log_probabilities = shifted.sub_(log_total.unsqueeze(-1))
        ctx.save_for_backward(probabilities, log_probabilities, entropy, mine, local)
        ctx.dtype = logits.dtype
        return chosen - log_total, entropy

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        by_logprob, by_entropy = grads
        probabilities, log_probabilities, entropy, mine, local = ctx.saved_tensors
        scale = by_logprob.unsqueeze(-1)
        if by_entropy.any():
            scale = scale + by_entropy.unsqueeze(-1) * (log_probabilities + entropy.unsqueeze(-1))
        grad = -probabilities * scale
        grad.scatter_add_(-1, local, torch.where(mine, by_logprob, 0.0).unsqueeze(-1))
        return grad.to(ctx.dtype), None, None, None


def logprob_entropy(
    logits: torch.Tensor, targets: torch.Tensor, vocab: int, group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (log p(target), entropy) in nats, float32[...], differentiable once.

    Args:
        logits: [..., V / ranks], this rank's slice, already divided by the sampling temperature.
        targets: int64[...], ids in the whole vocabulary.
        vocab: rows of the vocabulary that are real; those behind are padding.
        group: the tensor-parallel group that holds the slices in rank order.
    """
    return _LogprobEntropy.apply(logits, targets, vocab, group)
