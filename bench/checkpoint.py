"""Model folders for benchmarks: random weights, or a geometry alone, with a tokenizer of as many words as tokens."""

from __future__ import annotations

import json
from pathlib import Path

from bench.geometries import Config

SEED = 0


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Token i is the word "w<i>", so any token id can be detokenized and no token ends a text by accident."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    words = {f"w{token_id}": token_id for token_id in range(vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.ByteLevel()  # As Command's, so that detokenizing costs what it does there.
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "w0",
        "bos_token": "w2",
        "eos_token": "w3",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def write_geometry(folder: Path, config: Config) -> None:
    """A folder for `--load-format dummy`: config.json and tokenizer, no weights."""
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    write_tokenizer(folder, int(str(config["vocab_size"])))


def write_checkpoint(folder: Path, config: Config) -> int:
    """Saves float32 weights drawn by transformers' own Cohere class from a fixed seed; returns how many there are."""
    import torch
    from transformers import CohereConfig, CohereForCausalLM, logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    torch.manual_seed(SEED)
    model = CohereForCausalLM(CohereConfig.from_dict(config | {"torch_dtype": "float32"}))
    model.save_pretrained(folder)
    write_tokenizer(folder, int(str(config["vocab_size"])))
    return sum(parameter.numel() for parameter in model.parameters())
