"""Shared by the scripts that write pages."""

import itertools
import textwrap


def wrapped(lines, width=100):
    """The text of a page: paragraphs filled to `width`; headings, tables and pictures unchanged."""
    def is_text(line):
        return bool(line) and line[0] not in "#|!"

    out = []
    for text, group in itertools.groupby(lines, is_text):
        out += textwrap.wrap(" ".join(group), width, break_long_words=False, break_on_hyphens=False) if text else group
    return "\n".join(out) + "\n"
