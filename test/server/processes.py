"""The server in processes of its own, as users start it."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple


class Started(NamedTuple):
    process: subprocess.Popen
    output: str
    url: str


@contextmanager
def started(model: Path, *flags: str, ready: bool = True) -> Iterator[Started]:
    """A server process on a free port; killed after the block."""
    command = [sys.executable, "-m", "truespec.launch_server", "--model-path", str(model)]
    process = subprocess.Popen(
        [*command, "--port", "0", "--max-total-tokens", "4096", "--num-threads", "1", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        output = read_until(process, "ready at " if ready else "tokenizer loaded")
        found = re.search(r"ready at (\S+);", output)
        yield Started(process, output, found.group(1) if found else "")
    finally:
        process.kill()
        process.wait()


def read_until(process: subprocess.Popen, mark: str) -> str:
    """Output up to the line after the one with `mark`."""
    lines = []
    for line in process.stdout:
        lines.append(line)
        if mark in line:
            break
    else:
        raise AssertionError("the server ended: " + "".join(lines))
    return "".join(lines)


def children(pid: int) -> set[int]:
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return {int(child) for path in tasks for child in path.read_text().split()}


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def wait_until_gone(pids: set[int]) -> None:
    for _ in range(100):
        if not any(is_alive(pid) for pid in pids):
            return
        time.sleep(0.1)
    raise AssertionError(f"{pids} are still alive")


def engine_of(server: Started) -> int:
    """The engine's process: the child that is not multiprocessing's own helper."""
    (engine,) = (pid for pid in children(server.process.pid) if not is_helper(pid))
    return engine


def is_helper(pid: int) -> bool:
    return "resource_tracker" in Path(f"/proc/{pid}/cmdline").read_text()
