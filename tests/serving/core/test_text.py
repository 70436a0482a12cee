"""Detokenizer and StopMatcher against one decode of everything and a naive search (cases O01, O03, O04, O05, O40)."""

from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from headrace.serving.core.text import Detokenizer, OutputText, StopMatcher, TextPiece

# Ids 0..255 are the single bytes; then tokens that hold whole, several and cut characters.
TABLE = [bytes((byte,)) for byte in range(256)]
TABLE += [text.encode() for text in ("Hello", " world", "\ufffd", "é", "龘", "😀", " ", "a😀", "\u200d", "")]
TABLE += ["😀".encode()[:2], "😀".encode()[2:], b"\xf0\x9f", b"\xed\xa0\x80", b"\xc0\xaf", "สวัส".encode()[1:-1]]
ID = {token: index for index, token in enumerate(TABLE)}
SKIPPED = ID["é".encode()]

ids_lists = st.lists(st.integers(0, len(TABLE) - 1), max_size=40)


def grouped(items: Sequence[int], cuts: Sequence[int]) -> list[Sequence[int]]:
    borders = sorted({0, len(items), *(cut % (len(items) + 1) for cut in cuts)})
    return [items[a:b] for a, b in zip(borders, borders[1:], strict=False)]


@given(ids_lists, st.lists(st.integers(0, 100), max_size=10))
@example([ID["😀".encode()[:2]], ID["😀".encode()[2:]]], [1])
@example([0xF0, 0x9F, SKIPPED, 0x98, 0x80], [1, 2, 3, 4])
@example([0xE0, 0x80, 0x80, 0xF4, 0x90], [1, 2, 3, 4])
def test_joined_deltas_are_one_decode_of_all_ids(ids: list[int], cuts: list[int]) -> None:
    detokenizer = Detokenizer(TABLE, {SKIPPED})
    deltas = [detokenizer.push(group) for group in grouped(ids, cuts)] + [detokenizer.flush()]
    assert "".join(deltas) == b"".join(TABLE[i] for i in ids if i != SKIPPED).decode("utf-8", "replace")
    for delta in deltas:
        delta.encode("utf-8")


def test_a_character_is_sent_when_its_last_byte_arrives() -> None:
    detokenizer = Detokenizer(TABLE)
    assert [detokenizer.push([byte]) for byte in "a😀é".encode()] == ["a", "", "", "", "😀", "", "é"]
    assert detokenizer.flush() == ""


def test_a_real_replacement_character_passes_at_once() -> None:
    detokenizer = Detokenizer(TABLE)
    assert [detokenizer.push([ID["\ufffd".encode()]]) for _ in range(5)] == ["\ufffd"] * 5
    assert detokenizer.push([ID[b"Hello"]]) == "Hello"


def test_stray_bytes_are_shown_as_soon_as_they_are_certain() -> None:
    """Also bytes that would complete a character which the prompt cut: the prompt is not fed in."""
    detokenizer = Detokenizer(TABLE)
    assert [detokenizer.push([byte]) for byte in (0x98, 0x80, 0xFF)] == ["\ufffd"] * 3
    assert detokenizer.push([0xF0]) == ""
    assert detokenizer.push([ord("x")]) == "\ufffdx"


def test_the_end_of_the_output_shows_a_cut_character_once() -> None:
    detokenizer = Detokenizer(TABLE)
    assert detokenizer.push("龘".encode()[:2]) == ""
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""


def test_ids_without_a_token_have_no_text() -> None:
    assert Detokenizer(TABLE).push([len(TABLE), ID[b"Hello"], 10**9]) == "Hello"


def test_the_leading_space_of_a_text_that_stands_alone() -> None:
    detokenizer = Detokenizer(TABLE, strip_leading_space=True)
    assert [detokenizer.push([i]) for i in (ID[b""], ID[b" "], ID[b" "], ID[b" world"])] == ["", "", " ", " world"]
    assert Detokenizer(TABLE).push([ID[b" world"]]) == " world"


def naive(pieces: list[str], stops: list[str], include: bool, min_tokens: int) -> tuple[str, str | None, int]:
    """Output, stop string and number of tokens by trying every stop string at every character."""
    text = ""
    for number, piece in enumerate(pieces, start=1):
        for char in piece:
            text += char
            ended = [stop for stop in stops if text.endswith(stop)]
            if ended and number >= min_tokens:
                stop = max(ended, key=len)
                return (text if include else text.removesuffix(stop)), stop, number
    return text, None, len(pieces)


def undecided(text: str, stops: list[str]) -> int:
    """How many last characters may still become a stop string."""
    beginnings = (stop[:n] for stop in stops for n in range(1, len(stop)))
    return max((len(begin) for begin in beginnings if text.endswith(begin)), default=0)


letters = st.text("ab", max_size=6)


@given(
    st.lists(letters, max_size=20),
    st.lists(st.text("ab", min_size=1, max_size=5), max_size=4),
    st.booleans(),
    st.integers(0, 12),
)
@example(["a", "bab", "aba"], ["babab"], False, 0)
@example(["ab"], ["a", "ab"], False, 0)
@example(["xab"], ["ab", "b"], True, 0)
@example(["a", "b", "b"], ["ab", "abb"], False, 3)
def test_stops_against_a_naive_search(pieces: list[str], stops: list[str], include: bool, min_tokens: int) -> None:
    output, stop, num_tokens = naive(pieces, stops, include, min_tokens)
    matcher = StopMatcher(stops, include, min_tokens=min_tokens)
    sent = ""
    for number, piece in enumerate(pieces, start=1):
        text, found = matcher.push(piece)
        sent += text
        assert output.startswith(sent)
        if number < num_tokens or stop is None:
            assert found is None
            so_far = "".join(pieces[:number])
            assert sent == so_far[: len(so_far) - undecided(so_far, stops)]
        elif number == num_tokens:
            assert found == stop == matcher.found
            assert sent == output
        else:
            assert (text, found) == ("", None)
    assert sent + matcher.flush() == output


@given(st.text("abc😀", max_size=30), st.lists(st.integers(0, 30), max_size=8), st.integers(0, 30))
def test_a_planted_stop_is_found_however_it_is_cut(text: str, cuts: list[int], place: int) -> None:
    planted = text[: place % (len(text) + 1)] + "<stop😀>" + text
    borders = sorted({0, len(planted), *(cut % (len(planted) + 1) for cut in cuts)})
    matcher = StopMatcher(["<stop😀>", "<stop😀>x"])
    results = [matcher.push(planted[a:b]) for a, b in zip(borders, borders[1:], strict=False)]
    assert "".join(sent for sent, _ in results) == text[: place % (len(text) + 1)]
    assert [stop for _, stop in results if stop] == ["<stop😀>"]


ALPHABET = ["DEF", "GH", "I", "J", "K", "LM"]


@pytest.mark.parametrize(
    ("stops", "include", "sent", "stop"),
    [
        (["DEFGHIJ"], False, ["", "", "", ""], "DEFGHIJ"),
        (["DEFGHIJ"], True, ["", "", "", "DEFGHIJ"], "DEFGHIJ"),
        (["EFG"], False, ["D", ""], "EFG"),
        (["EFG"], True, ["D", "EFG"], "EFG"),
        (["GHIJK", "GHI"], False, ["DEF", "", ""], "GHI"),
        (["FGHX", "IJ"], False, ["DE", "", "FGH", ""], "IJ"),
        (["HIJKLMN"], False, ["DEF", "G", "", "", "", ""], None),
    ],
)
def test_a_stop_that_spans_tokens(stops: list[str], include: bool, sent: list[str], stop: str | None) -> None:
    """sent: the text sent with each token, up to the one that completes the stop string."""
    output = OutputText(Detokenizer([text.encode() for text in ALPHABET]), StopMatcher(stops, include))
    pieces = [output.push(index) for index in range(len(sent))]
    assert [piece.text for piece in pieces] == sent
    assert [piece.stop for piece in pieces] == [None] * (len(sent) - 1) + [stop]
    assert output.finish() == TextPiece("" if stop else "HIJKLM")


def test_the_minimum_of_tokens_holds_off_stop_strings() -> None:
    output = OutputText(Detokenizer([b"\n", b"a"]), StopMatcher(["\n"], min_tokens=3))
    assert [output.push(i) for i in (0, 0, 1, 1)] == [TextPiece("\n"), TextPiece("\n"), TextPiece("a"), TextPiece("a")]
    assert output.push(0) == TextPiece("", "\n")


def test_a_stop_counts_from_the_token_that_completes_it() -> None:
    """Its beginning may lie among the tokens that may not stop; it is held back there."""
    matcher = StopMatcher(["ab"], min_tokens=2)
    assert matcher.push("xa") == ("x", None)
    assert matcher.push("b") == ("", "ab")


def test_a_cut_character_at_the_end_may_complete_a_stop() -> None:
    output = OutputText(Detokenizer(TABLE), StopMatcher(["x\ufffd"]))
    assert output.push(ord("x")) == TextPiece("")
    assert output.push(0xF0) == TextPiece("")
    assert output.finish() == TextPiece("", "x\ufffd")


def test_what_is_held_does_not_grow_with_the_answer() -> None:
    matcher = StopMatcher(["never-there-1", "never-there-2"])
    sent = sum(len(matcher.push("x never-there-")[0]) for _ in range(10_000))
    assert len(matcher.flush()) == len("never-there-")
    assert sent == 10_000 * len("x never-there-") - len("never-there-")


def test_an_empty_stop_string_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one character"):
        StopMatcher(["a", ""])


def test_without_stops_text_passes_through() -> None:
    matcher = StopMatcher([])
    assert matcher.push("anything") == ("anything", None)
    assert matcher.flush() == ""
