#!/usr/bin/env python3
"""The numbers of README.md from the runs' logs: solved.py [runs/probe | logs.tar.xz], by default the archive beside it.
Tables in Markdown: the last accuracy of each seed, the update at which each was solved, and of the question the
differences to plain. The trainer writes the logs; nothing here is of ./report."""
import json
import math
import os
import re
import statistics
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../sla"))
from differences import files, holm, row, t_quantile, validations

SOLVED = 0.99  # a run has solved its task at its first validation with a higher accuracy
DELTA = 100  # updates between validations: no smaller difference is of interest
DECIDING = "head-start"  # the folder of the runs that decide; those beside it chose the tasks
QUESTIONS = {"among noise": "noisy_recall_pairs_8_noise_4_symbols_16_t_36_x_1200",
             "at a distance": "hops_pairs_4_hops_1_distance_20_symbols_16_t_38_x_600",
             "over two hops": "hops_pairs_6_hops_2_symbols_16_t_30_x_1500"}


def read(path):
    """({task: {wiring: {seed: [(update, accuracy)]}}}, the same of the runs that decide, {task: accuracy of a guess}),
    of runs that have done all updates."""
    runs, deciding, chance = {}, {}, {}
    for folder, name, text in files(path, ["log.jsonl", "MANIFEST.json"]):
        if name == "MANIFEST.json":
            chance[os.path.basename(folder)] = json.loads(text)["chance_in_context"]
            continue
        match = re.search(r"([^/]+)/[^/]+-(\d+)$", folder)
        description, points = validations(text, "val_accuracy")
        if match and description and description["steps"] in points:
            of_task = (deciding if DECIDING in folder.split("/") else runs).setdefault(match[1], {})
            of_task.setdefault(description["wiring"], {})[int(match[2])] = sorted(points.items())
    return runs, deciding, chance


def waited(points):
    """(update, True) of the first validation that shows the task solved, else (last update, False)."""
    return next(((update, True) for update, accuracy in points if accuracy > SOLVED), (points[-1][0], False))


def median(times):
    """Kaplan and Meier's: the first time by which the estimated share of unsolved runs is at most a half."""
    share = 1.0
    for time in sorted({t for t, is_solved in times if is_solved}):
        at_risk = sum(t >= time for t, _ in times)
        share *= 1 - times.count((time, True)) / at_risk
        if share <= 0.5 + 1e-9:
            return f"{time:,}"
    return f"> {max(t for t, _ in times):,}"


def scores(times):
    """Of each run whether it solved, less the risk that it had till then (Nelson and Aalen's, of all together): their
    sum over an arm is the log-rank test's observed less expected."""
    risk = {}
    for time in {t for t, is_solved in times if is_solved}:
        risk[time] = times.count((time, True)) / sum(t >= time for t, _ in times)
    return [is_solved - sum(r for time, r in risk.items() if time <= t) for t, is_solved in times]


def permutation_p(ours, others):
    """The share of all ways to draw as many runs as `ours` of both, in which the log-rank statistic is at least as far
    from 0."""
    of_run = [round(s, 9) for s in scores(ours + others)]
    ways = {(0, 0.0): 1}  # (runs drawn, sum of their scores): in how many ways
    for score in sorted(set(of_run)):
        n, more = of_run.count(score), {}
        for (drawn, total), count in ways.items():
            for k in range(min(n, len(ours) - drawn) + 1):
                key = drawn + k, round(total + k * score, 7)
                more[key] = more.get(key, 0) + count * math.comb(n, k)
        ways = more
    seen = abs(sum(of_run[:len(ours)]))
    far = sum(count for (drawn, total), count in ways.items() if drawn == len(ours) and abs(total) > seen - 1e-5)
    return far / math.comb(len(of_run), len(ours))


def interval(ours, others):
    """(difference of means, half of its 95 % interval by Welch, runs per arm that would show it in four of five
    experiments)."""
    difference = statistics.mean(ours) - statistics.mean(others)
    parts = [statistics.variance(values) / len(values) for values in (ours, others)]
    if sum(parts) == 0:
        return difference, 0.0, 0
    freedom = sum(parts) ** 2 / sum(p * p / (len(v) - 1) for p, v in zip(parts, (ours, others)))
    squares = statistics.variance(ours) + statistics.variance(others)
    needed = 7.85 * squares / difference ** 2 if difference else math.inf
    return difference, t_quantile(freedom) * math.sqrt(sum(parts)), needed


def said(difference, half, p, needed, runs):
    if p < 0.05:
        return "earlier" if difference < 0 else "later"
    if abs(difference) + half < DELTA:
        return f"the same within {DELTA} updates"
    if needed > 1000:
        return "not decided: over 1,000 seeds more"
    return f"not decided: {max(1, math.ceil(needed) - runs)} seeds more would, if it is as large as it looks"


def title(task):
    return re.sub(r" symbols 16| t (\d+)", lambda m: f", T {m[1]}" if m[1] else "", task.replace("_", " "))


def table(runs, wirings, heading, cell, chance=None):
    wirings = [w for w in wirings if any(w in of_task for of_task in runs.values())]
    print(f"\n{heading}\n")
    row("task", *(["chance"] if chance else []), *(f"`{w}`" for w in wirings))
    row("---", *(["--:"] if chance else []), *["---"] * len(wirings))
    for task in sorted(runs):
        seeds_of = {w: [points for _, points in sorted(of.items())] for w, of in runs[task].items()}
        row(title(task), *([f"{100 * chance[task]:.1f}"] if chance else []),
            *(cell(seeds_of[w]) if w in seeds_of else "-" for w in wirings))


def updates(of_seeds):
    times = [waited(points) for points in of_seeds]
    each = ", ".join(f"{t:,}" if is_solved else "-" for t, is_solved in times)
    return f"**{median(times)}**: {each}"


def main():
    here = os.path.dirname(os.path.abspath(__file__))
    path = sys.argv[1] if len(sys.argv) > 1 else os.path.join(here, "logs.tar.xz")
    if len(sys.argv) > 2 or not os.path.exists(path):
        sys.exit(f"error: {path}: there is no such folder or archive; usage: solved.py [runs/probe | logs.tar.xz]")
    runs, deciding, chance = read(path)
    order = ["plain", "rope", "sla(2,2)", "gqa(2)", "window(4)", "lsh(4,2)"]
    wirings = sorted({w for of in (runs, deciding) for of_task in of.values() for w in of_task},
                     key=lambda w: (order.index(w) if w in order else len(order), w))
    table(runs, wirings, "Percent of right answers after the last update, of each seed",
          lambda of_seeds: ", ".join(f"{100 * points[-1][1]:.1f}" for points in of_seeds), chance)
    table(runs, wirings, "Solved at update: the median by Kaplan and Meier, and that of each seed", updates)

    rows = []
    for question, task in QUESTIONS.items():
        arms = {w: [waited(points) for _, points in sorted(of.items())] for w, of in deciding.get(task, {}).items()}
        if len(arms.get("plain", [])) < 2:
            continue
        print(f"\n{question}, {title(task)}: solved at update\n")
        row("arm", "seeds", "solved", "median", "mean, unsolved runs counted at their last update", "of each seed")
        row("---", "--:", "--:", "--:", "--:", "---")
        for wiring in sorted(arms, key=wirings.index):
            times = arms[wiring]
            row(f"`{wiring}`", str(len(times)), str(sum(is_solved for _, is_solved in times)), median(times),
                f"{statistics.mean(t for t, _ in times):.0f}",
                ", ".join(f"{t:,}" if is_solved else "-" for t, is_solved in times))
        rows += [(question, w, arms[w], arms["plain"]) for w in sorted(arms, key=wirings.index)
                 if w != "plain" and len(arms[w]) > 1]
    if not rows:
        return
    print("\nDifference to plain of the mean updates until solved, 95 % by Welch; p of the log-rank test over all "
          "permutations, by Holm over the questions of an arm\n")
    row("where", "arm", "difference", "95 %", "p", "p, Holm", "")
    row("---", "---", "--:", "--:", "--:", "--:", "---")
    ps = [permutation_p(ours, plain) for _, _, ours, plain in rows]
    adjusted = {}
    for arm in {w for _, w, _, _ in rows}:
        of_arm = [i for i, (_, w, _, _) in enumerate(rows) if w == arm]
        adjusted.update(zip(of_arm, holm([ps[i] for i in of_arm])))
    for i, (question, wiring, ours, plain) in enumerate(rows):
        difference, half, needed = interval([t for t, _ in ours], [t for t, _ in plain])
        row(question, f"`{wiring}`", f"{difference:+.0f}", f"+- {half:.0f}", f"{ps[i]:.4f}", f"{adjusted[i]:.4f}",
            said(difference, half, adjusted[i], needed, len(ours)))


if __name__ == "__main__":
    main()
