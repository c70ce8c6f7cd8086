#!/usr/bin/env python3
"""Draws lengths.svg beside itself from the table of lengths in README.md: the time of a forward and backward pass, and
the memory at its peak, against the length of the sequence, both in powers of ten and of two.

    dev/bench/results/reformer/lengths.py

Needs Python 3 alone.
"""
import math
import os

HERE = os.path.dirname(os.path.abspath(__file__))
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 900, 420, 60, 160, 60, 50
COLOURS = {"plain": "#57606a", "window": "#0969da", "strided": "#1a7f37", "topk": "#bc4c00", "lsh": "#8250df"}
STYLE = """text { font: 12px system-ui, sans-serif; fill: #57606a } .title { font-weight: 600 }
  .page { fill: #ffffff } .grid { stroke: #d0d7de } polyline { fill: none; stroke-width: 2 }
  @media (prefers-color-scheme: dark) { .page { fill: #0d1117 } text { fill: #9198a1 } .grid { stroke: #2f353d } }"""
BYTES = {"MB": 1e6, "GB": 1e9}


def rows():
    """(T, wiring, seconds, bytes at the peak) of each line."""
    with open(os.path.join(HERE, "README.md"), encoding="utf-8") as file:
        for line in file:
            cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
            if len(cells) == 7 and cells[0].isdigit():
                number, unit = cells[5].split()
                yield int(cells[0]), cells[1], float(cells[2]) / 1e3, float(number) * BYTES[unit]


def curves(column):
    """The points of each wiring, whose number of buckets follows from T."""
    curve = {}
    for row in rows():
        name = "reversible " * row[1].startswith("reversible") + row[1].replace("reversible", "").split("(")[0].strip()
        curve.setdefault(name.strip(), []).append((row[0], row[column]))
    return curve


def panel(x, width, title, curve, unit):
    lengths = sorted({T for points in curve.values() for T, _ in points})
    values = [value for points in curve.values() for _, value in points]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    x_of = lambda T: x + width * (math.log2(T / lengths[0]) / max(1, math.log2(lengths[-1] / lengths[0])))
    y_of = lambda value: HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (math.log10(value) - low) / (high - low)
    parts = [f'<text x="{x}" y="30" class="title">{title}</text>']
    for power in range(low, high + 1):
        y = y_of(10 ** power)
        parts.append(f'<path d="M{x} {y:.1f} h{width}" class="grid"/><text x="{x - 6}" y="{y + 4:.1f}" '
                     f'text-anchor="end">{unit(10 ** power)}</text>')
    for T in lengths:
        parts.append(f'<text x="{x_of(T):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{T:,}</text>')
    for name, points in curve.items():
        kind = name.replace("reversible", "").strip() or "plain"
        dashes = ' stroke-dasharray="5 4"' if name.startswith("reversible") else ""
        line = " ".join(f"{x_of(T):.1f},{y_of(value):.1f}" for T, value in points)
        parts.append(f'<polyline points="{line}" stroke="{COLOURS[kind]}"{dashes}/>')
    return parts


def main():
    width = (WIDTH - 2 * LEFT - RIGHT) / 2
    parts = panel(LEFT, width, "forward + backward, s", curves(2), lambda v: f"{v:g}")
    parts += panel(2 * LEFT + width, width, "memory at its peak, GB", curves(3), lambda v: f"{v / 1e9:g}")
    for i, (kind, colour) in enumerate(COLOURS.items()):
        parts.append(f'<path d="M{WIDTH - RIGHT + 16} {TOP + 20 * i} h24" stroke="{colour}" stroke-width="2"/>'
                     f'<text x="{WIDTH - RIGHT + 48}" y="{TOP + 4 + 20 * i}">{kind}</text>')
    parts.append(f'<text x="{WIDTH - RIGHT + 16}" y="{TOP + 4 + 20 * len(COLOURS)}">dashed: reversible</text>'
                 f'<text x="{LEFT + width / 2}" y="{HEIGHT - 8}" text-anchor="middle">tokens in the sequence</text>')
    with open(os.path.join(HERE, "lengths.svg"), "w", encoding="utf-8") as file:
        file.write(f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
                   f'height="{HEIGHT}" role="img">\n<title>Time and memory of a pass against the length of the '
                   f'sequence</title>\n<style>{STYLE}</style>\n<rect width="{WIDTH}" height="{HEIGHT}" '
                   f'class="page"/>\n' + "\n".join(parts) + "\n</svg>\n")


main()
