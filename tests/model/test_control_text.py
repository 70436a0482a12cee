"""Control text in other text, against the plain rule."""

import itertools

import pytest

from headrace.model.control_text import ControlText


@pytest.mark.parametrize("controls", [["<|a|>", "<|ab|>", "[x]"], ["aba"], ["ab"], ["a"], []])
def test_a_text_touches_what_it_could_be_part_of(controls: list[str]) -> None:
    """All texts of up to 5 characters of what the control texts are made of."""
    found = ControlText(controls)
    long = [control for control in controls if len(control) > 1]
    for length in range(6):
        for characters in itertools.product("<|a>x]" if length < 5 else "<|a>", repeat=length):
            text = "".join(characters)
            expected = any(
                text.endswith(control[:cut]) or text.startswith(control[cut:])
                for control in long
                for cut in range(1, len(control))
            )
            assert found.touches(text) == expected, text
