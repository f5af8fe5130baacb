"""Builds a tiny random Llama with a byte-level tokenizer: real enough that a wrong KV shows in its text.

Weights are scaled so that greedy answers vary; with the usual initialisation they would repeat one token.
It has a chat template and the tokens that reasoning and tool-call parsers look for.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from pathlib import Path

import torch

VOCABULARY = 2048
RECIPE = "llama-256x4-heads4-kv2-vocabulary2048-scale1.5-seed7-marks-v2"
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
"""The last ids of the vocabulary, in this order. Text as any other: no decoder leaves them out."""
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }} {{ message.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)


def tiny_model(cache: Path) -> Path:
    """The folder of the model, built on first use and kept in `cache`."""
    folder = cache / f"tiny-{hashlib.sha256(RECIPE.encode()).hexdigest()[:12]}"
    if not (folder / "config.json").exists():
        cache.mkdir(parents=True, exist_ok=True)
        building = Path(tempfile.mkdtemp(dir=cache))
        _build(building)
        try:
            building.rename(folder)
        except OSError:
            shutil.rmtree(building)  # another run was faster
    return folder


def _build(folder: Path) -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    words = (f"{first}{second} " for first in SYLLABLES for second in SYLLABLES)
    tokenizer.train_from_iterator(
        words,
        trainers.BpeTrainer(
            vocab_size=VOCABULARY - len(MARKS),
            special_tokens=["<s>", "</s>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer.add_tokens([AddedToken(mark, normalized=False, special=False) for mark in MARKS])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", chat_template=CHAT_TEMPLATE
    ).save_pretrained(folder)

    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=1,
    )
    model = LlamaForCausalLM(config).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                scale = 1.0 if "embed" in name else 1.5 / parameter.shape[1] ** 0.5
                parameter.normal_(0.0, scale)
    model.save_pretrained(folder)


SYLLABLES = tuple(
    consonant + vowel + end
    for consonant in ("b", "d", "f", "g", "k", "l", "m", "n", "p", "r", "s", "t", "v", "z")
    for vowel in ("a", "e", "i", "o", "u")
    for end in ("", "n", "r")
)
