"""Models by name. Shapes are those of the published configurations; weights are random, made from the run's seed."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

from agent.protocol.errors import UserError

# hidden, layers, heads, feed-forward, vocabulary; OPT: Zhang et al. 2022, table 1 (feed-forward is 4 x hidden)
_OPT = {
    "opt-tiny": (128, 2, 4, 512, 256),
    "opt-125m": (768, 12, 12, 3072, 50272),
    "opt-1.3b": (2048, 24, 32, 8192, 50272),
    "opt-13b": (5120, 40, 40, 20480, 50272),
    "opt-30b": (7168, 48, 56, 28672, 50272),
    "opt-66b": (9216, 64, 72, 36864, 50272),
}
# hidden, layers, heads, key-value heads, feed-forward, vocabulary; Llama 2: Touvron et al. 2023
_LLAMA = {
    "llama-tiny": (128, 2, 4, 4, 352, 256),
    "llama2-7b": (4096, 32, 32, 32, 11008, 32000),
    "llama2-13b": (5120, 40, 40, 40, 13824, 32000),
    "llama2-70b": (8192, 80, 64, 8, 28672, 32000),
}


class UnknownModel(UserError):
    """There is no such model; the message lists the nearest names."""


def model_names() -> list[str]:
    return [*_OPT, *_LLAMA]


def check_name(name: str) -> None:
    if name not in model_names():
        near = difflib.get_close_matches(name, model_names(), n=3, cutoff=0.3) or model_names()
        raise UnknownModel(
            f"unknown model {name!r}; the nearest names are {', '.join(near)}. "
            "Any other causal language model: set model.config to its Hugging Face config.json"
        )


def model_config(name: str | None = None, config_path: Path | None = None) -> Any:
    """A Hugging Face configuration, by name or from a config.json. Nothing is downloaded."""
    import transformers

    if name is not None:
        check_name(name)
    if config_path is not None:
        if not config_path.exists():
            raise UnknownModel(f"there is no model configuration at {config_path}; give a Hugging Face config.json")
        try:
            config = transformers.AutoConfig.from_pretrained(str(config_path), local_files_only=True)
        except (OSError, ValueError, KeyError) as error:
            reason = str(error).splitlines()[0]
            raise UnknownModel(f"{config_path} is not a Hugging Face model configuration: {reason}") from None
    elif name in _OPT:
        hidden, layers, heads, feed_forward, vocabulary = _OPT[name]
        config = transformers.OPTConfig(
            hidden_size=hidden,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            ffn_dim=feed_forward,
            word_embed_proj_dim=hidden,
            vocab_size=vocabulary,
            max_position_embeddings=2048,
        )
    elif name in _LLAMA:
        hidden, layers, heads, kv_heads, feed_forward, vocabulary = _LLAMA[name]
        config = transformers.LlamaConfig(
            hidden_size=hidden,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            intermediate_size=feed_forward,
            vocab_size=vocabulary,
            max_position_embeddings=4096,
        )
    else:
        raise UnknownModel(f"unknown model {name!r}")
    config.use_cache = False
    return config


def build_model(config: Any) -> Any:
    """The model with random weights. One setting differs from the default: attention as separate products, which can be
    distributed (the default attention is one opaque operation)."""
    import transformers

    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
