"""Train the teacher's tokenizer: a byte-level BPE of 8,192 tokens made for retrieval.

Use::

    python scripts/train_tokenizer.py --text books.jsonl.xz regraft/assets/austen.txt.xz \
        --out regraft/assets/teacher --measure valid.jsonl.xz

A ``.jsonl.xz`` file holds one ``{"text": ...}`` a line, a ``.txt.xz`` file is one text. ``--megabytes``
caps what is read of each file (an equal share of every book). The result depends on the files and the
options alone, and loads with ``AutoTokenizer.from_pretrained(DIR)``.

Layout of the ids

=============  ==========================================================================
0, 1           ``<|endoftext|>`` (BOS, EOS, document separator), ``<|pad|>``
2 .. 257       the 256 bytes
258 .. 1357    "00" .. "99", "000" .. "999" (one-digit numbers are bytes)
1358 .. 1513   the hex pairs of a uuid that are not numbers: "0a" .. "ff"
1514 .. 5998   ordinary BPE tokens in the order of their merges (4,500, 15 of them hex pairs: "ed")
5999 .. 8191   whole words: adjectives with a leading space, nouns without (" abrasive", "-", "fact")
=============  ==========================================================================

``encode`` adds no special token: whoever packs documents puts ``<|endoftext|>`` between them.

Numbers, hex pairs and whole words have no merges: the model runs with ``ignore_merges``, so a
pre-token which is in the vocabulary is that token, and no entry is spent on intermediate pieces.
"""

from __future__ import annotations

import argparse
import json
import lzma
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from wonderwords.random_word import _get_words_from_text_file

END_OF_TEXT, PAD = "<|endoftext|>", "<|pad|>"
NUMBERS = [f"{i:0{width}d}" for width in (1, 2, 3) for i in range(10**width)]
HEX_PAIRS = [f"{i:02x}" for i in range(256)]
UUID_GROUPS = (8, 4, 4, 4, 12)
# RULER's sentences around needles, whose words are to be single tokens too.
NEEDLE_SENTENCES = """
Some special magic numbers are hidden within the following text. Make sure to memorize it. I will quiz you
about the numbers afterwards. One of the special magic number uuids uuid words word for it is: 1. What are all
the special magic numbers for it mentioned in the provided text? The special magic numbers for it mentioned
in the provided text are
"""


def uuid_pattern() -> str:
    """Match one pair of hex digits, or the space before the first, of a lower-case uuid only.

    One alternative for each of the sixteen positions, fixed by what stands before (a look-behind of
    fixed length) and after it, so that "decade" or "face-dead-beef" are words as ever.
    """
    hex_run = "[0-9a-f]{%d}"
    whole = "-".join(hex_run % n for n in UUID_GROUPS)
    places = []
    for group, size in enumerate(UUID_GROUPS):
        for start in range(0, size, 2):
            before = [hex_run % n for n in UUID_GROUPS[:group]] + ([hex_run % start] if start else [""])
            rest = size - start - 2
            after = ([hex_run % rest] if rest else [""]) + [hex_run % n for n in UUID_GROUPS[group + 1 :]]
            behind = f"(?<={'-'.join(before)})" if group or start else ""
            places.append(f"{behind}[0-9a-f]{{2}}(?={'-'.join(after)})")
    # The guard spares ordinary text the sixteen look-behinds.
    return f"[ ](?={whole})|(?=[0-9a-f]{{2}}[0-9a-f-]?)(?:{'|'.join(places)})"


PATTERN = "|".join(
    [
        uuid_pattern(),
        r"['\x{2019}](?i:s|t|re|ve|m|ll|d)(?![\p{L}\p{M}])",
        r" ?[\p{L}\p{M}]+",
        r"\p{N}{1,3}",  # left to right; a space before a number stays a token of its own
        r" ?[^\s\p{L}\p{M}\p{N}]+",  # no newlines: "." and ".\n" begin alike
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)


def pre_tokenizer() -> pre_tokenizers.PreTokenizer:
    """Split by `PATTERN`, then map bytes to characters."""
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def read_documents(path: Path) -> list[str]:
    """All documents of a ``.jsonl.xz`` (field ``text``) or ``.txt.xz`` file."""
    with lzma.open(path, "rt", encoding="utf-8", newline="") as file:
        if path.name.endswith(".jsonl.xz"):
            return [json.loads(line)["text"] for line in file]
        return [file.read()]


def sample(documents: Sequence[str], characters: int) -> Iterator[str]:
    """Yield pieces of all documents, together about `characters` long.

    Of every 20,000 characters the leading share is kept, so that each book gives its part.
    """
    block = 20_000
    share = min(1.0, characters / max(1, sum(map(len, documents))))
    for text in documents:
        for start in range(0, len(text), block):
            yield text[start : start + max(1, round(block * share))]


def key_words() -> tuple[list[str], list[str]]:
    """Adjectives and nouns of the keys "adjective-noun", those which are one pre-token."""
    lists = (_get_words_from_text_file(name) for name in ("adjectivelist.txt", "nounlist.txt"))
    adjectives, nouns = (sorted({w for w in words if re.fullmatch("[a-z]+", w)}) for words in lists)
    return adjectives, nouns


def train_merges(
    texts: Sequence[str], words: Sequence[str], weight: int, count: int
) -> list[tuple[str, str]]:
    """The first `count` merges of a BPE of the texts and `weight` times the words, digits left out."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer()
    trainer = trainers.BpeTrainer(
        vocab_size=256 + count + len(NUMBERS),  # room for merges of digits, dropped below
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )

    def corpus() -> Iterator[str]:
        yield from texts
        for _ in range(weight):
            yield from words

    tokenizer.train_from_iterator(corpus(), trainer)
    merges: list[tuple[str, str]] = [tuple(m) for m in json.loads(tokenizer.to_str())["model"]["merges"]]
    # Numbers of ASCII digits are whole tokens already; pre-tokens keep them apart from all else.
    return [m for m in merges if not re.search("[0-9]", "".join(m))][:count]


def build_vocabulary(
    merges: Sequence[tuple[str, str]], words: Sequence[str], size: int
) -> tuple[dict[str, int], int]:
    """Token to id in the order of the table above, filled up with `words`; and how many words it took."""
    tokens = [END_OF_TEXT, PAD, *sorted(pre_tokenizers.ByteLevel.alphabet()), *NUMBERS, *HEX_PAIRS]
    tokens += [a + b for a, b in merges]
    vocabulary = {token: i for i, token in enumerate(dict.fromkeys(tokens))}
    before = len(vocabulary)
    for word in words:
        if len(vocabulary) == size:
            break
        vocabulary.setdefault(word.replace(" ", "Ġ"), len(vocabulary))
    if len(vocabulary) != size:
        raise ValueError(f"{len(vocabulary)} tokens, not {size}: raise --merges or lower --vocab-size")
    return vocabulary, size - before


def rank_words(texts: Sequence[str], adjectives: Sequence[str], nouns: Sequence[str]) -> list[str]:
    """Candidates for whole-word tokens, best first: needle sentences, all adjectives, then nouns.

    Adjectives and nouns are sorted by their frequency in the texts.
    """
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(re.findall("[a-z]+", text))

    def ranked(words: Sequence[str]) -> list[str]:
        return sorted(words, key=lambda w: (-counts[w], w))

    needles = dict.fromkeys(re.findall("[A-Za-z]+", NEEDLE_SENTENCES))
    # After a space, or with a capital at the start of a sentence, which may follow a newline.
    frame = [" " + w for w in needles] + [w for w in needles if w[0].isupper()]
    return frame + [" " + w for w in ranked(adjectives)] + ranked(nouns)


def assemble(vocabulary: dict[str, int], merges: Sequence[tuple[str, str]]) -> Tokenizer:
    """The tokenizer of a vocabulary and its merges; no post-processor, so nothing is added in encode."""
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=list(merges), ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END_OF_TEXT, PAD])
    return tokenizer


def save(tokenizer: Tokenizer, out: Path) -> None:
    """Write the two files that `AutoTokenizer` reads."""
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "pad_token": PAD,
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1_000_000,
        "padding_side": "left",
    }
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out / "tokenizer.json"), pretty=False)
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def bytes_per_token(tokenizer: Tokenizer, texts: Sequence[str]) -> float:
    """UTF-8 bytes of the texts over their tokens."""
    tokens = sum(len(encoding.ids) for encoding in tokenizer.encode_batch(list(texts)))
    return sum(len(text.encode()) for text in texts) / tokens


def measure(tokenizer: Tokenizer, held_out: Sequence[Path], adjectives: list[str], nouns: list[str]) -> None:
    """Print what the tokenizer costs on keys, numbers, uuids and held-out text."""

    def lengths(texts: Sequence[str]) -> list[int]:
        return [len(encoding.ids) for encoding in tokenizer.encode_batch(list(texts))]

    of_adjectives, of_nouns = lengths([" " + w for w in adjectives]), lengths(nouns)
    for name, sizes in (("adjectives", of_adjectives), ("nouns", of_nouns)):
        single, short = (sum(n <= most for n in sizes) / len(sizes) for most in (1, 2))
        print(f"{name}: {len(sizes)}, {single:.1%} are one token, {short:.1%} at most two,", end=" ")
        print(f"mean {sum(sizes) / len(sizes):.2f}")
    # Pre-tokens are independent, so the mean over all pairs is the sum of the means and the dash.
    mean = sum(of_adjectives) / len(adjectives) + 1 + sum(of_nouns) / len(nouns)
    print(f'mean tokens of a key "adjective-noun" after a space: {mean:.2f}')
    sentence = "One of the special magic numbers for abrasive-lumber is: 1234567."
    pieces = [tokenizer.decode([i]) for i in tokenizer.encode(sentence).ids]
    print(f"needle: {len(pieces)} tokens {pieces}")
    for path in held_out:
        texts = list(sample(read_documents(path), 3_000_000))
        print(f"{path.name}: {bytes_per_token(tokenizer, texts):.3f} bytes a token")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", type=Path, nargs="+", required=True, help=".jsonl.xz or .txt.xz files")
    parser.add_argument("--out", type=Path, required=True, help="directory of the tokenizer's files")
    parser.add_argument("--measure", type=Path, nargs="*", default=[], help="files for bytes a token")
    parser.add_argument("--megabytes", type=float, default=15, help="most text taken of a file (15)")
    parser.add_argument("--vocab-size", type=int, default=8192)
    parser.add_argument("--merges", type=int, default=4500, help="ordinary BPE tokens (4500)")
    parser.add_argument("--word-weight", type=int, default=60, help="copies of the key words (60)")
    args = parser.parse_args()

    texts = [t for path in args.text for t in sample(read_documents(path), int(args.megabytes * 1e6))]
    adjectives, nouns = key_words()
    keys = [" " + w for w in adjectives] + ["-" + w for w in nouns]
    merges = train_merges(texts, keys, args.word_weight, args.merges)
    vocabulary, words = build_vocabulary(merges, rank_words(texts, adjectives, nouns), args.vocab_size)
    tokenizer = assemble(vocabulary, merges)
    save(tokenizer, args.out)
    print(f"{args.out}: {tokenizer.get_vocab_size()} tokens, {len(merges)} merges, {words} whole words")
    measure(tokenizer, args.measure, adjectives, nouns)


if __name__ == "__main__":
    main()
