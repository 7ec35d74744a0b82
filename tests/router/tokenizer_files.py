"""Checkpoint folders with tokenizers made on the fly, as transformers would save them."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

CORPUS = [
    "The quick brown fox jumps over the lazy dog. 0123456789",
    "x != y , a . b ? n't\n\n### title\n\ttabs   spaces\r\n",
    "한국어 ไทย हिन्दी עברית 日本 👩‍👩‍👧‍👦 🇫🇷 São Paulo",
]
SPECIALS = [
    "<PAD>",
    "<UNK>",
    "<BOS_TOKEN>",
    "<|START_OF_TURN_TOKEN|>",
    "<|END_OF_TURN_TOKEN|>",
    "<|USER_TOKEN|>",
    "<|CHATBOT_TOKEN|>",
    "<|SYSTEM_TOKEN|>",
]
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|START_OF_TURN_TOKEN|><|' + {'system': 'SYSTEM', 'user': 'USER', 'assistant': 'CHATBOT'}[message.role] }}"
    "{{ '_TOKEN|>' + message.content | trim + '<|END_OF_TURN_TOKEN|>' }}{% endfor %}"
    "{% if add_generation_prompt %}<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>{% endif %}"
)


def byte_level(vocab_size: int = 420) -> Tokenizer:
    """Byte-level BPE with Command's special tokens and BOS in front."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    specials = [AddedToken(text, special=True, normalized=False) for text in SPECIALS]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=specials, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    bos = tokenizer.token_to_id("<BOS_TOKEN>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<BOS_TOKEN> $A", special_tokens=[("<BOS_TOKEN>", bos)]
    )
    return tokenizer


def word_level(num_words: int = 50) -> Tokenizer:
    """Words without a decoder, joined by spaces."""
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(num_words)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


def metaspace() -> Tokenizer:
    """Words that carry their leading space as a mark."""
    words = ["<unk>", "▁hello", "▁world", "!", "▁", "a", "é"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def save(folder: Path, tokenizer: Tokenizer, **files: object) -> Path:
    """Writes tokenizer.json, and each keyword as a JSON file of that name."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    defaults = {
        "config": {"vocab_size": tokenizer.get_vocab_size()},
        "tokenizer_config": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<BOS_TOKEN>",
            "eos_token": "<|END_OF_TURN_TOKEN|>",
            "chat_template": TEMPLATE,
            "clean_up_tokenization_spaces": True,
        },
    }
    for name, value in {**defaults, **files}.items():
        if value is not None:
            (folder / f"{name}.json").write_text(json.dumps(value), encoding="utf-8")
    return folder
