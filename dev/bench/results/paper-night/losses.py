#!/usr/bin/env python3
"""The tables of README.md from logs.tar.xz: final validation losses, losses by position, and how far the second wiring
is from the first while they train, in nats a byte.

    losses.py [folder]      of the archive beside it, or of a folder of runs as runs/paper-night

Differences are those of runs of the same seed, with their 95 % interval where there are several seeds."""
import csv
import io
import json
import os
import re
import sys
import tarfile

UPDATES = [200, 300, 400, 500, 700, 1000, 1500, 2000, 3500]  # training losses: the mean of the 100 up to there
BANDS = [(1, 16), (17, 64), (65, 256), (257, 1024), (1025, 2048), (2049, 4096)]
T_95 = {2: 12.706, 3: 4.303}  # Student's t, two-sided 95 %, by number of seeds


def files():
    """(name, text) of each log and each table of losses by position."""
    if len(sys.argv) > 1:
        for folder, _, names in os.walk(sys.argv[1]):
            for name in {"log.jsonl", "positions.csv"}.intersection(names):
                path = os.path.join(folder, name)
                with open(path, encoding="utf-8") as file:
                    yield os.path.relpath(path, sys.argv[1]), file.read()
        return
    here = os.path.dirname(os.path.abspath(__file__))
    with tarfile.open(os.path.join(here, "logs.tar.xz")) as archive:
        for member in archive:
            if member.name.endswith(("log.jsonl", "positions.csv")):
                yield os.path.normpath(member.name), archive.extractfile(member).read().decode()


def by_position(text):
    rows = [(int(r["position"]), int(r["tokens"]), float(r["loss"])) for r in csv.DictReader(io.StringIO(text))]
    means = []
    for first, last in BANDS:
        of_band = [(tokens, loss) for position, tokens, loss in rows if first <= position <= last]
        if of_band:
            means.append(sum(n * loss for n, loss in of_band) / sum(n for n, _ in of_band))
    return means


def mean(values):
    return sum(values) / len(values)


def difference(of_run, of_first):
    """of_run, of_first: {seed: loss}."""
    each = [of_run[seed] - of_first[seed] for seed in sorted(of_run.keys() & of_first.keys())]
    if len(each) < 2:
        return f"{each[0]:+.4f}" if each else ""
    deviation = (sum((x - mean(each)) ** 2 for x in each) / (len(each) - 1)) ** 0.5
    return f"{mean(each):+.4f} +- {T_95[len(each)] * deviation / len(each) ** 0.5:.4f}"


def main():
    losses, positions, training = {}, {}, {}  # {(T, regime): {wiring: {seed: ...}}}
    for name, text in files():
        T, regime, wiring, seed, file = re.fullmatch(r"T(\d+)-(.*)/(.*)-(\d+)/(.*)", name).groups()
        of_wiring = lambda table: table.setdefault((int(T), regime), {}).setdefault(wiring, {})
        if file == "positions.csv":
            of_wiring(positions)[int(seed)] = by_position(text)
            continue
        lines = [json.loads(line) for line in text.splitlines()]
        updates = {line["step"]: line["loss"] for line in lines if "loss" in line}
        validations = [line for line in lines if "val_loss" in line]
        if not updates or validations[-1]["step"] < max(updates):  # the run goes on
            continue
        of_wiring(losses)[int(seed)] = validations[-1]["val_loss"]
        of_wiring(training)[int(seed)] = {
            n: mean([updates[i] for i in range(n - 99, n + 1)]) for n in UPDATES if n in updates}
    wirings = sorted({wiring for of_regime in losses.values() for wiring in of_regime})
    print(f"| T | regime | seeds | {' | '.join(wirings)} | difference |\n| --: | --- | --: |" + " --: |" * 3)
    for (T, regime), of_regime in sorted(losses.items()):
        first, other = (of_regime.get(wiring, {}) for wiring in wirings)
        cells = [", ".join(f"{loss:.4f}" for _, loss in sorted(of_seed.items())) for of_seed in (first, other)]
        print(f"| {T:,} | {regime} | {len(first)} | {' | '.join(cells)} | {difference(other, first)} |")
    names = [f"{first:,}-{last:,}" for first, last in BANDS]
    print(f"\n| T | regime | wiring | {' | '.join(names)} |\n| --: | --- | --- |" + " --: |" * len(BANDS))
    for (T, regime), of_regime in sorted(positions.items()):
        for wiring, of_seed in sorted(of_regime.items()):
            cells = [f"{mean(band):.4f}" for band in zip(*of_seed.values())]
            cells += [""] * (len(BANDS) - len(cells))
            print(f"| {T:,} | {regime} | {wiring} | {' | '.join(cells)} |")

    print(f"\n| T | regime | {' | '.join(f'{n:,}' for n in UPDATES)} |\n| --: | --- |" + " --: |" * len(UPDATES))
    for (T, regime), of_regime in sorted(training.items()):
        first, other = (of_regime.get(wiring, {}) for wiring in wirings)
        cells = []
        for n in UPDATES:
            each = [other[seed][n] - first[seed][n] for seed in first.keys() & other.keys() if n in first[seed]]
            cells.append(f"{mean(each):+.3f}" if each else "")
        print(f"| {T:,} | {regime} | {' | '.join(cells)} |")


main()
