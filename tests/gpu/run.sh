#!/usr/bin/env bash
# Tries Segue's GPU pages on this machine: tests/gpu/run.sh [--json FILE] [STAGE...]; --help says more.
# Needs a Python that has Segue with the extra `cuda`, numpy and pytest: .venv after `make setup`, or PYTHON=...
# Fetches nothing. Under five minutes. Exit status 0: everything that had to be equal was.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
python=${PYTHON:-$root/.venv/bin/python}
if ! command -v "$python" >/dev/null; then
  echo "run.sh: $python is not there: run make setup, or set PYTHON" >&2
  exit 2
fi
if ! missing=$("$python" -c 'import cuda.bindings.driver, numpy, pytest, segue_daemon' 2>&1); then
  echo "run.sh: $python: ${missing##*$'\n'}: pip install '.[cuda]' pytest pytest-asyncio pytest-timeout" >&2
  exit 2
fi
PYTHONPATH="$root/tests${PYTHONPATH:+:$PYTHONPATH}" exec "$python" -m gpu "$@"
