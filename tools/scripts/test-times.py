#!/usr/bin/env python3
"""Prints the slowest forty tests of the last run with cargo-nextest, and what each program took.

    tools/scripts/test-times.py [JUNIT.xml]
"""

import sys
import xml.etree.ElementTree as ElementTree
from collections import defaultdict

path = sys.argv[1] if len(sys.argv) > 1 else "target/nextest/default/junit.xml"
try:
    root = ElementTree.parse(path).getroot()
except OSError as error:
    sys.exit(f"{path}: {error.strerror}: run make test first, with cargo-nextest")
tests = [(float(case.get("time")), case.get("classname"), case.get("name"))
         for case in root.iter("testcase")]
programs = defaultdict(list)
for seconds, program, _ in tests:
    programs[program].append(seconds)
print(f"{len(tests)} tests, {sum(seconds for seconds, *_ in tests):.0f} s one after the other\n")
print("| seconds | test |\n|---|---|")
for seconds, program, name in sorted(tests, reverse=True)[:40]:
    print(f"| {seconds:.1f} | `{program} {name}` |")
print("\n| seconds | tests | program |\n|---|---|---|")
for program, times in sorted(programs.items(), key=lambda item: -sum(item[1])):
    print(f"| {sum(times):.1f} | {len(times)} | `{program}` |")
