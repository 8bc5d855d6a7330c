"""A small Qwen3 and its tokenizer, made from nothing but a corpus: the model directory a demonstration starts from.

Invariant: the directory is an ordinary Hugging Face one (config, generation config, safetensors, tokenizer, chat
template), so the engine, the actors and the learner need no special case for it. The chat template is prefix-stable:
what was rendered for some messages is a prefix of what is rendered when messages are appended, because no message's
rendering looks at another. The tokenizer keeps that property on ids: no merge crosses a newline or a special token,
and every byte has a token of its own, so no text is ever silently dropped.
"""

import argparse
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
)
PAD, EOS = "<|endoftext|>", "<|im_end|>"

# ChatML with Hermes tool calls, but each tool is one line `name(argument, ...)` instead of a JSON schema: a model of
# a fifth of a million parameters pays for every token of its prompt.
CHAT_TEMPLATE = """\
{%- macro listing() -%}
{%- for tool in tools -%}
{%- set function = tool.function or tool -%}
{{- '\n' + function.name + '(' + (function.parameters.properties or {}) | join(', ') + ')' -}}
{%- endfor -%}
{%- endmacro -%}
{%- if tools and (not messages or messages[0].role != 'system') -%}
{{- '<|im_start|>system\nTools:' + listing() + '<|im_end|>\n' -}}
{%- endif -%}
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\n' -}}
{%- if message.role == 'tool' -%}
{{- '<tool_response>\n' + message.content + '\n</tool_response>' -}}
{%- else -%}
{{- message.content or '' -}}
{%- endif -%}
{%- if loop.first and message.role == 'system' and tools -%}
{{- '\nTools:' + listing() -}}
{%- endif -%}
{%- for call in message.tool_calls or [] -%}
{%- set function = call.function or call -%}
{{- '\n' if message.content or not loop.first else '' -}}
{%- set arguments = function.arguments if function.arguments is string else function.arguments | tojson -%}
{{- '<tool_call>\n{"name": ' + function.name | tojson + ', "arguments": ' + arguments + '}\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\n' -}}
{%- endif -%}
"""


def make_tokenizer(texts: Iterable[str], vocab: int = 384) -> PreTrainedTokenizerFast:
    """Trains a byte-level BPE tokenizer of at most `vocab` tokens (at least 263: every byte and the special tokens).

    Digits stay single, so that numbers the model has not seen are spelt like those it has. Merges run over whole
    lines otherwise: in a narrow task family a frequent tool call becomes a handful of tokens.
    """
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if vocab < len(alphabet) + len(SPECIAL_TOKENS):
        raise ValueError(f"vocab must be at least {len(alphabet) + len(SPECIAL_TOKENS)} (bytes and special tokens)")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex("\n"), behavior="merged_with_previous"),
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=list(SPECIAL_TOKENS), initial_alphabet=sorted(alphabet), max_token_length=40
    )
    boundary = re.compile("|".join(map(re.escape, SPECIAL_TOKENS)))  # the trainer does not split at them itself
    tokenizer.train_from_iterator((part for text in texts for part in boundary.split(text) if part), trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=EOS,
        pad_token=PAD,
        extra_special_tokens=[token for token in SPECIAL_TOKENS if token not in (EOS, PAD)],
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def make_model(
    out: Path,
    texts: Iterable[str],
    *,
    vocab: int = 384,
    hidden: int = 96,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int | None = None,
    intermediate: int | None = None,
    context: int = 1024,
    initializer_range: float = 0.05,
    seed: int = 0,
) -> Path:
    """Writes a float32 Qwen3 of random weights and its tokenizer to `out` and returns `out`.

    Sizes are in units (`hidden`, `head_dim`, `intermediate`) or counts; `head_dim` defaults to hidden / heads and
    `intermediate` to 2 * hidden. The embedding has the vocabulary rounded up to a multiple of 16 rows and is not tied
    to the output layer. The weights are drawn here rather than by transformers' model class because importing that
    class takes six seconds.
    """
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer(texts, vocab)
    tokenizer.save_pretrained(out)
    config = Qwen3Config(
        vocab_size=-(-len(tokenizer) // 16) * 16,
        hidden_size=hidden,
        intermediate_size=intermediate or 2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim or hidden // heads,
        max_position_embeddings=context,
        initializer_range=initializer_range,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        architectures=["Qwen3ForCausalLM"],
        dtype="float32",
    )
    config.save_pretrained(out)
    GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id).save_pretrained(out)
    save_file(dict(_random_weights(config, seed)), out / "model.safetensors", metadata={"format": "pt"})
    return out


def _random_weights(config: Qwen3Config, seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (Hugging Face name, float32 tensor): matrices ~ N(0, initializer_range^2), norms 1, as Qwen3 starts."""
    generator = torch.Generator().manual_seed(seed)
    width, query = config.hidden_size, config.num_attention_heads * config.head_dim
    key = config.num_key_value_heads * config.head_dim

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.empty(rows, columns).normal_(0.0, config.initializer_range, generator=generator)

    yield "model.embed_tokens.weight", matrix(config.vocab_size, width)
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        yield prefix + "input_layernorm.weight", torch.ones(width)
        for name, rows, columns in (("q", query, width), ("k", key, width), ("v", key, width), ("o", width, query)):
            yield f"{prefix}self_attn.{name}_proj.weight", matrix(rows, columns)
        yield prefix + "self_attn.q_norm.weight", torch.ones(config.head_dim)
        yield prefix + "self_attn.k_norm.weight", torch.ones(config.head_dim)
        yield prefix + "post_attention_layernorm.weight", torch.ones(width)
        yield prefix + "mlp.gate_proj.weight", matrix(config.intermediate_size, width)
        yield prefix + "mlp.up_proj.weight", matrix(config.intermediate_size, width)
        yield prefix + "mlp.down_proj.weight", matrix(width, config.intermediate_size)
    yield "model.norm.weight", torch.ones(width)
    yield "lm_head.weight", matrix(config.vocab_size, width)


def read_corpus(path: Path) -> Iterator[str]:
    """Yields texts from a file of JSON lines: a string is a text, {"messages", "tools"} is rendered by the template."""
    renderer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()))
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            entry: Any = json.loads(line)
            if isinstance(entry, str):
                yield entry
            else:
                yield renderer.apply_chat_template(
                    entry["messages"], tools=entry.get("tools"), chat_template=CHAT_TEMPLATE, tokenize=False
                )


def main() -> None:
    """`python -m argosy.learner.scratch --corpus FILE --out DIR [--vocab 384 --hidden 96 --layers 2 ...]`."""
    parser = argparse.ArgumentParser(prog="python -m argosy.learner.scratch", description=__doc__.splitlines()[0])
    parser.add_argument("--corpus", type=Path, required=True, help='JSON lines: texts or {"messages", "tools"}')
    parser.add_argument("--out", type=Path, required=True, help="the model directory to write")
    for name, default in (make_model.__kwdefaults__ or {}).items():
        kind = float if isinstance(default, float) else int
        parser.add_argument("--" + name.replace("_", "-"), type=kind, default=default, help=f"default {default}")
    options = vars(parser.parse_args())
    print(make_model(options.pop("out"), read_corpus(options.pop("corpus")), **options))


if __name__ == "__main__":
    main()
