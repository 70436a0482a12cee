"""Prompts of the golden files: chat and raw, many scripts, and lengths around every page, block and chunk border."""

import random

SEED = 7
EXACT_LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 512, 513, 1000, 1500)
"""Token counts of the raw prompts that are cut to length."""

RAW = (
    "The capital of France is",
    "Once upon a time there was a mill by the river, and",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    '{"name": "Ada", "languages": ["en", "fr"], "age": ',
    "1, 1, 2, 3, 5, 8, 13, 21,",
    "3.14159 * 2 = ",
    "Столица Франции —",
    "Η πρωτεύουσα της Γαλλίας είναι",
    "عاصمة فرنسا هي",
    "בירת צרפת היא",
    "फ्रांस की राजधानी है",
    "เมืองหลวงของฝรั่งเศสคือ",
    "法国的首都是",
    "フランスの首都は",
    "프랑스의 수도는",
    "😀 😀 😀 😀 😀 😀",
    "👨\u200d👩\u200d👧\u200d👦 means family, 🇫🇷 means",
    "La capitale de la France est",
    "Die Hauptstadt von Frankreich ist",
    "    indented\n\tand tabbed\n\n\n",
)

CHATS: tuple[tuple[tuple[str, str], ...], ...] = (
    (("user", "hi"),),
    (("user", "What is the capital of France?"),),
    (("user", "Write a Python function that reverses a string."),),
    (("user", "Count from 1 to 20, separated by commas."),),
    (("system", "You answer in one short sentence."), ("user", "Why is the sky blue?")),
    (
        ("user", "My name is Ada."),
        ("assistant", "Nice to meet you, Ada!"),
        ("user", "What is my name?"),
    ),
    (("user", "Translate to French: Good morning, my friends."),),
    (("user", "Переведи на английский: доброе утро"),),
    (("user", "用一句话介绍北京。"),),
    (("user", "日本の首都はどこですか？"),),
    (("user", "What does this mean? 🚀🌍👩\u200d💻"),),
    (("user", "مرحبا، كيف حالك؟"),),
    (("user", "List three uses of water power. Answer with a numbered list."),),
)

_WHO = ("the miller", "an engineer", "my neighbour", "the old clerk", "a young baker", "the captain", "Dr. Lindqvist")
_DID = ("measured", "repaired", "painted", "described", "sold", "counted", "carried", "forgot", "weighed")
_WHAT = ("the water wheel", "seven barrels", "a wooden gate", "the long ledger", "two grey horses", "the bridge")
_WHERE = ("by the river", "near Uppsala", "behind the church", "in the valley", "at the harbour", "under a lime tree")
_WHEN = ("On Monday", "In 1843", "Early in May", "After the flood", "That winter", "At 6:45", "Before the harvest")
_WHY = (
    "because the stream ran low", "while the children slept", "and nobody asked why", "as the contract demanded",
    "so that the flour stayed dry", "although it was raining", "for 12.50 crowns",
)  # fmt: skip


def prose(seed: int, num_sentences: int) -> str:
    """Plain English of seeded sentences, varied enough that a model cannot simply copy itself."""
    rng = random.Random(seed)

    def pick(options: tuple[str, ...]) -> str:
        return options[int(rng.random() * len(options))]

    return " ".join(
        f"{pick(_WHEN)} {pick(_WHO)} {pick(_DID)} {pick(_WHAT)} {pick(_WHERE)}, {pick(_WHY)}."
        for _ in range(num_sentences)
    )


def long_chats() -> tuple[tuple[tuple[str, str], ...], ...]:
    """Two chats of about 300 and 900 tokens."""
    short, long = prose(SEED + 1, 14), prose(SEED + 2, 45)
    return (
        (("user", f"Summarise this in one sentence:\n\n{short}"),),
        (("system", "You are a careful reader."), ("user", f"{long}\n\nWho repaired something? Name one person.")),
    )
