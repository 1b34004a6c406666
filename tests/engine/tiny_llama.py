"""Random models of a few thousand weights, for numerics, and a tokenizer of whole words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

VOCAB = 128


def tiny_model(**changes: Any) -> Any:
    """A random Llama: 3 layers, hidden 64, 4 heads over 2 KV heads, in evaluation mode."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    options: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,  # the least in which an assembled anchor shows: layer 0 has no context at all
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 8192,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        "initializer_range": 0.2,
        "tie_word_embeddings": False,
        **changes,
    }
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return LlamaForCausalLM(LlamaConfig(**options)).eval()


def save_tiny_model(directory: Path, **changes: Any) -> Path:
    """A tiny model directory with a tokenizer that knows `w0 w1 ...`, ChatML markers and letters."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<unk>", "<|im_start|>", "<|im_end|>"]
    vocab = {word: i for i, word in enumerate([*special, *(f"w{i}" for i in range(VOCAB - len(special)))])}
    raw = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    raw.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw,
        unk_token="<unk>",
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
    )
    tokenizer.save_pretrained(directory)
    tiny_model(**changes).save_pretrained(directory)
    return directory
