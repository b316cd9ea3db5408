"""Starts servers to measure, and waits until they answer. Used by the benchmarks."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path


def http_json(url: str, body: dict[str, object] | None = None) -> dict:
    """GET, or POST a JSON body; the JSON reply."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as reply:
        return json.loads(reply.read() or b"{}")


def free_port() -> int:
    """A port nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Server:
    """A server process on this machine.

    Args:
        command: with "{port}" where its port goes.
        health: path that answers 200 once it serves.

    Attributes:
        base: its address. start_seconds: until it answered.
    """

    def __init__(
        self, command: list[str], *, health: str, env: dict[str, str] | None = None
    ) -> None:
        port = free_port()
        self.base = f"http://127.0.0.1:{port}"
        begin = time.perf_counter()
        self.process = subprocess.Popen(
            [part.replace("{port}", str(port)) for part in command],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=os.environ | (env or {}),
        )
        self._wait(self.base + health)
        self.start_seconds = time.perf_counter() - begin

    def resident_mib(self) -> float:
        """Resident memory of the process and its children, shared pages divided among them."""
        total = 0
        for pid in [self.process.pid, *_children(self.process.pid)]:
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1])
        return total / 1024

    def close(self) -> None:
        """Stop it."""
        self.process.terminate()
        try:
            self.process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self.process.kill()

    def _wait(self, url: str) -> None:
        for _ in range(1200):
            if self.process.poll() is not None:
                raise RuntimeError(f"the server exited with {self.process.returncode}")
            try:
                urllib.request.urlopen(url, timeout=5).read()
                return
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                time.sleep(0.1)
        raise RuntimeError(f"{url} did not answer in time")


class TruespecServer(Server):
    """This project's server."""

    def __init__(self, model_path: str, algorithm: str) -> None:
        super().__init__(
            [
                *(sys.executable, "-m", "truespec.launch_server", "--model-path", model_path),
                *("--speculative-algorithm", algorithm, "--port", "{port}"),
            ],
            health="/health",
        )


def _children(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text(encoding="ascii").split():
            found += [int(child), *_children(int(child))]
    return found
