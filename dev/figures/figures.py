#!/usr/bin/env python3
"""Writes the pictures of the READMEs beside itself: wiring.svg; router.svg from router.csv in
dev/bench/results/layer-sources, the weights of a router; probe.svg from the logs of
`make probe` in dev/bench/results/probe; frontier.svg and ladder.svg from points.csv in dev/bench/results/frontier and
ladder.

    dev/figures/figures.py

Needs Python 3 alone. The pictures are 440 units wide, because the README shows two side by side, and have a background
of their own and colours for light and dark mode.
"""
import csv
import json
import math
import os
import re
import tarfile

HERE = os.path.dirname(os.path.abspath(__file__))
PROBE = os.path.join(HERE, "..", "bench", "results", "probe", "logs.tar.xz")
FRONTIER = os.path.join(HERE, "..", "bench", "results", "frontier", "points.csv")
LADDER = os.path.join(HERE, "..", "bench", "results", "ladder", "points.csv")
ROUTER = os.path.join(HERE, "..", "bench", "results", "layer-sources", "router.csv")
WIDTH, HEIGHT = 440, 400
STYLE = """
  .page { fill: #ffffff; stroke: #d0d7de }
  text { font: 12px system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; fill: #1f2328 }
  .title { font-size: 14px; font-weight: 600 }
  .quiet { fill: #59636e }
  .in { font-size: 11px; text-anchor: middle; fill: #1f2328 }
  .grid { stroke: #d0d7de; stroke-width: 1 }
  .own { fill: #e4e8ec; stroke: #afb8c1 }
  .a { color: #0969da } .b { color: #bc4c00 } .c { color: #8250df }
  .source { fill: currentColor; stroke: currentColor } .source + text { fill: #ffffff; font-weight: 600 }
  .dead { fill: none; stroke: currentColor; stroke-width: 1.5; stroke-dasharray: 3 2 }
  .dead + text { fill: currentColor; font-weight: 600 }
  .arrow { fill: none; stroke: currentColor; stroke-width: 2 } .head { fill: currentColor }
  .line { fill: none; stroke: #59636e; stroke-width: 1.5; stroke-dasharray: 4 3 }
  .cell { fill: currentColor } .tick { font-size: 11px } .right { font-size: 11px; fill: #ffffff }
  @media (prefers-color-scheme: dark) {
    .page { fill: #0d1117; stroke: #3d444d } text, .in { fill: #f0f6fc } .quiet { fill: #9198a1 }
    .grid { stroke: #2f353d } .line { stroke: #9198a1 } .own { fill: #262c36; stroke: #4d555f }
    .a { color: #4493f8 } .b { color: #f0883e } .c { color: #ab7df8 }
    .source + text, .right { fill: #0d1117 } .dead + text { fill: currentColor }
  }
"""


def text(x, y, words, css="", anchor="start"):
    return f'<text x="{x:g}" y="{y:g}" class="{css}" text-anchor="{anchor}">{words}</text>'


def write_svg(name, described, parts):
    with open(os.path.join(HERE, name), "w", encoding="utf-8") as file:
        file.write(f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
                   f'height="{HEIGHT}" role="img">\n'
                   f"<title>{described}</title>\n<style>{STYLE}</style>\n"
                   f'<rect x=".5" y=".5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="8" class="page"/>\n')
        file.write("\n".join(parts) + "\n</svg>\n")


def wiring(layers=12, heads=12, skip_layers=9, skip_heads=9):
    """A cell is a head, its number the layer whose K/V it attends to; layer 0 is at the bottom, as in the paper."""
    cell, gap, left, top = 21, 3, 62, 54
    step = cell + gap
    y_of = lambda layer: top + (layers - 1 - layer) * step
    parts = [text(16, 26, f"sla({skip_layers}, {skip_heads}): whose K/V each head attends to", "title"),
             text(left + heads * step / 2, 45, "heads 0 to 11", "quiet", "middle")]
    for layer in range(layers):
        parts.append(text(left - 8, y_of(layer) + 15, f"layer {layer}", "quiet", "end"))
        for head in range(heads):
            skips = head >= heads - skip_heads
            source = layer - skip_layers if skips and layer >= skip_layers else layer
            is_shared = skips and layer + skip_layers < layers
            kind = "dead" if source != layer else "source" if is_shared else "own"
            x, colour = left + head * step, "" if kind == "own" else "abc"[source % 3]
            parts.append(f'<g class="{colour}"><rect x="{x}" y="{y_of(layer)}" width="{cell}" height="{cell}" rx="3" '
                         f'class="{kind}"/>' + text(x + cell / 2, y_of(layer) + 15, source, "in", "middle") + "</g>")
    right = left + heads * step + 2
    for source in range(layers - skip_layers):
        start, end, bend = y_of(source) + cell / 2, y_of(source + skip_layers) + cell / 2, right + 18 + 13 * source
        parts.append(f'<g class="{"abc"[source % 3]}"><path d="M{right} {start} H{bend - 8} Q{bend} {start} {bend} '
                     f'{start - 8} V{end + 8} Q{bend} {end} {bend - 8} {end} H{right + 7}" class="arrow"/>'
                     f'<path d="M{right} {end} l8 -5 v10 z" class="head"/></g>')
    parts.append(text(right + 58, top + layers * step / 2, "K/V", "quiet", "middle"))
    dead = skip_heads * (layers - skip_layers)
    for row, (kind, words) in enumerate([("own", "attends to the K/V that it projects itself"),
                                         ("source", f"likewise; a head {skip_layers} layers above attends to it too"),
                                         ("dead", f"attends to a layer below; projects no K/V ({dead} heads)")]):
        y = top + layers * step + 8 + row * 16
        parts.append(f'<g class="a"><rect x="16" y="{y}" width="11" height="11" rx="2" class="{kind}"/></g>'
                     + text(34, y + 10, words))
    write_svg("wiring.svg", f"A grid of {layers} layers by {heads} heads. In layers {skip_layers} and above the last "
              f"{skip_heads} heads attend to the keys and values of the layer {skip_layers} below.", parts)


def read_router():
    """{(layer, head): {source layer: share}}: shares are of the sum of a head's weights without their signs, over all
    K/V heads of the source layer. Layer 0 has no other source than itself."""
    weights = {}
    with open(ROUTER, encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if row["term"] == "router":
                of_head = weights.setdefault((int(row["layer"]), int(row["head"])), {})
                source = int(row["source"])
                of_head[source] = of_head.get(source, 0) + abs(float(row["weight"]))
    shares = {at: {s: w / sum(of_head.values()) for s, w in of_head.items()} for at, of_head in weights.items()}
    heads = 1 + max(head for _, head in shares)
    return {**{(0, head): {0: 1.0} for head in range(heads)}, **shares}, heads


def router():
    """A cell is the share of a layer's K/V that comes from a source layer, mean over its heads, in percent; beside each
    row stands how many of its heads take most from another layer."""
    shares, heads = read_router()
    layers = 1 + max(layer for layer, _ in shares)
    cell, gap, left, top = 36, 3, 62, 70
    step = cell + gap
    y_of = lambda layer: top + (layers - 1 - layer) * step
    parts = [text(16, 26, "router: whose K/V each layer has learned to use", "title"),
             text(left + layers * step / 2, 60, "share of each layer's K/V, percent", "quiet", "middle"),
             text(left + layers * step + 6, 46, "heads", "quiet"),
             text(left + layers * step + 6, 60, "that skip", "quiet")]
    for layer in range(layers):
        parts.append(text(left - 8, y_of(layer) + 23, f"layer {layer}", "quiet", "end"))
        of_heads = [shares[layer, head] for head in range(heads)]
        for source in range(layer + 1):
            share = sum(of_head[source] for of_head in of_heads) / heads
            x, colour = left + source * step, "a" if source == layer else "b"
            parts.append(f'<g class="{colour}"><rect x="{x}" y="{y_of(layer)}" width="{cell}" height="{cell}" rx="3" '
                         f'class="cell" opacity="{0.06 + 0.94 * share:.2f}"/></g>'
                         + text(x + cell / 2, y_of(layer) + 22, f"{100 * share:.0f}", "right" if share > 0.55 else "in",
                                "middle"))
        skipping = sum(max(of_head, key=of_head.get) != layer for of_head in of_heads)
        parts.append(text(left + layers * step + 6, y_of(layer) + 23, f"{skipping} of {heads}"))
    for source in range(layers):
        parts.append(text(left + source * step + cell / 2, y_of(0) + cell + 14, f"of {source}", "tick", "middle"))
    write_svg("router.svg", "A triangle of layers by source layers: the share of each layer's keys and values that "
              "comes from each layer below or from itself.", parts)


def read_probe():
    """The sections of the probes' outline: (task, accuracy of a guess, {wiring: accuracies after the last update})."""
    sections = []
    with tarfile.open(PROBE) as archive:
        read = lambda name: archive.extractfile(name).read().decode().splitlines()
        for line in read("outline.txt"):
            if line.startswith("# "):
                sections.append((line[2:], [], {}))
            elif line.startswith("chance "):
                sections[-1][1].append(float(line[7:]))
            elif line.startswith("run "):
                log = [json.loads(entry) for entry in read("/".join(line.split("/")[-2:]) + "/log.jsonl")]
                accuracies = [entry["val_accuracy"] for entry in log if "val_accuracy" in entry]
                sections[-1][2].setdefault(log[0]["run"]["wiring"], []).append(accuracies[-1])
    return [(task, chance[0], runs) for task, chance, runs in sections if runs]


def probe():
    """A cell is the mean accuracy of a wiring in a task, in percent; the darker, the more answers are right."""
    sections = read_probe()
    order = ["plain", "rope", "sla(2,2)", "gqa(2)", "window(4)", "lsh(4,2)"]
    wirings = sorted({wiring for _, _, runs in sections for wiring in runs},
                     key=lambda w: (order.index(w) if w in order else len(order), w))
    left, top, bottom = 74, 196, 52
    width, height = (WIDTH - left - 66) / len(sections), (HEIGHT - top - bottom) / (len(wirings) + 1)
    parts = [text(16, 26, "What a wiring can look up", "title"),
             text(16, 44, "right answers, percent, after 1,000 updates", "quiet")]
    mean = lambda values: sum(values) / len(values)
    for column, (task, chance, runs) in enumerate(sections):
        x = left + column * width
        words = re.sub(r" *(--symbols|-t|-x) +\d+", "", task).replace("--distance", "at").replace(" --", " ")
        parts.append(f'<g transform="translate({x + width / 2 + 4:.1f} {top - 8}) rotate(-64)">'
                     + text(0, 0, words, "tick") + "</g>")
        for row, wiring in enumerate(wirings + ["chance"]):
            values = [chance] if wiring == "chance" else runs.get(wiring, [])
            y = top + row * height + (6 if wiring == "chance" else 0)
            share = mean(values) if values else 0
            parts.append(f'<g class="a"><rect x="{x + 1:.1f}" y="{y + 1:.1f}" width="{width - 2:.1f}" '
                         f'height="{height - 2:.1f}" rx="2" class="cell" opacity="{0.06 + 0.94 * share ** 2:.2f}"/></g>'
                         + text(x + width / 2, y + height / 2 + 4, f"{100 * share:.0f}" if values else "-",
                                "right" if share > 0.7 else "in", "middle"))
    for row, wiring in enumerate(wirings + ["chance"]):
        y = top + row * height + (6 if wiring == "chance" else 0)
        parts.append(text(left - 6, y + height / 2 + 4, wiring, "quiet" if wiring == "chance" else "", "end"))
    parts.append(text(16, HEIGHT - 18, "Chance: any answer in the context", "quiet"))
    write_svg("probe.svg", "A map of wirings and tasks: the percentage of right answers of each after 1,000 updates.",
              parts)


def hull(points):
    """Of points (x, y) in the order of x those below which no line between two others lies, up to the lowest."""
    lower = []
    for x, y in points:
        while len(lower) > 1 and ((lower[-1][0] - lower[-2][0]) * (y - lower[-2][1])
                                  <= (lower[-1][1] - lower[-2][1]) * (x - lower[-2][0])):
            lower.pop()
        lower.append((x, y))
    return lower[:1 + min(range(len(lower)), key=lambda i: lower[i][1])]


def grid(ticks, y_of, left, right):
    """Lines at the heights y_of(tick), with the ticks left of them."""
    return [f'<path d="M{left} {y_of(tick):.1f} H{WIDTH - right}" class="grid"/>'
            + text(left - 6, y_of(tick) + 4, f"{tick:.2f}", "tick", "end") for tick in ticks]


def frontier():
    """A point is a wiring: what it loses against plain, with the 95 % interval of pairs, over its share of the K/V."""
    with open(FRONTIER, encoding="utf-8", newline="") as file:
        rows = [(row["wiring"], float(row["kv_of_plain"]), float(row["less_plain"]), float(row["half"]))
                for row in csv.DictReader(file)]
    rows = [row for row in rows if "route" not in row[0]]
    left, top, bottom, right = 52, 66, 52, 20
    low, high = -0.03, max(y + half for _, _, y, half in rows)
    first, last = math.log2(1 / 16), 0.0
    x_of = lambda share: left + (WIDTH - left - right) * (math.log2(share) - first) / (last - first)
    y_of = lambda y: HEIGHT - bottom - (HEIGHT - top - bottom) * (y - low) / (high - low)
    parts = [text(16, 26, "What a smaller K/V cache costs", "title"),
             text(16, 44, "bits per byte above plain, 95 % intervals of pairs", "quiet")]
    parts += grid([0.05 * tick for tick in range(0, int(high / 0.05) + 1)], y_of, left, right)
    for share in (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1):
        parts.append(text(x_of(share), HEIGHT - bottom + 18, f"{100 * share:g} %", "tick", "middle"))
    parts.append(text((left + WIDTH - right) / 2, HEIGHT - 14, "K/V cache of a text, of plain's", "quiet", "middle"))
    below = hull(sorted((x_of(share), -y_of(y)) for _, share, y, _ in rows))
    parts.append('<path d="M' + " L".join(f"{x:.1f} {-y:.1f}" for x, y in below) + '" class="line"/>')
    for name, share, y, half in rows:
        x, colour = x_of(share), "a" if "sla" in name else "b" if "window" in name else "c"
        parts.append(f'<g class="{colour}"><path d="M{x:.1f} {y_of(y - half):.1f} V{y_of(y + half):.1f}" '
                     f'stroke="currentColor"/><circle cx="{x:.1f}" cy="{y_of(y):.1f}" r="3.5" class="cell"/></g>')
        if (x, -y_of(y)) in below:
            anchor = "end" if share > 0.8 else "start"
            parts.append(text(x + 4 * (anchor == "end"), y_of(y) + 15, name, "tick", anchor))
        elif name in ("share(8)", "share(4)", "gqa(1)", "gqa(2)", "gqa(1) share(2)"):
            parts.append(text(x + 6, y_of(y) + 4, name, "tick"))
    for i, (colour, words) in enumerate(zip("abc", ("with sla", "windows, no sla", "neither"))):
        parts.append(f'<g class="{colour}"><circle cx="{WIDTH - 150}" cy="{top + 16 * i}" r="3.5" class="cell"/></g>'
                     + text(WIDTH - 140, top + 4 + 16 * i, words))
    write_svg("frontier.svg", "Wirings by their share of plain GPT-2's K/V cache and what they lose in bits per byte.",
              parts)


def ladder():
    """A line is a model: its loss after more and more FLOPs, each time the mean over a recipe's seeds."""
    models = {}
    with open(LADDER, encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            models.setdefault(row["model"], []).append((math.log10(float(row["flops"])), float(row["loss"])))
    left, top, bottom, right = 52, 66, 52, 66
    ends = [end for of_model in models.values() for end in of_model]
    (first, last), (low, high) = ((min(of), max(of)) for of in zip(*ends))
    x_of = lambda x: left + 8 + (WIDTH - left - right - 8) * (x - first) / (last - first)
    y_of = lambda y: HEIGHT - bottom - 8 - (HEIGHT - top - bottom - 8) * (y - low) / (high - low)
    parts = [text(16, 26, "Which model for how many FLOPs", "title"),
             text(16, 44, "nats per byte after training, layers x channels", "quiet")]
    parts += grid([tick / 10 for tick in range(math.ceil(10 * low), int(10 * high) + 1)], y_of, left, right)
    for power in range(math.ceil(first), int(last) + 1):
        parts.append(text(x_of(power), HEIGHT - bottom + 18, f"1e{power}", "tick", "middle"))
    parts.append(text((left + WIDTH - right) / 2, HEIGHT - 14, "FLOPs of the model", "quiet", "middle"))
    names = []
    for i, (name, of_model) in enumerate(models.items()):
        of_model = [(x_of(x), y_of(y)) for x, y in sorted(of_model)]
        points = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" class="cell"/>' for x, y in of_model)
        line = " L".join(f"{x:.1f} {y:.1f}" for x, y in of_model)
        parts.append(f'<g class="{"abc"[i % 3]}"><path d="M{line}" fill="none" stroke="currentColor"/>{points}</g>')
        names.append((*of_model[-1], name))
    y = HEIGHT
    for x, end, name in sorted(names, key=lambda n: -n[1]):  # from below: a name is above the one before
        y = min(end + 4, y - 12)
        parts.append(text(x + 7, y, name, "tick"))
    write_svg("ladder.svg", "Models of several sizes by the FLOPs that trained them and their loss.", parts)


wiring()
router()
probe()
frontier()
ladder()
