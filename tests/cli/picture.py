"""Records a real terminal session of moe and draws it as an animated SVG.

  pip install termtosvg==1.1.0
  python tests/cli/picture.py [PROGRAM] [PICTURE]    default: target/release/moe docs/images/terminal.svg

Each command runs in a pseudo terminal of its own; what it prints is shown when it was printed, what is typed at a
typist's pace. The program runs in an empty folder, so the picture needs nothing but the program.
"""
import fcntl
import json
import os
import pty
import select
import struct
import subprocess
import sys
import tempfile
import termios
import time
from pathlib import Path

COLUMNS, ROWS = 96, 28
KEY, PAUSE = 0.03, 1.2  # seconds between keys, and after a command
LINE = '{"custom_id": "%d", "method": "POST", "url": "/v1/completions", "body": {"prompt": "ROMEO:", "max_tokens": 64}}\n'
SCHEMA = '{"type": "object", "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}}, "required": ["name", "age"], "additionalProperties": false}'
COMMANDS = [
    'moe --prompt "First Citizen:" --max-new-tokens 48 --seed 5',
    "moe list-devices",
    "moe --json-schema schema.json --prompt 'The king: ' --max-new-tokens 64 --seed 3",
    "wc -l requests.jsonl; moe batch --input requests.jsonl --output answers.jsonl",
]


def run(command, folder, path, emit):
    """Runs a command line in a pseudo terminal; `emit` gets what it prints, at the time."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(folder)
        environment = os.environ | {"PATH": f"{path}:{os.environ['PATH']}", "TERM": "xterm-256color", "COLUMNS": str(COLUMNS), "LINES": str(ROWS)}
        os.execvpe("bash", ["bash", "-c", command], environment)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    while True:
        ready, _, _ = select.select([terminal], [], [], 60)
        try:
            text = os.read(terminal, 65536) if ready else b""
        except OSError:  # the other end is closed
            text = b""
        if not text:
            break
        emit(text.decode("utf-8", "replace"))
    status = os.waitpid(pid, 0)[1]
    if status != 0:
        sys.exit(f"{command}: status {status}")


def record(program, folder):
    """The session as asciicast events."""
    (folder / "bin").mkdir()
    (folder / "bin/moe").symlink_to(program)
    (folder / "schema.json").write_text(SCHEMA)
    (folder / "requests.jsonl").write_text("".join(LINE % i for i in range(200)))
    start, events = time.monotonic(), []
    emit = lambda text: events.append([round(time.monotonic() - start, 3), "o", text])
    for command in COMMANDS:
        emit("\x1b[32m$\x1b[0m ")
        for key in command:
            emit(key)
            time.sleep(KEY)
        emit("\r\n")
        run(command, folder, folder / "bin", emit)
        time.sleep(PAUSE)
    time.sleep(PAUSE)
    emit("")
    return events


def main():
    program = Path(sys.argv[1] if len(sys.argv) > 1 else "target/release/moe").resolve()
    picture = Path(sys.argv[2] if len(sys.argv) > 2 else "docs/images/terminal.svg").resolve()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        events = record(program, folder)
        cast = folder / "session.cast"
        header = {"version": 2, "width": COLUMNS, "height": ROWS}
        cast.write_text("\n".join(json.dumps(line) for line in [header, *events]) + "\n")
        draw = [sys.executable, "-m", "termtosvg", "render", cast, picture, "--template", "window_frame", "--max-frame-duration", "1500ms"]
        subprocess.run(draw, check=True)
    print(f"{picture}: {events[-1][0]:.1f} seconds, {picture.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
