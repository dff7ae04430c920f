"""Prompts of mixed lengths for the chat benchmark: real English, the same for every server, no two alike.

Every prompt begins with a number of its own, so that no server can answer one from another's cached prefix (the chat
template's system message aside).
"""

from __future__ import annotations

import random
from collections.abc import Sequence

__all__ = ["LENGTHS", "prompts"]

LENGTHS: dict[str, int] = {"short": 0, "medium": 75, "long": 300}
"""Words of text before the question: none, and what makes about 100 and 400 tokens."""

QUESTIONS: Sequence[str] = (
    "How do bees find the way back to their hive?",
    "Why is the sky red in the evening?",
    "What should I look at when I buy a used bicycle?",
    "How does a lock on a canal work?",
    "Can you explain what an interest rate is?",
    "What is a good way to learn a new language?",
    "Why do some trees lose their leaves in autumn?",
    "How do I keep bread fresh for a few days?",
)

TASKS: Sequence[str] = (
    "Sum up the notes above in a few sentences.",
    "Which of these notes surprises you most, and why?",
    "Write a short story in which three of these things happen.",
    "What do these notes tell about the person who wrote them?",
)

SENTENCES: Sequence[str] = (
    "The ferry left the harbour at six in the morning, when the fog still lay on the water.",
    "My grandmother baked two loaves every Saturday and gave one of them to the neighbours.",
    "A good map shows not only the roads but also what one can see from them.",
    "The museum keeps its oldest clocks in a room without windows, because light harms the varnish.",
    "After the storm we found the boat on its side, half full of sand and small crabs.",
    "Rivers carry fine stones far into the plain and drop the heavy ones near the mountains.",
    "The library lends tools as well as books, and the drill is always the first thing to be gone.",
    "In dry summers the roots of the old oak reach deeper than the well of the farm.",
    "She counted the steps of the tower twice and came to a different number each time.",
    "The price of salt once decided which towns grew rich and which stayed villages.",
    "Glass is made of sand, soda and lime, and of a great deal of patience.",
    "The train was late again, so we played cards with a couple from the next town.",
    "Owls turn their heads because they cannot turn their eyes.",
    "Nobody remembers who planted the pear trees along the road to the mill.",
    "The bridge was closed for repairs, and the whole valley learned to row that year.",
    "A letter that was posted in 1962 arrived last week with two stamps that no longer exist.",
    "The teacher asked us to draw our street from memory, and most of us forgot the trees.",
    "Cheese that ripens in caves takes its taste from the air as much as from the milk.",
    "The first telephone in the village stood in the bakery, where everyone could listen.",
    "Snow fell for three days, and then the silence was so deep that we heard the stream under the ice.",
    "The captain wrote down the weather every hour, and scientists still use his notebooks.",
    "Some birds cross the desert at night, when the air is cool and the stars show the way.",
    "The orchestra tuned its instruments while the rain drummed on the tin roof of the hall.",
    "An old rule says that one should never repair a roof and a marriage in the same week.",
    "The market opens before sunrise, and by nine the best fish has been sold.",
    "He built the shed from the wood of three broken boats and a piano.",
    "Lighthouses were once fed with whale oil, later with petroleum, and now with electric light.",
    "The children dammed the brook with stones and were proud of the lake until evening.",
    "A careful gardener plants twice as many beans as the family needs, half of them for the birds.",
    "The hospital moved to the hill because the air was thought to be better there.",
    "Our cat sleeps on the warmest shelf and wakes only when somebody opens a tin.",
    "The tailor kept a book with the measures of every customer since the year of the flood.",
    "In winter the lake freezes from the shore, and the swans gather where the current is strong.",
    "The recipe asks for a cup of flour, but nobody knows how large that cup was.",
    "Two brothers ran the cinema, and one of them had never watched a film to its end.",
    "The bus driver knew all the passengers by name and waited for those who were late.",
    "Wool from the northern islands is coarse, warm, and smells of smoke for years.",
    "When the factory closed, its whistle was given to the school, which uses it on the last day of term.",
    "The doctor rode a bicycle to her patients and left it unlocked in front of each house.",
    "It takes about a hundred years for a path to become a road and a week for a road to become a path.",
)


def prompts(count: int, seed: int) -> list[str]:
    """*count* prompts, their lengths taking turns: short, about 100 tokens, about 400 tokens. The same for a *seed*."""
    draw = random.Random(seed)
    words = list(LENGTHS.values())
    return [_prompt(draw, f"Page {seed * 1000 + n}. ", words[n % len(words)]) for n in range(count)]


def _prompt(draw: random.Random, start: str, words: int) -> str:
    if not words:
        return start + draw.choice(QUESTIONS)
    text: list[str] = []
    for sentence in draw.sample(SENTENCES, len(SENTENCES)):
        text.append(sentence)
        words -= len(sentence.split())
        if words <= 0:
            break
    return f"{start}{' '.join(text)}\n\n{draw.choice(TASKS)}"
