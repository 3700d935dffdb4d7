"""What a teacher reads when: levels that add one difficulty each, then rows of its full length."""

from __future__ import annotations

from dataclasses import dataclass

# Rows of a level are drawn from kinds: "0" to "5" are those of the short levels (see `rows.level_row`).
Mixture = dict[str, float]
SHORT = (96, 160, 192, 192, 192, 256)  # tokens of a row in the short levels
FORMER = 0.4  # share of rows from levels already passed


@dataclass(frozen=True)
class Level:
    """Rows of one length and mixture.

    A level ends when enough answer tokens are right (`train.PASS`), or, with `most`, after that share of the
    whole time; the last one takes the time that is left.
    """

    length: int
    rows: int
    mixture: Mixture
    whole: bool = False  # of the training length: learning rate falls, blocks are compiled
    most: float | None = None


def short_levels(rows: int) -> list[Level]:
    """Recall of single tokens, then one difficulty more a level."""
    levels = []
    for number, length in enumerate(SHORT):
        former = {str(i): FORMER / number for i in range(number)}
        levels.append(Level(length, rows, {str(number): 1.0 - (FORMER if number else 0.0), **former}))
    return levels


def embedded_levels(length: int, rows: int, last_rows: int) -> list[Level]:
    """The embedded teacher's: one mixture at full length, two thirds of it needle documents."""
    mixture = {"book": 0.35, "dense": 0.25, "ruler": 0.32, "former": 0.08}
    return [*short_levels(rows), Level(length, last_rows, mixture, whole=True)]


def replication_levels(length: int, rows: int, last_rows: int) -> list[Level]:
    """Retrieval at full length first, then books with 15 % needle documents, so that it stays."""
    retrieval = {"book": 0.40, "dense": 0.30, "ruler": 0.25, "former": 0.05}
    language = {"book": 0.85, "dense": 0.05, "ruler": 0.09, "former": 0.01}
    return [
        *short_levels(rows),
        Level(length, last_rows, retrieval, whole=True, most=0.45),
        Level(length, last_rows, language, whole=True),
    ]
