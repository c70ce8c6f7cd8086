#!/usr/bin/env python3
"""Writes the README's two pictures beside itself: wiring.svg, and losses.svg from sla.jsonl and baseline.jsonl, which
train.sh made.

    dev/figures/figures.py

Needs Python 3 alone. Both pictures are 440 units wide, because the README shows them side by side, and have a
background of their own and colours for light and dark mode.
"""
import json
import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
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
  .val { fill: none; stroke: currentColor; stroke-width: 2 }
  .train { fill: none; stroke: currentColor; stroke-width: 1; opacity: .4 }
  .quiet-line { color: #59636e }
  .dot { fill: currentColor } .name { fill: currentColor; font-weight: 600 }
  @media (prefers-color-scheme: dark) {
    .page { fill: #0d1117; stroke: #3d444d } text, .in { fill: #f0f6fc } .quiet { fill: #9198a1 }
    .grid { stroke: #2f353d } .own { fill: #262c36; stroke: #4d555f }
    .a { color: #4493f8 } .b { color: #f0883e } .c { color: #ab7df8 }
    .quiet-line { color: #9198a1 }
    .source + text { fill: #0d1117 } .dead + text, .name { fill: currentColor }
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


def read_log(name):
    """The steps and losses of validation and of training, and the run's settings."""
    path = os.path.join(HERE, name + ".jsonl")
    try:
        with open(path, encoding="utf-8") as file:
            lines = [json.loads(line) for line in file]
    except OSError as e:
        sys.exit(f"error: {path}: {e.strerror}; dev/figures/train.sh makes it")
    return ([(line["step"], line["val_loss"]) for line in lines if "val_loss" in line],
            [(line["step"], line["loss"]) for line in lines if "loss" in line], lines[0]["run"])


def smooth(points, count=20):
    """The mean of each point and the `count` - 1 before it."""
    return [(points[i][0], sum(loss for _, loss in points[max(0, i - count + 1):i + 1]) / min(i + 1, count))
            for i in range(len(points))]


def losses(low=1.6, high=2.8):
    """Both runs' validation losses and smoothed training losses, in nats a byte. Curves begin below `high`."""
    left, right, top, bottom = 44, WIDTH - 72, 78, HEIGHT - 40
    runs = [("b", "baseline", "baseline", read_log("baseline")), ("a", "sla", "SLA", read_log("sla"))]
    run = runs[1][3][2]
    last_step = run["steps"]
    x_of = lambda step: left + (right - left) * step / last_step
    y_of = lambda loss: bottom - (bottom - top) * (loss - low) / (high - low)
    line = lambda points: " ".join(f"{x_of(step):.1f},{y_of(loss):.1f}" for step, loss in points if loss <= high)
    parts = [text(16, 26, "The dictionary, byte by byte", "title"),
             text(16, 44, f'{run["num_layers"]} layers, {run["num_heads"]} heads, {run["channels"]} channels, '
                  f'T = {run["seq_len"]}; SLA: {run["wiring"]}', "quiet"),
             text(16, 66, "loss, nats a byte", "quiet")]
    ticks = round((high - low) / 0.2)
    for tick in range(ticks + 1):
        y = y_of(low + 0.2 * tick)
        parts += [f'<path d="M{left} {y:.1f} H{right}" class="grid"/>',
                  text(left - 7, y + 4, f"{low + 0.2 * tick:.1f}", "quiet", "end")]
    for step in range(0, last_step + 1, 500):
        parts.append(text(x_of(step), bottom + 17, f"{step:,}", "quiet", "middle"))
    parts.append(text((left + right) / 2, bottom + 33, "step", "quiet", "middle"))
    for colour, _, _, (val, train, _) in runs:
        parts.append(f'<g class="{colour}"><polyline points="{line(smooth(train))}" class="train"/></g>')
    ends = sorted((y_of(val[-1][1]), colour, name, val[-1][1]) for colour, _, name, (val, _, _) in runs)
    for colour, _, _, (val, _, _) in runs:
        dots = "".join(f'<circle cx="{x_of(s):.1f}" cy="{y_of(v):.1f}" r="3" class="dot"/>'
                       for s, v in val if v <= high)
        parts.append(f'<g class="{colour}"><polyline points="{line(val)}" class="val"/>{dots}</g>')
    middle = (ends[0][0] + ends[1][0]) / 2
    for index, (_, colour, name, value) in enumerate(ends):
        y = middle + (-17 if index == 0 else 15)
        parts.append(f'<g class="{colour}">' + text(right + 8, y, f"{value:.4f}", "name")
                     + text(right + 8, y + 13, name, "name") + "</g>")
    for x, css, words in [(right - 218, "val", "validation"), (right - 98, "train", "training, smoothed")]:
        parts.append(f'<path d="M{x} 62 h22" class="{css} quiet-line"/>' + text(x + 28, 66, words))
    write_svg("losses.svg", "Validation and training loss over the steps: "
              + ", ".join(f"{name} ends at {loss:.4f}" for _, _, name, loss in ends), parts)


wiring()
losses()
