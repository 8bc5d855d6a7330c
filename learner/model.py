"""Policy and Critic: Megatron GPT models built from a Hugging Face directory.

Invariant: one description (`Architecture`, read from config.json) decides the model on every device and under every
tensor/pipeline split, and an option of config.json that would change the mathematics and is not understood is refused,
never ignored. On a CPU the layers are Megatron's local ones with attention by torch; under CUDA TransformerEngine's.

Both models output numbers per action or position, never logits: no [T, vocabulary] tensor leaves `Policy.forward`.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from .hf_weights import load_hf
from .logprobs import logprob_entropy
from .packing import MicroBatch, Packed

FAMILIES = ("qwen3", "qwen2", "llama")
# Vocabulary rows are padded so that every tensor-parallel rank holds the same number, a multiple of this.
VOCABULARY_MULTIPLE = 16


@dataclass(frozen=True)
class Architecture:
    """What config.json says: counts and widths, all in the whole model (not per rank)."""

    family: str
    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    norm_eps: float
    rope_theta: float
    tied: bool
    context: int

    @classmethod
    def read(cls, path: Path) -> "Architecture":
        """Reads `path`/config.json. Raises ValueError for a model this learner would compute wrongly."""
        config: dict[str, Any] = json.loads((path / "config.json").read_text())
        family = config.get("model_type")
        if family not in FAMILIES:
            raise ValueError(f"{path}: model_type {family!r} is not one of {', '.join(FAMILIES)}")
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        unsupported = {
            "rope type": rope.get("rope_type", rope.get("type", "default")) != "default",
            "use_sliding_window": config.get("use_sliding_window"),
            "attention_bias": config.get("attention_bias") and family != "qwen2",
            "mlp_bias": config.get("mlp_bias"),
            "hidden_act": config.get("hidden_act", "silu") != "silu",
            "attention_dropout": config.get("attention_dropout"),
        }
        if refused := [name for name, present in unsupported.items() if present]:
            raise ValueError(f"{path}: config.json sets {', '.join(refused)}, which the learner does not support")
        heads = config["num_attention_heads"]
        return cls(
            family=family,
            vocab=config["vocab_size"],
            hidden=config["hidden_size"],
            layers=config["num_hidden_layers"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            intermediate=config["intermediate_size"],
            norm_eps=config.get("rms_norm_eps", 1e-6),
            rope_theta=rope.get("rope_theta", config.get("rope_theta", 10000.0)),
            tied=config.get("tie_word_embeddings", False),
            context=config["max_position_embeddings"],
        )

    def padded_vocab(self) -> int:
        """Rows of the embedding under the current tensor-parallel size."""
        multiple = VOCABULARY_MULTIPLE * parallel_state.get_tensor_model_parallel_world_size()
        return -(-self.vocab // multiple) * multiple

    def transformer_config(self, dtype: torch.dtype) -> TransformerConfig:
        """Megatron's configuration under the current tensor- and pipeline-parallel sizes."""
        cuda = torch.cuda.is_available()
        pipeline = parallel_state.get_pipeline_model_parallel_world_size()
        return TransformerConfig(
            num_layers=self.layers,
            hidden_size=self.hidden,
            num_attention_heads=self.heads,
            num_query_groups=self.kv_heads,
            kv_channels=self.head_dim,
            ffn_hidden_size=self.intermediate,
            gated_linear_unit=True,
            activation_func=F.silu,
            add_bias_linear=False,
            add_qkv_bias=self.family == "qwen2",
            qk_layernorm=self.family == "qwen3",
            normalization="RMSNorm",
            layernorm_epsilon=self.norm_eps,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
            pipeline_model_parallel_size=pipeline,
            variable_seq_lengths=pipeline > 1,
            moe_token_dispatcher_type="alltoall",  # Megatron asks for it with variable lengths, dense models too
            bf16=dtype == torch.bfloat16,
            params_dtype=dtype,
            pipeline_dtype=dtype,
            use_cpu_initialization=not cuda,
            apply_rope_fusion=cuda,
            masked_softmax_fusion=cuda,
            bias_activation_fusion=False,
            bias_dropout_fusion=False,
            gradient_accumulation_fusion=False,
            persist_layer_norm=False,
            calculate_per_token_loss=True,  # gradients are sums over actions, divided once by their global number
        )


class CoreAttention(MegatronModule):
    """Causal attention over packed sequences by torch's fused kernel; the CPU's stand-in for TransformerEngine's.

    Sequences of similar length are padded to one batched call: a loop over sequences costs several times the arithmetic
    for short ones. Padding lies behind the real positions, so causality alone keeps it out of every real output.
    """

    def __init__(self, config: TransformerConfig, *args: Any, softmax_scale: float | None = None, **kwargs: Any):
        super().__init__(config=config)
        self.scale = softmax_scale

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *args: Any,
        packed_seq_params: Packed,
        **kwargs: Any,
    ) -> torch.Tensor:
        """query [T, 1, heads, d], key and value [T, 1, groups, d] -> [T, 1, heads * d]."""
        outputs = []
        for index, real in packed_seq_params.groups:
            q, k, v = (x[:, 0][index].transpose(1, 2) for x in (query, key, value))
            output = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale, enable_gqa=True)
            outputs.append(output.transpose(1, 2).flatten(2).flatten(0, 1)[real])
        return torch.cat(outputs).unsqueeze(1)


class PackedRotary(RotaryEmbedding):
    """Rotary embedding of a packed batch in one operation; Megatron's own loops over the sequences.

    `get_rotary_seq_len` is where Megatron shows us the packing, and what it returns is all `forward` is given.
    """

    def get_rotary_seq_len(self, *args: Any) -> Packed:
        return args[-1]

    def forward(self, packed: Packed, **kwargs: Any) -> torch.Tensor:
        """-> float32[T, 1, 1, d], the angles at each position."""
        return self.get_emb(packed.max_seqlen_q)[packed.positions]


class ValueHead(torch.nn.Module):
    """A scalar per position in place of the output layer; the same on every tensor-parallel rank. Starts at zero."""

    def __init__(self, config: TransformerConfig):
        super().__init__()
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else "cpu"
        self.weight = torch.nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype, device=device))

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
        """hidden [T, 1, h] -> float32[T, 1, 1]."""
        return F.linear(hidden, self.weight).float(), None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> ShardedStateDict:
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(keep_vars=True),
            prefix,
            sharded_offsets=sharded_offsets,
            tp_group=parallel_state.get_tensor_model_parallel_group(),
            dp_cp_group=parallel_state.get_data_parallel_group(with_context_parallel=True),
        )


class _Model(GPTModel):
    """What Policy and Critic share: this rank's part of the transformer, with the weights of a directory."""

    def __init__(self, path: Path, dtype: torch.dtype = torch.float32):
        self.architecture = Architecture.read(path)
        config = self.architecture.transformer_config(dtype)
        super().__init__(
            config=config,
            transformer_layer_spec=_layer_spec(config),
            vocab_size=self.architecture.padded_vocab(),
            max_sequence_length=self.architecture.context,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            parallel_output=True,
            share_embeddings_and_output_weights=self.architecture.tied and not isinstance(self, Critic),
            position_embedding_type="rope",
            rotary_base=self.architecture.rope_theta,
        )
        if not torch.cuda.is_available():
            self.rotary_pos_emb = PackedRotary(
                self.architecture.head_dim, rotary_percent=1.0, rotary_base=self.architecture.rope_theta,
                use_cpu_initialization=True,
            )  # fmt: skip
        if isinstance(self, Critic) and self.post_process:
            self.output_layer = ValueHead(config)
        load_hf(self, path)
        if torch.cuda.is_available():
            self.cuda()

    def _run(self, batch: MicroBatch, **kwargs: Any) -> Any:
        positions = torch.zeros_like(batch.tokens)  # rotary embeddings take them from the packing
        return super().forward(batch.tokens, positions, None, packed_seq_params=batch.packed, **kwargs)


class Policy(_Model):
    """The language model. Policy(Path("model-directory"))."""

    def forward(self, batch: MicroBatch) -> Any:
        """-> (log-probability, entropy) of each action, float32[A] in nats at the batch's temperature.

        On a pipeline stage before the last the output is the hidden states for the next one.
        """
        return self._run(batch, output_processor=self._score, output_processor_context=batch)

    def _score(
        self, hidden_states: torch.Tensor, output_layer: Any, output_weight: Any, context: MicroBatch, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # Only actions need logits: for an episode of mostly tool output that is most of the output layer's work.
        logits, _ = output_layer(hidden_states[context.actions], weight=output_weight)
        return logprob_entropy(
            logits[:, 0] / context.temperature[:, None],
            context.targets,
            self.architecture.vocab,
            parallel_state.get_tensor_model_parallel_group(),
        )


class Critic(_Model):
    """The policy's transformer with a value head. Critic(Path("model-directory"))."""

    def forward(self, batch: MicroBatch) -> Any:
        """-> value of each position, float32[T]; hidden states on a pipeline stage before the last."""
        output = self._run(batch)
        return output[0, :, 0] if self.post_process else output


def _layer_spec(config: TransformerConfig) -> ModuleSpec:
    if torch.cuda.is_available():
        return get_gpt_layer_with_transformer_engine_spec(qk_layernorm=config.qk_layernorm)
    spec = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization=config.normalization)
    spec.submodules.self_attention.submodules.core_attention = CoreAttention
    return spec
