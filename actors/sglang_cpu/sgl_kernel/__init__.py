"""Stands in for SGLang's compiled kernels on a CPU: the one function its native torch path calls, and no operator.

Registering no `torch.ops.sgl_kernel` operator is what keeps SGLang on that path for norms, rotary embedding,
activations and linear layers. Other names ending in `_cpu` can be imported and say what is missing when called.
"""

from collections.abc import Callable
from typing import Any, NoReturn

__version__ = "0.4.10"  # SGLang compares it with the version it was released with


def assign_req_to_token_pool_cpu(
    req_pool_indices: Any, req_to_token: Any, start_offset: Any, end_offset: Any, out_cache_loc: Any, pool_len: int
) -> None:
    """Writes each request's newly allocated cache slots into its row of the table."""
    done = 0
    rows = zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True)
    for row, start, end in rows:
        count = end - start
        req_to_token[row, start:end] = out_cache_loc[done : done + count].to(req_to_token.dtype)
        done += count


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if not name.endswith("_cpu"):
        raise AttributeError(name)

    def missing(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} has no CPU stand-in in Argosy; this model needs it")

    return missing
