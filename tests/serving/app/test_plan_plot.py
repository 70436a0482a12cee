"""Pictures of plans."""

from pathlib import Path

import pytest

from headrace.serving.app import plan_plot
from headrace.serving.app.plan_front import choices
from headrace.serving.app.plan_plot import check_plot, save_plot
from headrace.serving.core.errors import ConfigError
from tests.serving.app.test_plan import plan_of, row


def test_a_picture_that_cannot_be_is_refused_before_anything_is_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"plan.gif: its name must end in .svg, .png, .pdf"):
        check_plot(tmp_path / "plan.gif")
    with pytest.raises(ConfigError, match="there is no folder"):
        check_plot(tmp_path / "none" / "plan.svg")
    monkeypatch.setattr(plan_plot.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="needs matplotlib, which the plot extra of this package brings"):
        check_plot(tmp_path / "plan.svg")


def test_a_picture_has_a_line_for_each_mesh_and_the_front(tmp_path: Path) -> None:
    made = plan_of(
        row("v6e:2x2", "tensor=4", (1, 0.002), (16, 0.004)), row("v6e:2x4", "tensor=8", (1, 0.001), (16, 0.003))
    )
    check_plot(tmp_path / "plan.svg")
    save_plot("llama-3.1-8b", choices(made), tmp_path / "plan.svg")
    save_plot("llama-3.1-8b", choices(made), tmp_path / "plan.png")
    text = (tmp_path / "plan.svg").read_text()
    for words in ("v6e:2x2 tensor=4", "v6e:2x4 tensor=8", "front", "tokens/s per chip", "ms between tokens"):
        assert f"<!-- {words}" in text
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
