"""Needle documents: exact length, measured depths, balance, independence of what was made before."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from regraft.assets import austen, teacher_dir
from regraft.assets.haystack import PIECE_CHARS, Haystack, default_haystack, filler_haystack
from regraft.assets.needles import ALL_TASKS as TASKS
from regraft.assets.needles import (
    GENERATOR_VERSION,
    Needle,
    NeedleDocument,
    answer_text,
    make_document,
    words,
)
from regraft.assets.needles import TASKS as SIX
from regraft.errors import UserError

ALPHABET = pre_tokenizers.ByteLevel.alphabet()
ESSAY_TASKS = [name for name, task in TASKS.items() if task.haystack == "essay"]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """A small byte-level BPE that puts a BOS before each text, unlike the embedded teacher's."""
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=1000, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet)
    tok.train_from_iterator([austen()[:100_000]], trainer)
    tok.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=tok, bos_token="<s>", eos_token="</s>", pad_token="</s>")


@pytest.fixture(scope="module")
def haystack() -> Haystack:
    return Haystack.from_text(austen()[:300_000])


def documents(task, length, n, tokenizer, haystack, **kwargs) -> list[NeedleDocument]:
    return [
        make_document(task, length, i, seed=0, tokenizer=tokenizer, haystack=haystack, **kwargs)
        for i in range(n)
    ]


def test_words_of_training_and_evaluation_are_disjoint():
    for train, held_out in zip(words("train"), words("eval"), strict=True):
        assert len(train) > 300 and len(held_out) > 300
        assert not set(train) & set(held_out)
        assert list(train) == sorted(train) and all(re.fullmatch("[a-z]+", word) for word in train)


def test_keys_come_from_their_split(tokenizer, haystack):
    for split, other in (("train", "eval"), ("eval", "train")):
        for document in documents("niah_multikey_1", 600, 10, tokenizer, haystack, split=split):
            for needle in document.needles:
                for part, own, foreign in zip(needle.key.split("-"), words(split), words(other), strict=True):
                    assert part in own and part not in foreign


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("length", [512, 1500])
def test_length_is_filled_and_never_exceeded(task, length, tokenizer, haystack):
    for document in documents(task, length, 12, tokenizer, haystack):
        n = len(tokenizer(document.model_input)["input_ids"])
        assert n == document.n_tokens
        assert 0.98 * length <= n + TASKS[task].new_tokens <= length


@pytest.mark.parametrize("task", TASKS)
def test_answer_fits_the_budget(task, tokenizer, haystack):
    for document in documents(task, 600, 5, tokenizer, haystack):
        answer = tokenizer(answer_text(document), add_special_tokens=False)["input_ids"]
        assert len(answer) + 1 <= TASKS[task].new_tokens


@pytest.mark.parametrize("task", TASKS)
def test_wording_is_rulers(task, tokenizer, haystack):
    spec = TASKS[task]
    document = documents(task, 600, 1, tokenizer, haystack)[0]
    one = spec.n_asked * spec.n_values == 1
    kind = spec.value_type.removesuffix("s") if one else spec.value_type
    asked = list(dict.fromkeys(n.key for n in document.needles if n.asked))
    lines = document.prompt.split("\n")
    start = f"A special magic {kind} is" if one else f"Some special magic {kind} are"
    rest = f"hidden within the following text. Make sure to memorize it. I will quiz you about the {kind}"
    assert lines[0] == f"{start} {rest} afterwards."
    what = f"What is the special magic {kind}" if one else f"What are all the special magic {kind}"
    query = lines[-1].removeprefix(f"{what} for ").removesuffix(" mentioned in the provided text?")
    assert sorted(re.split(r",(?: and)? ", query)) == sorted(asked)
    are = "is" if one else "are"
    prefix = f"The special magic {kind} for {query} mentioned in the provided text {are}"
    assert document.answer_prefix == prefix
    for needle in document.needles:
        text = f"One of the special magic {spec.value_type} for {needle.key} is: {needle.value}."
        assert document.prompt.count(text) == 1
    assert len({n.key for n in document.needles}) == spec.n_keys
    assert len({n.value for n in document.needles}) == len(document.needles) == spec.n_keys * spec.n_values


def test_answers_follow_the_question_then_the_document(tokenizer, haystack):
    for document in documents("niah_multiquery", 700, 5, tokenizer, haystack):
        of_key = {needle.key: needle.value for needle in document.needles}
        query = document.answer_prefix.split(" for ")[1].split(" mentioned")[0]
        assert list(document.answers) == [of_key[key] for key in re.split(r",(?: and)? ", query)]
    document = documents("niah_multivalue", 700, 1, tokenizer, haystack)[0]
    assert list(document.answers) == re.findall(r"is: (\d+)\.", document.prompt)
    a, b, c, d = document.answers
    assert answer_text(document) == f" {a}, {b}, {c}, and {d}."


@pytest.mark.parametrize("task", TASKS)
def test_depth_and_start_token_are_what_the_text_says(task, tokenizer, haystack):
    for document in documents(task, 700, 5, tokenizer, haystack):
        ids = tokenizer(document.model_input)["input_ids"]
        for needle in document.needles:
            tail = tokenizer.decode(ids[needle.start_token :])
            kind = TASKS[task].value_type
            assert tail.lstrip().startswith(f"One of the special magic {kind} for {needle.key} is:")
            context = document.prompt[document.prompt.index("\n") + 1 : document.prompt.rindex("\n")]
            text = f"One of the special magic {kind} for {needle.key} is: {needle.value}."
            before, after = context.split(text)
            counts = [len(tokenizer(part, add_special_tokens=False)["input_ids"]) for part in (before, after)]
            assert needle.depth == pytest.approx(counts[0] / max(1, sum(counts)), abs=0.01)


@pytest.mark.parametrize("task", [name for name in TASKS if "single" in name])
@pytest.mark.parametrize("length", [400, 512, 2000])
def test_real_depth_is_within_a_sentence_of_the_requested(task, length, tokenizer, haystack):
    hay = haystack if TASKS[task].haystack == "essay" else filler_haystack()
    longest = max(hay._measured(tokenizer)[0])
    for document in documents(task, length, 20, tokenizer, haystack):
        (needle,) = document.needles
        context = document.prompt[document.prompt.index("\n") + 1 : document.prompt.rindex("\n")]
        rest = re.sub(r"One of the special magic .*?\.", "", context)
        tokens = len(tokenizer(rest, add_special_tokens=False)["input_ids"])
        assert abs(needle.depth - needle.requested_depth) * tokens <= longest + 2


@pytest.mark.parametrize("task", TASKS)
def test_every_prefix_is_balanced_over_deciles(task, tokenizer, haystack):
    asked: dict[int, Counter[int]] = {}
    real: Counter[int] = Counter()
    length = 1024 if TASKS[task].key_type == "words" else 4096  # a tenth must hold a sentence
    for n, document in enumerate(documents(task, length, 35, tokenizer, haystack), start=1):
        order = {value: slot for slot, value in enumerate(sorted(document.answers))}
        assert len({int(x.requested_depth * 10) for x in document.needles if x.asked}) == len(order)
        real.update(needle.decile for needle in document.needles if needle.asked)
        wanted = asked.setdefault(0, Counter())
        wanted.update(int(x.requested_depth * 10) for x in document.needles if x.asked)
        counts = [wanted[decile] for decile in range(10)]
        assert max(counts) - min(counts) <= len(order)
        if n % 10 == 0:
            assert set(counts) == {n // 10 * len(order)}
    assert sum(abs(real[d] - asked[0][d]) for d in range(10)) <= 0.02 * sum(real.values())


def test_a_document_does_not_depend_on_what_was_made_before(tokenizer, haystack):
    def make(task: str, length: int, index: int) -> NeedleDocument:
        return make_document(task, length, index, seed=7, tokenizer=tokenizer, haystack=haystack)

    cells = [(task, length, index) for task in TASKS for length in (450, 600) for index in (0, 3)]
    forward = {cell: make(*cell) for cell in cells}
    fresh = Haystack(list(haystack.sentences))
    assert {cell: make(*cell) for cell in reversed(cells)} == forward
    document = make_document("niah_single_2", 600, 3, seed=7, tokenizer=tokenizer, haystack=fresh)
    assert document == forward["niah_single_2", 600, 3]
    assert len({document.prompt for document in forward.values()}) == len(cells)


def test_needles_between_needles_repeat_no_key_and_no_value(tokenizer, haystack):
    for task in ("niah_multikey_2", "niah_multikey_3"):
        text = documents(task, 1500, 1, tokenizer, haystack)[0].prompt
        pairs = re.findall(r"for ([a-z0-9-]+) is: ([a-z0-9-]+)\.", text)
        assert len(pairs) > 10
        for column in zip(*pairs, strict=True):
            assert len(set(column)) == len(pairs)


def test_the_six_documents_have_not_changed_since_version_one(haystack):
    """Whoever changes them raises `GENERATOR_VERSION`, and this digest with it."""
    letters = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(sorted(ALPHABET))}, merges=[]))
    letters.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain = PreTrainedTokenizerFast(tokenizer_object=letters)
    made = [document.to_dict() for task in SIX for document in documents(task, 2000, 3, plain, haystack)]
    digest = hashlib.sha256(json.dumps(made, sort_keys=True).encode()).hexdigest()
    assert (GENERATOR_VERSION, digest[:16]) == (1, "b929a04bac853457")


def test_seed_zero_is_a_seed_like_any_other(tokenizer, haystack):
    prompts = {
        make_document("niah_single_2", 500, 0, seed=seed, tokenizer=tokenizer, haystack=haystack).prompt
        for seed in (0, 1, 2)
    }
    assert len(prompts) == 3


def test_a_haystack_without_full_stops_still_spreads_needles(tokenizer):
    words_only = Haystack.from_text("river stone light " * 3000)
    assert max(map(len, words_only.sentences)) <= PIECE_CHARS
    depths = [d.needles[0].depth for d in documents("niah_single_2", 2000, 20, tokenizer, words_only)]
    assert min(depths) < 0.1 and max(depths) > 0.9
    endless = Haystack.from_text("x" * 20_000)
    assert max(map(len, endless.sentences)) <= PIECE_CHARS
    for document in documents("niah_single_2", 1000, 5, tokenizer, endless):
        assert document.n_tokens + 32 >= 980
        assert abs(document.needles[0].depth - document.needles[0].requested_depth) < 0.15


def test_a_short_haystack_is_read_in_a_circle(tokenizer):
    short = Haystack.from_text("The cat sat. The dog ran away. It rained all day in the old town.")
    document = documents("niah_single_2", 800, 1, tokenizer, short)[0]
    assert document.prompt.count("The dog ran away.") > 10


def test_sentences_end_where_sentences_end():
    text = 'Mr. Knightley came. "Did he?" said Emma; (she smiled.) No  more\nof it!  End'
    expected = ["Mr. Knightley came.", '"Did he?"', "said Emma; (she smiled.)", "No more of it!", "End"]
    assert Haystack.from_text(text).sentences == expected


def test_round_trip_through_json(tokenizer, haystack):
    for task in TASKS:
        document = documents(task, 500, 1, tokenizer, haystack)[0]
        assert NeedleDocument.from_dict(json.loads(json.dumps(document.to_dict()))) == document


def test_the_last_depth_belongs_to_the_last_decile():
    assert Needle("a-b", "1", True, 0.99, 1.0, 5).decile == 9


def test_mistakes_name_their_place(tokenizer, haystack):
    with pytest.raises(UserError, match="niah_single_9"):
        make_document("niah_single_9", 512, 0, seed=0, tokenizer=tokenizer, haystack=haystack)
    with pytest.raises(UserError, match="does not fit 60 tokens"):
        make_document("niah_single_2", 60, 0, seed=0, tokenizer=tokenizer, haystack=haystack)
    with pytest.raises(UserError, match="no text"):
        Haystack.from_text(" \n ")


def test_embedded_tokenizer_and_text():
    tokenizer = AutoTokenizer.from_pretrained(teacher_dir())
    assert len(default_haystack().sentences) > 30_000
    document = make_document("niah_single_3", 1024, 0, seed=0, tokenizer=tokenizer)
    assert re.fullmatch(
        r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}", document.answers[0]
    )
