#!/usr/bin/env python3
"""The tables of README.md beside it: table.py RUNS [POINTS.csv], from RUNS/*/log.jsonl. Fits E + A / N^a + B / D^b, by
least squares, to each model's loss at each number of tokens: the mean over the seeds of the recipe that most seeds have,
and of several such the lowest. N: weights in layers, D: bytes of text. Writes these losses to a file, if one is named,
which dev/figures/figures.py draws."""
import csv
import itertools
import json
import sys
from collections import defaultdict
from pathlib import Path


def read(log):
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    run = lines[0]["run"]
    losses = [line["val_loss"] for line in lines if line.get("step") == run["steps"] and "val_loss" in line]
    if not losses:
        return None  # not finished
    return run | {"loss": losses[-1], "D": run["steps"] * run["total_batch"],
                  "N": 12 * run["num_layers"] * run["channels"] ** 2}


def fit(points):
    """(squared error, E, a, b, A, B): the exponents and E by a grid, A and B solved for."""
    best = None
    for e, a, b in itertools.product([i / 50 for i in range(15, 48)], [i / 50 for i in range(8, 40)],
                                     [i / 50 for i in range(8, 50)]):
        rows = [(p["N"] ** -a, p["D"] ** -b, p["loss"] - e) for p in points]
        uu, uv, vv = (sum(x * y for x, y in z) for z in
                      ([(u, u) for u, _, _ in rows], [(u, v) for u, v, _ in rows], [(v, v) for _, v, _ in rows]))
        uy, vy = sum(u * y for u, _, y in rows), sum(v * y for _, v, y in rows)
        A, B = (uy * vv - vy * uv) / (uu * vv - uv * uv), (vy * uu - uy * uv) / (uu * vv - uv * uv)
        error = sum((A * u + B * v - y) ** 2 for u, v, y in rows)
        if A > 0 and B > 0 and (best is None or error < best[0]):
            best = error, e, a, b, A, B
    return best


def main():
    runs = [run for run in map(read, Path(sys.argv[1]).glob("*/log.jsonl")) if run]
    recipes = defaultdict(list)
    for run in runs:
        if run["wiring"].endswith(" rope") and run["max_seq_len"] == 256:
            size = run["N"], round(run["D"] / 1e5)
            recipes[size, run["wiring"], run["learning_rate"], run["total_batch"]].append(run)
    points = {}
    for (size, *_), seeds in recipes.items():
        point = seeds[0] | {"loss": sum(r["loss"] for r in seeds) / len(seeds), "seeds": seeds}
        points[size] = min(points.get(size, point), point, key=lambda p: (-len(p["seeds"]), p["loss"]))
    if len(sys.argv) > 2:
        with open(sys.argv[2], "w", encoding="utf-8", newline="") as file:
            out = csv.writer(file, lineterminator="\n")
            out.writerow(["model", "flops", "loss"])
            out.writerows([f"{p['num_layers']} x {p['channels']}", f"{p['D'] * p['flops_per_token']:.3e}",
                           f"{p['loss']:.4f}"] for _, p in sorted(points.items()))
    error, e, a, b, A, B = fit(list(points.values()))
    print("| layers | channels | wiring | context | tokens per update | rate | seed | tokens | FLOPs | loss | fitted |")
    print("| --: | --: | --- | --: | --: | --: | --: | --: | --: | --: | --: |")
    fitted_to = [run for point in points.values() for run in point["seeds"]]
    for r in sorted(runs, key=lambda r: (r["N"], r["D"], r["loss"])):
        fitted = f"{e + A / r['N'] ** a + B / r['D'] ** b:.3f}" if r in fitted_to else ""
        print(f"| {r['num_layers']} | {r['channels']} | `{r['wiring']}` | {r['max_seq_len']} | {r['total_batch']:,} |"
              f" {r['learning_rate']:.2g} | {r['seed']} | {r['D'] / 1e6:.2f} M |"
              f" {r['D'] * r['flops_per_token']:.1e} | {r['loss']:.3f} | {fitted} |")
    print(f"\nE = {e:.2f}; A = {A:.4g}; a = {a:.2f}; B = {B:.4g}; b = {b:.2f};"
          f" {(error / len(points)) ** 0.5:.3f} nats off (root mean square over {len(points)} points)")


main()
