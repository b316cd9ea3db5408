"""The server as users start it: real processes, a tiny model, and both ends dying."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import orjson
import pytest
from processes import children, engine_of, started, wait_until_gone


def test_a_start_prints_options_phases_and_a_curl_line_that_works(tiny_llama: Path) -> None:
    flags = ("--speculative-algorithm", "NGRAM", "--no-speculative-adaptive")
    with started(tiny_llama, *flags) as server:
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
        os.kill(engine_of(server), signal.SIGKILL)
        assert server.process.wait(15) == 1


def test_the_engine_ends_when_its_server_is_killed(tiny_llama: Path) -> None:
    with started(tiny_llama) as server:
        engines = children(server.process.pid)
        assert engines
        server.process.kill()
        wait_until_gone(engines)


@pytest.mark.parametrize(
    "sent", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.full)]
)
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


def test_an_engine_that_cannot_start_is_said_with_status_1(tiny_llama: Path) -> None:
    command = [sys.executable, "-m", "truespec", "serve", str(tiny_llama), "--port", "0"]
    command += ["--speculative-algorithm", "DSPARK"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    assert "--speculative-draft-model-path" in ended.stderr
