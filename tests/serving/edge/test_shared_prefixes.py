"""The file of shared prefixes, and how they become token ids."""

from pathlib import Path

import pytest

from headrace.serving.core.errors import ConfigError
from headrace.serving.edge.prompt_ids import LocalEncoder
from headrace.serving.edge.shared_prefixes import SharedPrefixes, encode_prefixes, read_prefixes
from tests.serving.edge.fakes import BOS, ByteTokenizer, LineTemplate

ENTRIES = """
[[prefix]]
name = "support"
system = "Be kind"

[[prefix]]
name = "manual"
text = "The manual"
"""


def test_system_messages_are_rendered_and_texts_are_not(tmp_path: Path) -> None:
    path = tmp_path / "prefixes.toml"
    path.write_text(ENTRIES)
    encoder = LocalEncoder(ByteTokenizer(), LineTemplate())  # type: ignore[arg-type]
    shared = encode_prefixes(path, read_prefixes(path), encoder)
    chat = [{"role": "system", "content": "Be kind"}, {"role": "user", "content": "hi"}]
    prompt = tuple(LineTemplate().render_ids(ByteTokenizer(), chat))
    assert shared.num_shared(prompt) == len((BOS, *b"system:Be kind\n"))
    assert shared.num_shared(tuple(b"The manual: page 1")) == 10
    assert shared.num_shared(tuple(b"the manual")) == 0
    assert shared.num_shared((1,)) == SharedPrefixes().num_shared(prompt) == 0


def test_a_template_that_refuses_is_an_error_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "prefixes.toml"
    path.write_text('[[prefix]]\nname = "bad"\nsystem = "refuse me"')
    with pytest.raises(ConfigError, match="'bad' cannot be encoded: the template refuses"):
        encode_prefixes(path, read_prefixes(path), LocalEncoder(ByteTokenizer(), LineTemplate()))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="no chat template"):
        encode_prefixes(path, read_prefixes(path), LocalEncoder(ByteTokenizer(), None))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "[[prefix]]"),
        ("prefix = 3", "[[prefix]]"),
        ("[[prefix]]\nname = 'a'\ntext = 'b'\n[other]", "nothing else"),
        ("prefix = [3]", "prefix 1"),
        ("[[prefix]]\ntext = 'b'", "name is missing"),
        ("[[prefix]]\nname = 'a'", "either system"),
        ("[[prefix]]\nname = 'a'\nsystem = 'b'\ntext = 'c'", "either system"),
        ("[[prefix]]\nname = 'a'\ntext = ''", "text must be a string that is not empty"),
        ("[[prefix]]\nname = 'a'\ntext = 3", "text must be a string"),
        ("[[prefix]]\nname = 'a'\ntxt = 'b'", "nothing else"),
        ("[[prefix]]\nname = 'a'\ntext = 'b'\n" * 2, "prefix 1: another one"),
        ("[[prefix]]\nname = 'a'\ntext = 'b'\n" * 300, "at most 256"),
        ("[[prefix", "TOML"),
    ],
)
def test_what_cannot_be_meant_is_named(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "prefixes.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_prefixes(path)
    assert str(path) in str(caught.value)
    assert words.replace("prefix 1: another", "prefix 2: another") in str(caught.value)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_prefixes(tmp_path / "none")
