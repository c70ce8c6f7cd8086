#!/usr/bin/env python3
"""Writes llmc/text/unicode_classes.h: which code points are letters, numbers and white space in Unicode 16.0, from the
tables of the package unicodedata2. With tiktoken installed it also asks that about every code point, and fails where
the two differ.

    pip install unicodedata2==16.0.0 tiktoken
    dev/unicode_classes.py | clang-format --assume-filename=llmc/text/unicode_classes.h >llmc/text/unicode_classes.h
"""
import sys
import unicodedata2

VERSION = "16.0.0"  # as in regex-syntax 0.8.5 and later, with which tiktoken 0.14 is built
SURROGATES = range(0xD800, 0xE000)  # no characters: UTF-8 cannot spell them
CODE_POINTS = [c for c in range(0x110000) if c not in SURROGATES]

HEAD = f"""\
// Letters (general category L), numbers (N) and white space (White_Space) of \
Unicode {VERSION}: the version of the regular
// expressions in tiktoken 0.14, which it agrees with on every code point. A library of the system's would make tokens
// depend on the system: ICU and utf8proc are at Unicode 15.0 on Debian 12, which lacks 4,924 of these letters and 80 of
// these numbers, and later elsewhere. Written by dev/unicode_classes.py from the package unicodedata2; not to be
// edited.
#pragma once
#include <cstdint>
#include <cstdlib>

// Calls visit(first, last) for each range of code points in a text such as "41-5A AA", in hexadecimal.
template <class Visit>
void for_each_range(const char* ranges, Visit visit) {{
  for (char* end; *ranges != '\\0'; ranges = *end == ' ' ? end + 1 : end) {{
    const uint32_t first = uint32_t(strtoul(ranges, &end, 16));
    const uint32_t last = *end == '-' ? uint32_t(strtoul(end + 1, &end, 16)) : first;
    visit(first, last);
  }}
}}
"""


def ranges(code_points):
    found = []
    for c in sorted(code_points):
        if found and found[-1][1] == c - 1:
            found[-1][1] = c
        else:
            found.append([c, c])
    return found


def table(name, code_points):
    lines, line = [], ""
    for first, last in ranges(code_points):
        item = f"{first:X} " if first == last else f"{first:X}-{last:X} "
        if len(line) + len(item) > 113:
            lines.append(line)
            line = ""
        line += item
    body = "\n".join(f'    "{text}"' for text in lines + [line.rstrip()])
    return f"\n// {len(code_points):,} code points\ninline constexpr char {name}[] =\n{body};"


def compare_with_tiktoken(classes):
    try:
        import tiktoken
    except ImportError:
        print("tiktoken is not installed: not compared", file=sys.stderr)
        return
    for pattern, expected in classes.items():
        # A vocabulary of bytes and a pattern that matches one class: only characters of the class have tokens.
        encoding = tiktoken.Encoding("class", pat_str=pattern, special_tokens={},
                                     mergeable_ranks={bytes([b]): b for b in range(256)})
        found = {c for c in CODE_POINTS if encoding.encode_ordinary(chr(c))}
        if found != expected:
            differ = ", ".join(f"U+{c:04X}" for c in sorted(found ^ expected)[:20])
            sys.exit(f"error: tiktoken's {pattern} differs in {len(found ^ expected)} code points: {differ} ...")
        print(f"tiktoken's {pattern}: the same {len(found):,} code points", file=sys.stderr)


def main():
    if unicodedata2.unidata_version != VERSION:
        sys.exit(f"error: unicodedata2 has Unicode {unicodedata2.unidata_version}; install unicodedata2=={VERSION}")
    category = {c: unicodedata2.category(chr(c)) for c in CODE_POINTS}
    letters = {c for c in CODE_POINTS if category[c][0] == "L"}
    numbers = {c for c in CODE_POINTS if category[c][0] == "N"}
    # White_Space: the separators, and the controls tab to carriage return and next line (Unicode's PropList.txt).
    spaces = {c for c in CODE_POINTS if category[c][0] == "Z"} | set(range(0x09, 0x0E)) | {0x85}
    compare_with_tiktoken({r"\p{L}": letters, r"\p{N}": numbers, r"\s": spaces})
    print(HEAD + "\n".join([table("unicode_letters", letters), table("unicode_numbers", numbers),
                            table("unicode_white_space", spaces)]))


main()
