"""A Transformer that translates numbers from English to German words, by SGD with momentum and decay, with neither, and
at one effective learning rate for all layers. Each has warm-up or none (Spreads in Effective Learning Rates, Appendix
B.3 and Figure 12).

`--data pairs:FILE` translates other sentences, such as the paper's Multi30k.
"""

import random
import tempfile
from pathlib import Path
from typing import Any

from fused_lwlr.papers import elr_language, language

MODEL = "seq2seq2"
DATA = "pairs:numbers"
"""The study's own pairs, see `numbers`."""
HELD_OUT = 200
"""Pairs; the rates are chosen on half of them."""
CONTEXT = 31
"""The longest pair has 29 characters, 30 with END."""
NO_SOURCE = 0.3
"""The least possible loss in nats a character without the source: log(1000) for 23 characters with END."""
DIVERGED = 2.8
"""Loss of diverged trainings in pictures; predicting each character with its frequency has 2.7."""
LRS = {
    "momentum, decay": (0.02, 0.04, 0.08, 0.16),
    "neither": (0.15, 0.3, 0.6, 1.2),
    "constrained": (0.03, 0.06, 0.12, 0.24),
    "no decay": (0.004, 0.008, 0.016),
}

ENGLISH, GERMAN = (
    text.split()
    for text in (
        "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
        "seventeen eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety",
        "null ein zwei drei vier fünf sechs sieben acht neun zehn elf zwölf dreizehn vierzehn fünfzehn sechzehn "
        "siebzehn achtzehn neunzehn zwanzig dreißig vierzig fünfzig sechzig siebzig achtzig neunzig",
    )
)
"""0 to 19, and the tens from 20 on."""


def english(number: int) -> str:
    """The words of a number from 0 to 999."""
    if number >= 100:
        return f"{ENGLISH[number // 100]} hundred" + (f" {english(number % 100)}" if number % 100 else "")
    if number < 20:
        return ENGLISH[number]
    return ENGLISH[18 + number // 10] + (f"-{ENGLISH[number % 10]}" if number % 10 else "")


def german(number: int) -> str:
    """The word of a number from 0 to 999; it has the ones before the tens."""
    if number >= 100:
        return f"{GERMAN[number // 100]}hundert" + (german(number % 100) if number % 100 else "")
    if number < 20:
        return "eins" if number == 1 else GERMAN[number]
    return (f"{GERMAN[number % 10]}und" if number % 10 else "") + GERMAN[18 + number // 10]


def numbers() -> list[str]:
    """A line for each pair, SOURCE, a tab, TARGET, in a random order that is always the same."""
    return [f"{english(number)}\t{german(number)}\n" for number in random.Random(0).sample(range(1000), 1000)]


def measure(data: str, **fields: Any) -> dict[str, Any]:
    """As `language.measure`; the study's own pairs are in files for as long as it trains."""
    if data != DATA:
        return language.measure(data=data, **fields)
    with tempfile.TemporaryDirectory() as folder:
        lines, files = numbers(), [Path(folder, name) for name in ("train.tsv", "val.tsv")]
        for file, part in zip(files, (lines[:-HELD_OUT], lines[-HELD_OUT:]), strict=True):
            file.write_text("".join(part), encoding="utf-8")
        train, val = (f"pairs:{file}" for file in files)
        return language.measure(data=train, val_data=val, **fields)


STUDY = language.study(
    "elr-translation",
    __doc__,
    elr_language.arms(LRS, model=MODEL, context=CONTEXT),
    quick=slice(4, 6),
    text={
        "title": "translation: one effective learning rate in place of warm-up",
        "paper": elr_language.FIGURES,
        "notes": [
            f"{DATA}: the numbers from 0 to 999, from English to German words; {HELD_OUT} of them are held out; "
            "perplexity is e to a loss",
            f"{MODEL} {elr_language.ABOUT}",
            "paper: Figure 12, test perplexity on Multi30k, of a Transformer of 20 layers; momentum and decay diverge "
            "without warm-up, and the constraint, without it, has the lowest perplexity (Appendix B.3)",
        ],
        "trains": NO_SOURCE,
        "level": "without the source no loss is lower",
    },
    lines={**elr_language.LINES, "diverged": DIVERGED},
    function=measure,
    data=DATA,
    steps=250,
)
