"""`python -m truespec.launch_server --model-path MODEL`: the same as `truespec serve MODEL`."""

from __future__ import annotations

import sys

from truespec.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["serve", *sys.argv[1:]]))
