#!/usr/bin/env bash
# Makes target/python, a virtual environment with the unmodified clients that the tests drive the
# server with, and with the library of ONNX Runtime. Where there is no Python or no package index,
# says so and succeeds: the tests that need it then say that they were skipped.
set -uo pipefail
cd "$(dirname "$0")/../.."

if ! command -v python3 >/dev/null; then
  echo "no python3 here: the tests with tritonclient and kserve will be skipped"
  exit 0
fi
if [ -x target/python/bin/python ] && target/python/bin/python -c 'import tritonclient.grpc, tritonclient.http, kserve, onnxruntime' 2>/dev/null; then
  exit 0
fi
mkdir -p target
if python3 -m venv target/python && target/python/bin/pip install --quiet --requirement tests/python/requirements.txt; then
  echo "target/python has the clients"
else
  rm -rf target/python
  echo "the package index could not be reached: the tests with tritonclient and kserve will be skipped"
fi
