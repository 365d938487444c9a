#!/usr/bin/env bash
# Installs the peers (NVIDIA Triton from PyPI's pytriton, Seldon MLServer) into target/peers, with the models
# that all servers serve. Needs python3 with venv, and Debian's libpython3, libarchive13 and libb64-0d for
# Triton.
set -euo pipefail
cd "$(dirname "$0")/../.."
if ! ldconfig -p | grep -q libarchive.so.13 || ! ldconfig -p | grep -q libb64.so.0d; then
  echo "Triton needs libraries that are missing: apt-get install libpython3.11 libarchive13 libb64-0d" >&2
  exit 1
fi
peers=$PWD/target/peers
mkdir -p "$peers/models"

venv() { # name, packages...
  local dir=$peers/$1
  shift
  [ -x "$dir/bin/python" ] || python3 -m venv "$dir"
  "$dir/bin/pip" install --quiet "$@"
}
venv triton nvidia-pytriton onnxruntime numpy
venv mlserver mlserver onnxruntime numpy

cargo build --profile dist --quiet -p millrace-cli
target/dist/millrace synth mlp --out "$peers/models/mlp.onnx"
target/dist/millrace synth resnet50 --out "$peers/models/resnet50.onnx"
echo "peers are ready in target/peers"
