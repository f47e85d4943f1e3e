#!/usr/bin/env python3
"""Runs the commands of docs/tour.md and compares their output with the page.

    tools/scripts/tour.py [PAGE]

Each block ```console is a part of one session of bash, in a folder of its own. A line that begins
with "$ " is a command, and lines that begin with "> " continue it. What follows is the expected
output of stdout and stderr together. "..." stands for any text in a line, and a line of its own for
any lines. The programs are those of target/release.
"""

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading

END = "end-of-a-command-of-the-tour"
SECONDS_MAX = 300


def commands(page):
    """The commands of a page, each with its line and its expected output."""
    found, inside = [], False
    for number, line in enumerate(page.splitlines(), 1):
        if line.startswith("```"):
            inside = line == "```console"
        elif inside and line.startswith("$ "):
            found.append((number, [line[2:]], []))
        elif inside and line.startswith("> ") and found and not found[-1][2]:
            found[-1][1].append(line[2:])
        elif inside:
            found[-1][2].append(line)
    return [(number, "\n".join(command), output) for number, command, output in found]


def matches(expected, lines):
    """Whether the lines are those expected."""
    pattern = ""
    for line in expected:
        if line.strip() == "...":
            pattern += r"(?:[^\n]*\n)*?"
        else:
            pattern += ".*".join(re.escape(part) for part in line.split("...")) + "\n"
    return re.fullmatch(pattern, "".join(line + "\n" for line in lines)) is not None


def kill(shell):
    """Ends the session and what a failed tour left: programs, and the region file."""
    try:
        os.killpg(shell.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    shell.wait()
    region = f"/dev/shm/tour-{shell.pid}.region"
    if os.path.exists(region):
        os.remove(region)


def run(path):
    root = os.getcwd()
    release = os.path.join(root, os.environ.get("CARGO_TARGET_DIR", "target"), "release")
    with open(path, encoding="utf-8") as file:
        steps = commands(file.read())
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o700)
        environment = {**os.environ, "PATH": f"{release}:{os.environ['PATH']}", "REPOSITORY": root,
                       "HOME": folder, "XDG_RUNTIME_DIR": folder}
        environment.pop("FARSIDE_SERVER", None)
        shell = subprocess.Popen(["bash"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                                 stderr=subprocess.STDOUT, cwd=folder, env=environment,
                                 start_new_session=True)
        for number, command, expected in steps:
            # A command that hangs ends with the shell.
            timer = threading.Timer(SECONDS_MAX, kill, [shell])
            timer.start()
            # `read` in a command must not take the lines behind it.
            shell.stdin.write(f"{{ {command}\n}} </dev/null\necho {END}\n")
            shell.stdin.flush()
            lines = []
            for line in shell.stdout:
                if line.endswith(END + "\n"):
                    # A line of output without an end precedes.
                    lines.extend([line[:-len(END) - 1]] if line != END + "\n" else [])
                    break
                lines.append(line.rstrip("\n"))
            timer.cancel()
            is_right = matches(expected, lines) and shell.poll() is None
            print(f"{'ok' if is_right else 'DIFFERS'}: {path}:{number}: {command}")
            if not is_right:
                failed += 1
                print("  expected:", *expected, "  was:", *lines, sep="\n    ")
            if shell.poll() is not None:
                break
        kill(shell)
    print(f"{len(steps)} commands, {failed} with another output")
    return 1 if failed or not steps else 0


if __name__ == "__main__":
    sys.exit(run(sys.argv[1] if len(sys.argv) > 1 else "docs/tour.md"))
