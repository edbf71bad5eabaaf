"""The README's code runs, and what it says is printed is printed."""

import re
from pathlib import Path

import pytest

README = (Path(__file__).parent.parent / "README.md").read_text()
BLOCKS = re.findall(r"^```(python|text)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


@pytest.mark.needs("torch", "jax")
def test_code_blocks(capsys):
    namespace = {}
    assert len(BLOCKS) >= 5
    for kind, text in BLOCKS:
        if kind == "python":
            exec(compile(text, "README.md", "exec"), namespace)
        else:
            assert capsys.readouterr().out == text
