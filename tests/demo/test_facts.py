"""The facts are many, distinct, short, and not all ASCII."""

import unicodedata

from demo.facts import Fact


def test_there_are_at_least_sixty_four_facts_with_distinct_questions(facts: list[Fact]) -> None:
    assert len(facts) >= 64
    assert len({fact.question for fact in facts}) == len(facts)
    assert len({fact.answer for fact in facts}) == len(facts)


def test_each_answer_is_one_short_sentence(facts: list[Fact]) -> None:
    for fact in facts:
        assert 6 <= len(fact.answer.split()) <= 15, fact
        assert fact.answer == fact.answer.strip()


def test_answers_hold_accents_signs_cjk_and_emoji(facts: list[Fact]) -> None:
    text = " ".join(fact.answer for fact in facts)
    for piece in ["São Paulo", "5 °C", "H₂O", "Skłodowska", "日本", "🐙", "€", "π"]:
        assert piece in text


def test_the_text_is_in_normal_form_so_that_the_tokenizer_keeps_it(facts: list[Fact]) -> None:
    for fact in facts:
        assert unicodedata.is_normalized("NFC", fact.question + fact.answer)
