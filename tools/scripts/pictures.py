#!/usr/bin/env python3
"""Draws docs/pictures/*.svg. tools/scripts/pictures.sh runs it, and says what it needs."""

import io
import os
import re
import subprocess
import sys
import time

import rich._export_format
from rich.console import Console
from rich.text import Text

# Each picture: its name, the columns and lines of the terminal, the commands, and how many seconds to
# wait after the last one.
PICTURES = [
    ("commands", 112, 24, [
        "kv-cli put greeting hello",
        "kv-cli get greeting; echo",
        "kv-cli put session abc --ttl 15m; kv-cli ttl session",
        "kv-cli incr visits; kv-cli incr visits",
        "kv-cli insert greeting hi",
        "kv-bench ycsb --workload c --records 100000 --operations 2000000 2>&1 | tail -9",
    ], 12),
    ("top", 120, 36, ["kv-cli top"], 6),
]
SERVER = "shm:///tmp/farside/kv.sock"
LOADS = ["a", "b"]
SECONDS_MAX = 60


def tmux(*arguments):
    return subprocess.run(["tmux", "-L", "farside-pictures", *arguments], check=True,
                          stdout=subprocess.PIPE, text=True).stdout


def shown(columns, lines, commands, seconds, environment):
    """What a terminal shows after these commands, with colours as escape sequences."""
    variables = [f"{name}={value}" for name, value in environment.items()]
    tmux("new-session", "-d", "-x", str(columns), "-y", str(lines), "env", *variables, "bash",
         "--norc", "--noprofile")
    try:
        time.sleep(1)
        for number, command in enumerate(commands, 1):
            tmux("send-keys", "-l", command)
            tmux("send-keys", "Enter")
            time.sleep(seconds if number == len(commands) else 1)
        return tmux("capture-pane", "-e", "-p").rstrip("\n")
    finally:
        tmux("kill-server")


def draw(screen, columns, title, path):
    console = Console(record=True, width=columns, file=io.StringIO(), force_terminal=True,
                      color_system="truecolor")
    for line in screen.split("\n"):
        console.print(Text.from_ansi(line), soft_wrap=True)
    # Without fonts from another site: the reader's own does.
    form = re.sub(r"@font-face \{\{.*?\}\}", "", rich._export_format.CONSOLE_SVG_FORMAT, flags=re.S)
    form = form.replace("Fira Code", "monospace")
    console.save_svg(path, title=title, code_format=form, unique_id=title.replace(" ", "-"))


def main():
    release = os.path.join(os.environ.get("CARGO_TARGET_DIR", "target"), "release")
    release = os.path.abspath(release)
    os.makedirs("docs/pictures", exist_ok=True)
    os.makedirs("/tmp/farside", mode=0o700, exist_ok=True)
    environment = {"PATH": f"{release}:{os.environ['PATH']}", "FARSIDE_SERVER": SERVER,
                   "PS1": "$ ", "TERM": "screen-256color"}
    server = subprocess.Popen([f"{release}/kv-server", "--listen", SERVER, "--memory", "256MiB",
                               "--evict"], stderr=subprocess.DEVNULL)
    loads = []
    try:
        time.sleep(1)
        for name, columns, lines, commands, seconds in PICTURES:
            if name == "top":
                loads = [subprocess.Popen(
                    [f"{release}/kv-bench", "ycsb", "--workload", load, "--records", "200000",
                     "--seconds", str(SECONDS_MAX), "--server", SERVER,
                     "--client-metrics", "/dev/null"],
                    stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) for load in LOADS]
                time.sleep(5)
            screen = shown(columns, lines, commands, seconds, environment)
            draw(screen, columns, "kv-cli top" if name == "top" else "Farside",
                 f"docs/pictures/{name}.svg")
            print(f"drew docs/pictures/{name}.svg")
    finally:
        for process in [*loads, server]:
            process.terminate()
            process.wait()


if __name__ == "__main__":
    sys.exit(main())
