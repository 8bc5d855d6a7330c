"""Weights between a Hugging Face directory and this rank's Megatron parameters, both ways, bit for bit.

Invariant: HF -> Megatron -> HF is the identity under every tensor- and pipeline-parallel split. Every parameter of the
model is either filled from the directory or an error, except a critic's value head, which no directory has. The names
cover the local layers and TransformerEngine's (whose norms are fused into the linear layer behind them).

Tensors are produced one at a time, so an exporter never holds a second copy of the model.
"""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from safetensors import safe_open

if TYPE_CHECKING:
    from .model import _Model

_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm",
    "input_layernorm.weight": "input_layernorm",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm",
    "pre_mlp_layernorm.weight": "post_attention_layernorm",
    "self_attention.q_layernorm.weight": "self_attn.q_norm",
    "self_attention.k_layernorm.weight": "self_attn.k_norm",
}


class Directory:
    """The tensors of a directory's safetensors files by name, read when asked for."""

    def __init__(self, path: Path):
        self._files = {}
        for file in sorted(path.glob("*.safetensors")):
            handle = safe_open(file, framework="pt")
            self._files.update(dict.fromkeys(handle.keys(), handle))
        if not self._files:
            raise FileNotFoundError(f"{path} holds no *.safetensors file")

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._files[name].get_tensor(name)

    def __contains__(self, name: str) -> bool:
        return name in self._files


@torch.no_grad()
def load_hf(model: "_Model", path: Path) -> None:
    """Fills this rank's parameters. Raises KeyError for a tensor the directory lacks, ValueError for a wrong shape."""
    source = Directory(path)
    for name, parameter, layer in _named(model):
        tensor = _read(model, source, name, layer)
        if tensor is None:
            continue
        if tensor.shape != parameter.shape:
            raise ValueError(f"{path}: {name} has shape {tuple(tensor.shape)}, the model {tuple(parameter.shape)}")
        parameter.copy_(tensor)


@torch.no_grad()
def export_hf(model: "_Model") -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (Hugging Face name, whole tensor) of this pipeline stage; all tensor-parallel ranks must iterate."""
    shape = model.architecture
    for name, parameter, layer in _named(model):
        weight = parameter.detach()
        if layer is None:
            if name == "embedding.word_embeddings.weight":
                yield "model.embed_tokens.weight", _whole(weight)[: shape.vocab]
            elif name == "output_layer.weight" and not model.share_embeddings_and_output_weights:
                yield "lm_head.weight", _whole(weight)[: shape.vocab]
            elif name == "decoder.final_layernorm.weight":
                yield "model.norm.weight", weight
            continue
        prefix = f"model.layers.{layer}."
        if name in _NORMS:
            yield f"{prefix}{_NORMS[name]}.weight", weight
        elif match := re.fullmatch(r"self_attention\.linear_qkv\.(weight|bias)", name):
            for part, tensor in zip("qkv", _split_qkv(_whole(weight), model), strict=True):
                yield f"{prefix}self_attn.{part}_proj.{match[1]}", tensor
        elif name == "self_attention.linear_proj.weight":
            yield prefix + "self_attn.o_proj.weight", _whole(weight, 1)
        elif name == "mlp.linear_fc1.weight":
            gate, up = zip(*(shard.chunk(2) for shard in _shards(weight)), strict=True)
            yield prefix + "mlp.gate_proj.weight", torch.cat(gate)
            yield prefix + "mlp.up_proj.weight", torch.cat(up)
        elif name == "mlp.linear_fc2.weight":
            yield prefix + "mlp.down_proj.weight", _whole(weight, 1)
        else:
            raise KeyError(f"no Hugging Face name for {name}")


def _named(model: "_Model") -> Iterator[tuple[str, torch.nn.Parameter, int | None]]:
    """Yields (name, parameter, layer): for a layer's parameter the name within it and its number in the whole model."""
    for name, parameter in model.named_parameters():
        if match := re.fullmatch(r"decoder\.layers\.(\d+)\.(.*)", name):
            yield match[2], parameter, model.decoder.layers[int(match[1])].layer_number - 1
        else:
            yield name, parameter, None


def _read(model: "_Model", source: Directory, name: str, layer: int | None) -> torch.Tensor | None:
    shape, mine = model.architecture, _my_shard()
    if layer is None:
        if name == "decoder.final_layernorm.weight":
            return source["model.norm.weight"]
        if name == "embedding.word_embeddings.weight":
            return mine(_pad_rows(source["model.embed_tokens.weight"], model.vocab_size), 0)
        assert name == "output_layer.weight", name
        if model.output_layer.weight.shape[0] == 1:  # a value head
            return None
        head = source["model.embed_tokens.weight" if shape.tied else "lm_head.weight"]
        return mine(_pad_rows(head, model.vocab_size), 0)
    prefix = f"model.layers.{layer}."
    if name in _NORMS:
        return source[f"{prefix}{_NORMS[name]}.weight"]
    if match := re.fullmatch(r"self_attention\.linear_qkv\.(weight|bias)", name):
        parts = [source[f"{prefix}self_attn.{part}_proj.{match[1]}"] for part in "qkv"]
        return mine(_merge_qkv(parts, shape.kv_heads), 0)
    if name == "self_attention.linear_proj.weight":
        return mine(source[prefix + "self_attn.o_proj.weight"], 1)
    if name == "mlp.linear_fc1.weight":
        return torch.cat([mine(source[f"{prefix}mlp.{part}_proj.weight"], 0) for part in ("gate", "up")])
    assert name == "mlp.linear_fc2.weight", name
    return mine(source[prefix + "mlp.down_proj.weight"], 1)


def _merge_qkv(parts: list[torch.Tensor], groups: int) -> torch.Tensor:
    """HF's q [heads * d, ...], k, v [groups * d, ...] -> Megatron's rows, group by group: its queries, key, value."""
    rest = parts[0].shape[1:]
    return torch.cat([part.reshape(groups, -1, *rest) for part in parts], dim=1).reshape(-1, *rest)


def _split_qkv(weight: torch.Tensor, model: "_Model") -> tuple[torch.Tensor, ...]:
    shape, rest = model.architecture, weight.shape[1:]
    queries = shape.heads // shape.kv_heads * shape.head_dim
    parts = weight.reshape(shape.kv_heads, -1, *rest).split([queries, shape.head_dim, shape.head_dim], dim=1)
    return tuple(part.reshape(-1, *rest) for part in parts)


def _pad_rows(weight: torch.Tensor, rows: int) -> torch.Tensor:
    return torch.nn.functional.pad(weight, (0, 0, 0, rows - weight.shape[0]))


def _my_shard() -> Callable[[torch.Tensor, int], torch.Tensor]:
    rank = parallel_state.get_tensor_model_parallel_rank()
    size = parallel_state.get_tensor_model_parallel_world_size()
    return lambda weight, dim: weight.chunk(size, dim)[rank]


def _shards(weight: torch.Tensor) -> list[torch.Tensor]:
    group = parallel_state.get_tensor_model_parallel_group()
    if dist.get_world_size(group) == 1:
        return [weight]
    shards = [torch.empty_like(weight) for _ in range(dist.get_world_size(group))]
    dist.all_gather(shards, weight.contiguous(), group=group)
    return shards


def _whole(weight: torch.Tensor, dim: int = 0) -> torch.Tensor:
    return torch.cat(_shards(weight), dim)
