#!/usr/bin/env python3
"""From logs.tar.xz the two tables of README.md that ./report draws as charts, in nats per byte: losses by position, and
the training losses of the second wiring less the first wiring's. Takes no options."""
import json
import os
import re
import sys
import tarfile

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "sla"))
from differences import by_position, row  # noqa: E402

BANDS = [(1, 16), (17, 64), (65, 256), (257, 1024), (1025, 2048), (2049, 4096)]  # positions, first and last
UPDATES = [200, 300, 400, 500, 700, 1000, 1500, 2000, 3500]  # of each the mean of the 100 training losses up to it


def mean(values):
    return sum(values) / len(values)


def while_training(text):
    """{update: mean of the training losses} of the updates that the run has."""
    losses = {line["step"]: line["loss"] for line in map(json.loads, text.splitlines()) if "loss" in line}
    return {n: mean([losses[i] for i in range(n - 99, n + 1)]) for n in UPDATES if n in losses}


positions, training = {}, {}  # {(T, regime): {wiring: {seed: ...}}}
with tarfile.open(os.path.join(HERE, "logs.tar.xz")) as archive:
    for member in archive:
        name = re.fullmatch(r"\./T(\d+)-(.*)/(.*)-(\d+)/(log.jsonl|positions.csv)", member.name)
        if name is None:
            continue
        T, regime, wiring, seed, file = name.groups()
        text = archive.extractfile(member).read().decode()
        table, found = ((positions, by_position(text, BANDS)) if file == "positions.csv" else
                        (training, while_training(text)))
        table.setdefault((int(T), regime), {}).setdefault(wiring, {})[seed] = found

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
