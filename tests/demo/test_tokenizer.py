"""The committed tokenizer: special tokens where Command has them, no text lost, and the Command chat format."""

import json
from typing import TYPE_CHECKING

import jinja2
import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from demo.facts import Fact, raw_prompt
from demo.tokenizer import train_tokenizer
from demo.train import DEMO_DIR, MODELS

if TYPE_CHECKING:
    from tests.demo.conftest import DemoModel


@pytest.fixture(scope="module", params=MODELS)
def loaded(request: pytest.FixtureRequest) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(DEMO_DIR / request.param)


def test_both_models_carry_the_same_tokenizer() -> None:
    for name in ["tokenizer.json", "tokenizer_config.json"]:
        assert (DEMO_DIR / "cohere" / name).read_bytes() == (DEMO_DIR / "cohere2" / name).read_bytes()


def test_the_committed_tokenizer_is_the_one_the_script_makes(demo_model: "DemoModel") -> None:
    made = train_tokenizer()
    assert made.get_vocab() == demo_model.tokenizer.get_vocab()
    assert json.loads(made.to_str())["model"]["merges"] == json.loads(demo_model.tokenizer.to_str())["model"]["merges"]


def test_special_tokens_have_the_ids_that_the_configs_name(demo_model: "DemoModel") -> None:
    tokenizer = demo_model.tokenizer
    first = ["<PAD>", "<UNK>", "<CLS>", "<SEP>", "<MASK_TOKEN>", "<BOS_TOKEN>", "<EOS_TOKEN>", "<EOP_TOKEN>"]
    assert [tokenizer.token_to_id(token) for token in first] == list(range(8))
    for name in ["config.json", "generation_config.json"]:
        values = json.loads((demo_model.folder / name).read_text())
        assert values["bos_token_id"] == tokenizer.token_to_id("<BOS_TOKEN>")
        assert values["eos_token_id"] == tokenizer.token_to_id("<|END_OF_TURN_TOKEN|>")
        assert values["pad_token_id"] == tokenizer.token_to_id("<PAD>")


def test_the_vocabulary_has_the_size_of_the_embedding_and_at_least_a_thousand_tokens(demo_model: "DemoModel") -> None:
    vocab_size = demo_model.tokenizer.get_vocab_size()
    assert vocab_size == demo_model.network.get_input_embeddings().weight.shape[0]
    assert vocab_size >= 1000


def test_every_fact_survives_encoding_and_decoding(demo_model: "DemoModel", facts: list[Fact]) -> None:
    for fact in facts:
        for text in [fact.question, fact.answer, raw_prompt(fact.question)]:
            assert demo_model.tokenizer.decode(demo_model.tokenizer.encode(text).ids) == text


def test_any_unicode_text_survives_by_bytes(demo_model: "DemoModel") -> None:
    text = "Ħēļļø, 世界! \t 👩🏽‍🚀 \x01 ﷽"
    assert demo_model.tokenizer.decode(demo_model.tokenizer.encode(text).ids) == text


def test_some_answers_split_a_character_over_several_tokens(demo_model: "DemoModel", facts: list[Fact]) -> None:
    def is_split(fact: Fact) -> bool:
        ids = demo_model.tokenizer.encode(fact.answer, add_special_tokens=False).ids
        return any("\ufffd" in demo_model.tokenizer.decode([token]) for token in ids)

    assert sum(map(is_split, facts)) >= 5


def test_a_prompt_begins_with_one_bos_and_the_answer_joins_it_at_a_token_border(
    demo_model: "DemoModel", facts: list[Fact]
) -> None:
    bos = demo_model.tokenizer.token_to_id("<BOS_TOKEN>")
    for fact in facts:
        prompt = demo_model.tokenizer.encode(raw_prompt(fact.question)).ids
        assert prompt[0] == bos and bos not in prompt[1:]
        whole = demo_model.tokenizer.encode(raw_prompt(fact.question) + fact.answer).ids
        assert whole == prompt + demo_model.answer(fact)[:-1]


def test_transformers_and_tokenizers_read_the_same_ids(loaded: PreTrainedTokenizerBase, facts: list[Fact]) -> None:
    plain = Tokenizer.from_file(str(DEMO_DIR / "cohere" / "tokenizer.json"))
    for text in [*(fact.answer for fact in facts), "e\u0301 <|USER_TOKEN|> 1234"]:
        assert loaded(text)["input_ids"] == plain.encode(text).ids


def test_the_chat_template_writes_the_command_format(loaded: PreTrainedTokenizerBase) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello!"},
        {"role": "assistant", "content": "Hi."},
        {"role": "user", "content": " Two\nlines "},
    ]
    closed = (
        "<BOS_TOKEN>"
        "<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>Be brief.<|END_OF_TURN_TOKEN|>"
        "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>Hello!<|END_OF_TURN_TOKEN|>"
        "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>Hi.<|END_OF_TURN_TOKEN|>"
        "<|START_OF_TURN_TOKEN|><|USER_TOKEN|> Two\nlines <|END_OF_TURN_TOKEN|>"
    )
    opened = closed + "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>"
    assert loaded.apply_chat_template(messages, tokenize=False) == closed
    assert loaded.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == opened


def test_the_chat_template_refuses_an_unknown_role(loaded: PreTrainedTokenizerBase) -> None:
    with pytest.raises(jinja2.TemplateError, match="not narrator"):
        loaded.apply_chat_template([{"role": "narrator", "content": "Once"}], tokenize=False)
