"""Texts, ids and chats of the tokenizer's golden file."""

from golden_prompts import RAW, prose

from tests.golden.random_text import random_strings

_PLAIN = (
    "", " ", "  ", "   ", "        ", "\n", "\n\n", "\n\n\n", "\r\n", "\r", "\t", "\t\t", " \n ", "\n  x",
    "x  \n", "a  b", "a   b", "a    b", "a \n b", "\u00a0", "a\u00a0b", "\u3000", "\u2028", "\u200b", "\ufeff",
    "\u0085", "a\u0004b", "\u0004", "\u0000", "a\u0000b", "\u001b[31m", "\u007f", "\u0001\u0002\u0003",
    "\ufffd", "\uffff", "\U00040000", "\U0001d800", "\U0010ffff", "\ue000", "\U000e0041", "0", "7", "42", " 42",
    "  42", "   42", "1234567890", "3.14159", "1,000,000", "2024-08-17", "6:45", "0x1F", "1e-9", "x²", "½",
    "⅓ cup", "Ⅷ", "٣٤", "१२३", "一二三", "①②", "x2y3", "v1.2.3", "\n1. a\n2. b", "  7", "\t7", "7 ", "7  8",
    "Hello", "Hello world", "Hello, world!", " hello", "HELLO", "hElLo", "it's", "IT'S", "we'll've", "'s",
    "' s", "o'clock", "don’t", "naïve", "café", "cafe\u0301", "Åse", "A\u030ase", "ﬁne", "ß", "ẞ", "ﷺ", "…",
    "—", "“quoted”", "¿Qué?", "antidisestablishmentarianism", "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", "!!!!!!!!",
    "----------", "=====", "@#$%^&*()", "😀", "😀😀", "😀 😀 😀", "👍🏽", "👨\u200d👩\u200d👧\u200d👦",
    "👩\u200d💻", "🏳️\u200d🌈", "🇫🇷", "🇫", "❤️", "❤", "☺", "1️⃣", "龘", "漢字", "汉字", "東京", "你好，世界！",
    "こんにちは", "カタカナ", "안녕하세요", "ㅎㅎ", "สวัสดี", "नमस्ते", "مرحبا", "שלום", "Привет", "Γειά",
    "Xin chào", "Dzień dobry", "ქართული", "አማርኛ", "தமிழ்", "ខ្មែរ", "မြန်မာ", "བོད", "ᚠᚢᚦ", "𐍈", "𝕳𝖊𝖑𝖑𝖔",
    "\U0001d801\U0001d802", "𓀀", "ｆｕｌｌ", "ｶﾅ", "Ω", "Ω", "Z̴̢a̷l̸g̵o̶", "\u202eabc", "a\u0308\u0301", "नि",
    "각", "각", "<|im_start|>", "<|im_end|>", "<|endoftext|>", "a<|im_end|>b", " <|im_end|> ",
    "<|im_start|>user\nhi<|im_end|>", "<|im_start", "im_end|>", "<|im_end|", "<|IM_END|>", "< |im_end|>",
    "<|im_<|im_end|>end|>", "<repo_name>x<file_sep>", "<reponame>", "<reponames>", "<empty_output>",
    "<jupyter_start>", "</s>", "<s>", "[INST]", "<unk>", "<0x04>", "Ġ", "Ċ", "DEFGHIJ",
    "The capital of France is", "Here is the English alphabet: ABC", "Say ok.",
    "def f(x):\n    return x**2  # square\n", "for (int i = 0; i < 10; ++i) { sum += a[i]; }\n",
    "SELECT * FROM t WHERE id=7;", '{"a": [1, 2.5, null], "b": "\\u00e9"}',
    "<html><body class='x'>&nbsp;</body></html>", "if x:\n\tpass\n\n\n\telse:\n",
    "https://example.com/a?b=c&d=%20#e", "user@example.com", "C:\\Users\\a", "/usr/bin/env python3",
    "#!/bin/sh\n", "| a | b |\n|---|---|\n| 1 | 2 |", "* item\n  * nested",
    "$$\\int_0^1 x^2\\,dx = \\frac{1}{3}$$", "fn main() -> () {}", "a=b;c=d", "camelCaseIdentifier",
    "snake_case_identifier", "SCREAMING_SNAKE", "kebab-case", "x\\ny", "\\", "\"", "'",
)  # fmt: skip

ID_ROWS = (
    [], [81, 82], [218, 218, 218], [10813, 242, 218], [10813, 242], [242, 218], [24211], [24211, 24211, 81],
    [1, 4093, 2], [2, 2, 0], [216, 36, 34], [33203, 23960, 57, 58], [180, 139, 242], [10813, 1, 242, 218],
    [321, 231], [49151], [504, 3575, 282, 4649, 314, 7042, 30, 2], [10813, 24211], [218, 10813],
    [198, 216, 216, 198],
)  # fmt: skip
"""Rows to decode: whole and cut characters, stray bytes, a real U+FFFD, control ids in between."""

CHATS: tuple[tuple[tuple[str, str], ...], ...] = (
    (("user", ""),),
    (("user", "  spaces around  "),),
    (("user", "\n\nnewlines\n\n"),),
    (("user", "> quoted"), ("assistant", "<b>bold</b>"), ("user", "< and >")),
    (("system", "Be brief."), ("user", "hi"), ("assistant", "Hello."), ("user", "7 * 6?")),
    (("assistant", "I speak first."), ("user", "ok")),
    (("user", "a"), ("user", "b"), ("assistant", "c"), ("system", "d"), ("user", "e")),
    (("user", "What is 2 + 2?"), ("assistant", "The answer is ")),
    (("user", "What is 2 + 2?"), ("assistant", "The answer is")),
    (("user", "Sing"), ("assistant", "La la\n")),
    (("user", "emoji 😀"), ("assistant", "👨\u200d👩\u200d👧\u200d👦 and ½ of 12"), ("user", "日本語で")),
    (("tool", "result: 42"), ("user", "thanks")),
)
"""The last turn is continued where it is the assistant's."""


def texts() -> list[str]:
    """About 300 texts, none twice."""
    words = [part for raw in RAW for part in (raw, raw.upper(), raw[::2])]
    sampled = list(random_strings(60, seed=3))
    return list(dict.fromkeys((*_PLAIN, *words, *sampled, prose(5, 6))))
