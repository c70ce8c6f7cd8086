#!/usr/bin/env python3
"""What a context is worth in a text, without a model: repeats.py val_000000.bin ...

Of windows of 4,096 tokens at even distances: how many tokens follow 8 that have stood in the window before, by how far
back they stood last, and how often the token that followed them there is the one that follows here."""
import array
import sys

WINDOW, WINDOWS, LENGTH = 4096, 150, 8
BANDS = [(1, 64), (65, 256), (257, 1024), (1025, 4096)]

for path in sys.argv[1:]:
    with open(path, "rb") as file:
        tokens = array.array("H", file.read()[1024:])
    positions, found, right = 0, [0] * len(BANDS), [0] * len(BANDS)
    for start in range(0, len(tokens) - WINDOW, max(WINDOW, (len(tokens) - WINDOW) // WINDOWS)):
        window, last = tokens[start : start + WINDOW], {}
        for i in range(LENGTH, WINDOW):
            before = bytes(token & 255 for token in window[i - LENGTH : i])
            positions += 1
            if before in last:
                j = last[before]
                for band, (first, farthest) in enumerate(BANDS):
                    if first <= i - j <= farthest:
                        found[band] += 1
                        right[band] += window[j] == window[i]
            last[before] = i
    print(path, positions, *("%d-%d: %.1f %% (%.0f %% right)" % (*band, 100 * n / positions, 100 * r / max(1, n))
                             for band, n, r in zip(BANDS, found, right)))
