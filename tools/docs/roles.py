"""For mkdocstrings: what docstrings have that Markdown does not know, or takes for something else.

Sphinx's roles, :func:`split`, become code, `split`; lines of an interpreter, which would be quotes in quotes, a block.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

ROLE = re.compile(r":(?:func|class|meth|mod|attr|data|exc|obj):`~?\.?([^`]+)`")

# From the first prompt to the end of the paragraph.
SESSION = re.compile(r"^( *)>>> .*(?:\n *\S.*)*", re.MULTILINE)


def as_markdown(text: str) -> str:
    text = ROLE.sub(r"`\1`", text)
    return SESSION.sub(r"\1```pycon\n\g<0>\n\1```", text)


class Roles(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = as_markdown(obj.docstring.value)
