"""The server as users start it: real processes, a tiny model, and both ends dying."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import httpx
import orjson
import pytest


class Started(NamedTuple):
    process: subprocess.Popen
    output: str
    url: str


@contextmanager
def started(model: Path, *flags: str, ready: bool = True) -> Iterator[Started]:
    """A server process on a free port; killed after the block."""
    command = [sys.executable, "-m", "truespec.launch_server", "--model-path", str(model)]
    environment = {**os.environ, "TRUESPEC_CPU_KERNELS": "torch"}
    process = subprocess.Popen(
        [*command, "--port", "0", "--max-total-tokens", "4096", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
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


def test_a_start_prints_options_phases_and_a_curl_line_that_works(tiny_llama: Path) -> None:
    with started(tiny_llama, "--speculative-algorithm", "NGRAM") as server:
        assert "max_total_tokens = 4096" in server.output
        assert re.search(r"model: \d+\.\d\d s", server.output)
        command = shlex.split(server.process.stdout.readline())
        assert command[0] == "curl"
        body = orjson.loads(command[command.index("-d") + 1])
        reply = httpx.post(command[1], json=body, timeout=30)
        assert reply.status_code == 200
        assert len(reply.json()["choices"][0]["logprobs"]["tokens"]) > 0
        info = httpx.get(f"{server.url}/server_info").json()
        assert info["speculative"]["algorithm"] == "NGRAM"
        (engine,) = [
            p for p in children(server.process.pid) if "resource_tracker" not in command_of(p)
        ]
        os.kill(engine, signal.SIGKILL)
        assert server.process.wait(15) == 1


def command_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text()


def test_the_engine_ends_when_its_server_is_killed(tiny_llama: Path) -> None:
    with started(tiny_llama) as server:
        engines = children(server.process.pid)
        assert engines
        server.process.kill()
        wait_until_gone(engines)


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_a_server_that_is_told_to_stop_while_it_loads_ends_tidily(
    tiny_llama: Path, sent: signal.Signals
) -> None:
    with started(tiny_llama, ready=False) as server:
        engines = children(server.process.pid)
        time.sleep(0.5)
        server.process.send_signal(sent)
        assert server.process.wait(15) == 0
        wait_until_gone(engines)


def test_a_model_that_is_not_there_is_said_with_status_2(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "truespec", "serve", str(tmp_path / "missing"), "--port", "0"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2
    assert "missing" in ended.stderr
