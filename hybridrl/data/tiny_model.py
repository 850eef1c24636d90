"""A model small enough to learn on a laptop: Qwen2 architecture, random weights, one token a byte.

`python -m hybridrl.data.tiny_model --out DIR` writes it in the Hugging Face format, so that everything that takes a model path
(transformers, vLLM, the recipes) takes this one.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from tokenizers import pre_tokenizers
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from hybridrl.protocol.errors import ConfigError

SPECIAL = ("<pad>", "<eos>", "<user>", "<assistant>")
HEAD_DIM = 32  # the smallest that vLLM's attention kernels take on every device
MAX_TOKENS = 2048

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<{{ message['role'] }}>{{ message['content'] }}{% if message['role'] == 'assistant' %}<eos>{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def byte_tokenizer() -> Qwen2Tokenizer:
    """260 tokens: four special ones, then the 256 bytes. ASCII text has one token a character; any text (in Unicode's composed
    form, NFC) comes back from `decode` unchanged. As in other tokenizers, a special token's name in a text is that token.

    `AutoTokenizer` builds a `Qwen2Tokenizer` for every Qwen2 model, whatever its files say, so this is one too: without merges,
    its byte-level BPE is a byte tokenizer.
    """
    vocabulary = {token: index for index, token in enumerate((*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())))}
    return Qwen2Tokenizer(
        vocab=vocabulary,
        merges=[],
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<pad>",  # never used, since every byte is known; left unset, a reload would add a token of Qwen's
        extra_special_tokens=["<user>", "<assistant>"],
        chat_template=CHAT_TEMPLATE,
        model_max_length=MAX_TOKENS,
    )


def make_tiny_model(directory: str | Path, hidden: int = 128, layers: int = 4, seed: int = 0) -> Path:
    """Write an untrained model (float32) and its tokenizer to `directory` and return it. Equal arguments give equal weights.

    `hidden` is a multiple of 64: heads have 32 dimensions, and two query heads share a key-value head. The defaults make 1.05 M
    parameters. The context is 2,048 tokens. Files of the same names in `directory` are replaced.
    """
    if hidden < 64 or hidden % 64:
        raise ConfigError(f"hidden must be a multiple of 64, not {hidden}")
    if layers < 1:
        raise ConfigError(f"layers must be at least 1, not {layers}")
    tokenizer = byte_tokenizer()
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // HEAD_DIM,
        num_key_value_heads=hidden // HEAD_DIM // 2,
        max_position_embeddings=MAX_TOKENS,
        tie_word_embeddings=False,
        bos_token_id=None,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config)
    folder = Path(directory)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m hybridrl.data.tiny_model", description="Write a tiny untrained model.")
    parser.add_argument("--out", required=True, help="directory for the model")
    parser.add_argument("--hidden", type=int, default=128, help="hidden size, a multiple of 64")
    parser.add_argument("--layers", type=int, default=4, help="decoder layers")
    parser.add_argument("--seed", type=int, default=0, help="draws the weights")
    options = parser.parse_args(arguments)
    try:
        make_tiny_model(options.out, options.hidden, options.layers, options.seed)
    except ConfigError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
