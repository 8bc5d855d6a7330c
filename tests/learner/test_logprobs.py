import torch
import torch.distributed as dist
from argosy.learner.logprobs import logprob_entropy


def test_values_and_gradients_agree_with_log_softmax_in_float64(alone: None) -> None:
    generator = torch.Generator().manual_seed(0)
    rows, vocab = 64, 50
    padding = torch.full((7, 14), 1e3)  # padded columns would win if they counted
    logits = torch.cat([torch.randn(7, vocab, generator=generator) * 5, padding], 1).requires_grad_()
    targets = torch.randint(0, vocab, (7,), generator=generator)
    weights, entropy_weights = torch.randn(2, 7, generator=generator)
    assert logits.shape[1] == rows

    logprob, entropy = logprob_entropy(logits, targets, vocab, dist.group.WORLD)
    (logprob @ weights + entropy @ entropy_weights).backward()

    exact = logits.detach().double()[:, :vocab].requires_grad_()
    every = torch.log_softmax(exact, -1)
    expected, expected_entropy = every.gather(1, targets[:, None])[:, 0], -(every.exp() * every).sum(-1)
    (expected @ weights.double() + expected_entropy @ entropy_weights.double()).backward()
    assert torch.allclose(logprob.double(), expected, atol=1e-5)
    assert torch.allclose(entropy.double(), expected_entropy, atol=1e-5)
    assert logits.grad is not None and exact.grad is not None
    assert torch.allclose(logits.grad[:, :vocab].double(), exact.grad, atol=1e-5)
    assert not logits.grad[:, vocab:].any()


def test_extreme_logits_stay_finite(alone: None) -> None:
    logits = torch.tensor([[1e4, -1e4, 0.0], [-1e30, 0.0, -1e30]], requires_grad=True)
    logprob, entropy = logprob_entropy(logits, torch.tensor([1, 1]), 3, dist.group.WORLD)
    (logprob + entropy).sum().backward()
    assert torch.isfinite(logprob).all() and torch.isfinite(entropy).all()
    assert logits.grad is not None and torch.isfinite(logits.grad).all()
