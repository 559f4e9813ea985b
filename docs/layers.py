"""Draws docs/layers.svg: the folders and their dependencies. `layers.py --check` compares it with the file."""

import pathlib
import sys

WIDTH, ROW, GAP = 760, 74, 12
TARGET = pathlib.Path(__file__).with_suffix(".svg")

# x and width in twelfths of the picture, row from the top, color, folder, contents, height in rows if not 1
BOXES = [
    (0, 8, 0, "top", "tools/", "the command line: compare, train, bench, plan, report, run, info"),
    (8, 4, 0, "top", "examples/", "programs that use the library", 3),
    (0, 5, 1, "plan", "src/plan", "prediction: virtual clock, simulated network, kernel costs"),
    (5, 3, 1, "libtorch", "src/libtorch", "torch::nn models"),
    (0, 8, 2, "engine", "src/fsdp", "mesh, strategies as data, flat parameters, engine"),
    (0, 4, 3, "nn", "src/nn", "tensors, tape, layers, models"),
    (4, 4, 3, "comm", "src/comm", "Communicator, Work, registry, launch"),
    (8, 4, 3, "side", "backends/", "communication between ranks"),
    (0, 12, 4, "base", "src/base", "dtypes, errors, environment, memory and its tracker, streams, events"),
]

STYLE = """
  text { font-family: system-ui, sans-serif; fill: #1c2024; } .name { font-weight: 600; font-size: 17px; } .what { font-size: 13px; }
  rect { stroke: #5c6670; stroke-opacity: .35; } path { stroke: #5c6670; stroke-width: 2; fill: none; }
  .top rect { fill: #e8ebee; } .plan rect { fill: #e6dcf3; } .libtorch rect { fill: #f6d6dc; } .engine rect { fill: #f9ddc9; } .nn rect { fill: #cfe5f4; } .comm rect { fill: #cdebdf; }
  .side rect { fill: #fff; stroke-dasharray: 5 4; stroke-opacity: 1; } .base rect { fill: #f2e6c4; }
  @media (prefers-color-scheme: dark) { text { fill: #e6e9ec; } .top rect { fill: #2a3036; } .plan rect { fill: #3d3156; } .libtorch rect { fill: #55252f; } .engine rect { fill: #57371f; }
    .nn rect { fill: #1d4159; } .comm rect { fill: #1b4a3a; } .side rect { fill: #15181b; } .base rect { fill: #4a3f1c; } }
"""


def wrapped(text, width):
    """Lines of at most `width` characters."""
    lines = [""]
    for word in text.split():
        if lines[-1] and len(lines[-1]) + 1 + len(word) > width:
            lines.append("")
        lines[-1] += (" " if lines[-1] else "") + word
    return lines


def picture():
    height = 5 * (ROW + GAP) + GAP
    unit = (WIDTH - GAP) / 12
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
             f'aria-label="Tessera\'s folders: each box uses what lies below it">', f"<style>{STYLE}</style>"]
    for x, width, row, kind, name, what, *rows in BOXES:
        left, top, wide = GAP + x * unit, GAP + row * (ROW + GAP), width * unit - GAP
        tall = (ROW + GAP) * (rows or [1])[0] - GAP
        lines = wrapped(what, int(wide / 6.6))
        first = top + tall / 2 - 9 * (len(lines) - 1)
        parts.append(f'<g class="{kind}"><rect x="{left:.0f}" y="{top:.0f}" width="{wide:.0f}" height="{tall}" rx="6"/>'
                     f'<text class="name" x="{left + 14:.0f}" y="{first - 4:.0f}">{name}</text>')
        parts += [f'<text class="what" x="{left + 14:.0f}" y="{first + 16 + 17 * i:.0f}">{line}</text>' for i, line in enumerate(lines)]
        parts.append("</g>")
    parts.append("</svg>\n")
    return "\n".join(parts)


if sys.argv[1:] == ["--check"]:
    raise SystemExit(0 if TARGET.read_text() == picture() else f"{TARGET} is old: run docs/layers.py")
TARGET.write_text(picture())
