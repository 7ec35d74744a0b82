"""The demo tokenizer: byte-level BPE of the facts, with the special tokens and the chat turns of Command models."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from demo.facts import SYSTEM_MESSAGE, load_facts, raw_prompt

NUM_LEARNED_TOKENS = 1191  # what BPE fills: the first special tokens, 256 bytes, and merges

# As in Command checkpoints these have the lowest ids; BOS is 5.
FIRST_SPECIAL_TOKENS = [
    "<PAD>",
    "<UNK>",
    "<CLS>",
    "<SEP>",
    "<MASK_TOKEN>",
    "<BOS_TOKEN>",
    "<EOS_TOKEN>",
    "<EOP_TOKEN>",
]
# And these the highest ones.
TURN_TOKENS = [
    "<|START_OF_TURN_TOKEN|>",
    "<|END_OF_TURN_TOKEN|>",
    "<|YES_TOKEN|>",
    "<|NO_TOKEN|>",
    "<|GOOD_TOKEN|>",
    "<|BAD_TOKEN|>",
    "<|USER_TOKEN|>",
    "<|CHATBOT_TOKEN|>",
    "<|SYSTEM_TOKEN|>",
    "<|START_THINKING|>",
    "<|END_THINKING|>",
    "<|START_RESPONSE|>",
    "<|END_RESPONSE|>",
    "<|START_ACTION|>",
    "<|END_ACTION|>",
    "<|START_TOOL_RESULT|>",
    "<|END_TOOL_RESULT|>",
    "<|EXTRA_0_TOKEN|>",
]

# BOS; start, role, content, end for each message; then start and the chatbot's marker with nothing after.
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% set markers = {'system': '<|SYSTEM_TOKEN|>', 'user': '<|USER_TOKEN|>', 'assistant': '<|CHATBOT_TOKEN|>'} %}"
    "{% for message in messages %}"
    "{% if message['role'] not in markers %}"
    "{{ raise_exception('Roles are system, user and assistant, not ' + message['role']) }}"
    "{% endif %}"
    "{{ '<|START_OF_TURN_TOKEN|>' + markers[message['role']] + message['content'] + '<|END_OF_TURN_TOKEN|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}{% endif %}"
)


def train_tokenizer() -> Tokenizer:
    """Learn the merges from the facts; the same text always gives the same tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=NUM_LEARNED_TOKENS,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in FIRST_SPECIAL_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    text = [raw_prompt(fact.question) + fact.answer for fact in load_facts()]
    tokenizer.train_from_iterator([*text, SYSTEM_MESSAGE], trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in TURN_TOKENS])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<BOS_TOKEN>:0 $A:0",
        pair="<BOS_TOKEN>:0 $A:0 <BOS_TOKEN>:1 $B:1",
        special_tokens=[("<BOS_TOKEN>", tokenizer.token_to_id("<BOS_TOKEN>"))],
    )
    return tokenizer


def tokenizer_config(tokenizer: Tokenizer, model_max_length: int) -> dict[str, object]:
    """Return tokenizer_config.json as Command checkpoints write it; `model_max_length` is in tokens."""
    added = {
        str(token_id): {
            "content": token.content,
            "lstrip": token.lstrip,
            "normalized": token.normalized,
            "rstrip": token.rstrip,
            "single_word": token.single_word,
            "special": token.special,
        }
        for token_id, token in sorted(tokenizer.get_added_tokens_decoder().items())
    }
    return {
        "add_bos_token": True,
        "add_eos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": added,
        "bos_token": "<BOS_TOKEN>",
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "cls_token": "<CLS>",
        "eos_token": "<|END_OF_TURN_TOKEN|>",
        "mask_token": "<MASK_TOKEN>",
        "model_max_length": model_max_length,
        "pad_token": "<PAD>",
        "sep_token": "<SEP>",
        "tokenizer_class": "CohereTokenizer",
        "unk_token": "<UNK>",
    }


def write_tokenizer(folder: Path, model_max_length: int) -> Tokenizer:
    """Write tokenizer.json and tokenizer_config.json into a model's folder."""
    tokenizer = train_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    text = json.dumps(tokenizer_config(tokenizer, model_max_length), indent=2, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")
    return tokenizer
