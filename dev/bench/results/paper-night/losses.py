#!/usr/bin/env python3
"""From logs.tar.xz the two tables of README.md that ./report draws as charts, in nats a byte: losses by position, and
the training losses of the second wiring less the first wiring's. Takes no options."""
import csv
import io
import json
import os
import re
import tarfile

BANDS = [(1, 16), (17, 64), (65, 256), (257, 1024), (1025, 2048), (2049, 4096)]  # positions, first and last
UPDATES = [200, 300, 400, 500, 700, 1000, 1500, 2000, 3500]  # of each the mean of the 100 training losses up to it


def mean(values):
    return sum(values) / len(values)


def by_position(text):
    """The mean loss of each band that the run's context has."""
    rows = [(int(row["position"]), int(row["tokens"]), float(row["loss"])) for row in csv.DictReader(io.StringIO(text))]
    means = []
    for first, last in BANDS:
        of_band = [(tokens, loss) for position, tokens, loss in rows if first <= position <= last]
        if of_band:
            means.append(sum(tokens * loss for tokens, loss in of_band) / sum(tokens for tokens, _ in of_band))
    return means


def while_training(text):
    """{update: mean of the training losses} of the updates that the run has."""
    losses = {line["step"]: line["loss"] for line in map(json.loads, text.splitlines()) if "loss" in line}
    return {n: mean([losses[i] for i in range(n - 99, n + 1)]) for n in UPDATES if n in losses}


def row(*cells):
    print("| " + " | ".join(cells) + " |")


positions, training = {}, {}  # {(T, regime): {wiring: {seed: ...}}}
here = os.path.dirname(os.path.abspath(__file__))
with tarfile.open(os.path.join(here, "logs.tar.xz")) as archive:
    for member in archive:
        name = re.fullmatch(r"\./T(\d+)-(.*)/(.*)-(\d+)/(log.jsonl|positions.csv)", member.name)
        if name is None:
            continue
        T, regime, wiring, seed, file = name.groups()
        table, read = (positions, by_position) if file == "positions.csv" else (training, while_training)
        of_wiring = table.setdefault((int(T), regime), {}).setdefault(wiring, {})
        of_wiring[seed] = read(archive.extractfile(member).read().decode())

row("T", "regime", "wiring", *(f"{first:,}-{last:,}" for first, last in BANDS))
row("--:", "---", "---", *["--:"] * len(BANDS))
for (T, regime), wirings in sorted(positions.items()):
    for wiring, of_seed in sorted(wirings.items()):
        means = [f"{mean(band):.4f}" for band in zip(*of_seed.values())]
        row(f"{T:,}", regime, wiring, *means, *[""] * (len(BANDS) - len(means)))
print()
row("T", "regime", *(f"{n:,}" for n in UPDATES))
row("--:", "---", *["--:"] * len(UPDATES))
for (T, regime), wirings in sorted(training.items()):
    first, second = (of_seed for _, of_seed in sorted(wirings.items()))
    differences = {n: mean([second[seed][n] - first[seed][n] for seed in first]) for n in UPDATES if n in first["1"]}
    row(f"{T:,}", regime, *(f"{differences[n]:+.3f}" if n in differences else "" for n in UPDATES))
