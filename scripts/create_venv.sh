#!/usr/bin/env bash
# Makes a virtual environment with torch and the packages for building against it.
#   PYTHON=python3.12 scripts/create_venv.sh .venv
# Running it again on an existing environment only checks it.
set -euo pipefail

venv=${1:-.venv}
torch_version=2.13.0
# The CPU build: on Linux the one on PyPI needs gigabytes of CUDA libraries. Used only if the index can be reached.
torch_index=${TORCH_INDEX-https://download.pytorch.org/whl/cpu}

fail() {
    echo "error: $*" >&2
    exit 1
}

is_new_enough() {
    command -v "$1" >/dev/null && "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

find_python() {
    if [ -n "${PYTHON:-}" ]; then
        is_new_enough "$PYTHON" || fail "PYTHON=$PYTHON is not Python 3.11 or newer"
        echo "$PYTHON"
        return
    fi
    local candidate
    for candidate in python3.11 python3 python3.12 python3.13 python; do
        if is_new_enough "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    fail "no Python 3.11 or newer found; install one, or name it: make PYTHON=/path/to/python"
}

if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    python=$(find_python)
    echo "Making $venv with $("$python" --version)"
    # Debian's python3 comes without ensurepip; a pip of the machine can then put one into the environment
    if "$python" -c 'import ensurepip' 2>/dev/null; then
        "$python" -m venv "$venv"
    else
        "$python" -m venv --without-pip "$venv" 2>/dev/null ||
            fail "$python cannot make virtual environments; install it: apt-get install python3-venv"
        "$python" -m pip --python "$venv/bin/python" install pip ||
            fail "there is no pip to put into $venv; install it: apt-get install python3-venv"
    fi
fi

can_reach() {
    "$venv/bin/python" - "$1" <<'PY'
import sys, urllib.request
try:
    urllib.request.urlopen(sys.argv[1], timeout=5).close()
except Exception:
    sys.exit(1)
PY
}

index=()
if [ -n "$torch_index" ] && ! "$venv/bin/python" -c "import torch" 2>/dev/null && can_reach "$torch_index/torch/"; then
    index=(--extra-index-url "$torch_index")
fi
# without bytecode: pip compiles all modules, most of which are never imported
"$venv/bin/python" -m pip install --no-compile "torch==$torch_version" "${index[@]}"
"$venv/bin/python" -m pip install --no-compile numpy 'setuptools>=77' wheel
