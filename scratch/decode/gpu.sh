#!/bin/bash
# Modes: tests | time | sweep [case ...]     run from the repository root on the GPU machine
set -u
cd "$(dirname "$0")/../.."
export PYTHONPATH=$PWD/src:$PWD/tests
unset TRITON_INTERPRET
case "${1:-time}" in
tests) shift; python3 -m pytest -q -x tests/gpu/test_decode_gpu.py "$@" 2>&1 | tail -40 ;;
time) shift; python3 scratch/decode/decode_gpu.py time "$@" ;;
sweep)
  shift
  for i in 0 1 2 3 4 5 6 7 8 9; do python3 scratch/decode/decode_gpu.py warm $i 10 "$@" >/tmp/warm.$i 2>&1 & done
  wait
  tail -qn 2 /tmp/warm.*
  python3 scratch/decode/decode_gpu.py sweep "$@" ;;
esac
