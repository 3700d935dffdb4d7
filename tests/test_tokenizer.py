"""The teacher's tokenizer: lossless, numbers and keys in few tokens, nothing added, stable at boundaries."""

from __future__ import annotations

import re
import uuid
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

import regraft

TEACHER = Path(regraft.__file__).parent / "assets" / "teacher"
NEEDLE = "One of the special magic numbers for abrasive-lumber is: 1234567."


def pieces(tokenizer: PreTrainedTokenizerFast, text: str) -> list[str]:
    return [tokenizer.decode([i]) for i in tokenizer.encode(text)]


def test_sizes_and_special_tokens(tokenizer):
    assert len(tokenizer) == tokenizer.vocab_size == 8192
    assert sorted(tokenizer.get_vocab().values()) == list(range(8192))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (0, 0, 1)
    assert tokenizer.eos_token == "<|endoftext|>" and tokenizer.pad_token == "<|pad|>"
    assert tokenizer.padding_side == "left" and tokenizer.model_max_length == 1_000_000
    assert tokenizer.encode("a<|endoftext|>b")[1] == 0


@pytest.mark.parametrize("text", ["", "Hello", " Hello", NEEDLE, "\n\n"])
def test_nothing_is_added(tokenizer, text):
    ids = tokenizer.encode(text)
    assert ids == tokenizer(text)["input_ids"] == tokenizer.encode(text, add_special_tokens=False)
    assert not {0, 1} & set(ids)


@pytest.mark.parametrize(
    "text",
    [
        NEEDLE,
        "line\r\nline\r\n\r\n\tindented\t\ttwice  two   three    four \n \n",
        "naïve café — “quoted” \u2019tis 👩‍👩‍👧‍👦 🇫🇷 日本語 ²½ \u0301 \u00a0\u2003\u200b\x00\x7f",
        " , . don 't I 'm a ! b ?",  # what the clean-up of spaces would change
        "1,234,567.89 -0x1f 2024-01-31",
    ],
)
def test_round_trip(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


@settings(max_examples=200, deadline=None)
@given(text=st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=60))
def test_round_trip_of_any_text(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_numbers_are_groups_of_three_digits(tokenizer):
    groups = [f"{i:0{width}d}" for width in (1, 2, 3) for i in range(10**width)]
    assert len(groups) == 1110
    assert all(len(ids) == 1 for ids in tokenizer(groups)["input_ids"])
    assert pieces(tokenizer, "is: 1234567.")[-5:] == [" ", "123", "456", "7", "."]


def test_uuid_is_sixteen_hex_pairs(tokenizer):
    seen = set()
    for seed in range(400):
        text = str(uuid.UUID(int=seed * 0x9E3779B97F4A7C15F39CC0605CEDC835 % 2**128))
        got = pieces(tokenizer, f" is: {text}. The")
        assert got[:3] == [" is", ":", " "] and got[-2:] == [".", " The"]
        groups = text.split("-")
        pairs = [[group[i : i + 2] for i in range(0, len(group), 2)] for group in groups]
        assert got[3:-2] == [p for i, group in enumerate(pairs) for p in (["-"] if i else []) + group]
        assert len(got[3:-2]) == len(tokenizer.encode(text)) == 20
        seen.update(got[3:-2])
    assert len(seen - {"-"}) == 256


@pytest.mark.parametrize("text", ["a decade of face-dead-beef", "decade", "cabbage-feed", " added-facade"])
def test_words_of_hex_letters_stay_words(tokenizer, text):
    spelled = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)
    assert [part.replace("Ġ", " ") for part, _ in spelled] == re.findall(" ?[a-z]+|-", text)


def test_needle_sentence(tokenizer):
    got = pieces(tokenizer, NEEDLE)
    assert got[:9] == ["One", " of", " the", " special", " magic", " numbers", " for", " abrasive", "-"]
    assert len(got) <= 20


boundary = st.text(alphabet="aAzZé 019-.,:;'\u2019\"?\n\t\r", max_size=12)


@settings(max_examples=400, deadline=None)
@given(before=boundary, word=st.sampled_from([" a", " The", " abrasive", " émigré"]), after=boundary)
def test_concatenation_before_a_space_and_a_letter(tokenizer, before, word, after):
    whole = tokenizer.encode(before + word + after)
    assert tokenizer.encode(before) + tokenizer.encode(word + after) == whole


def test_template_boundaries(tokenizer):
    context = "Some special magic numbers are hidden within the following text.\nProse. 12\n" + NEEDLE
    question = "\nWhat are all the special magic numbers for abrasive-lumber mentioned in the provided text?"
    prefix = " The special magic numbers for abrasive-lumber mentioned in the provided text are"
    parts = [context, question, prefix, " 1234567", "."]
    assert [i for part in parts for i in tokenizer.encode(part)] == tokenizer.encode("".join(parts))
