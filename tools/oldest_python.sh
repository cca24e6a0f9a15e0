#!/bin/sh
# Tests on Python 3.10, the oldest that is supported, what needs no torch: in a copy of the tree under build/.
# Usage: tools/oldest_python.sh [WORKERS]
set -eu
workers=${1:-2}
cd "$(dirname "$0")/.."
python=
# A command of pyenv's may be there and not run.
for found in python3.10 "$HOME"/.pyenv/versions/3.10.*/bin/python3.10; do
  if "$found" -c 'import venv' 2>/dev/null; then
    python=$found
    break
  fi
done
if [ -z "$python" ]; then
  echo "test-oldest-python: skipped, there is no python3.10 on this machine"
  exit 0
fi
copy=build/python3.10
mkdir -p "$copy"
git ls-files -zco --exclude-standard | tar -cf - --null -T - | tar -xf - -C "$copy"
# tests/ finds the real traces beside the tree.
[ ! -d ../shared ] || ln -sfn "$(cd ../shared && pwd)" build/shared
cd "$copy"
[ -x .venv/bin/python ] || "$python" -m venv .venv
pip=".venv/bin/python -m pip install --quiet --disable-pip-version-check"
$pip --require-hashes -r constraints/lock-pip.txt
$pip -c constraints/python-3.10.txt 'setuptools>=77' wheel pybind11 pytest pytest-xdist pytest-timeout \
  pytest-rerunfailures hypothesis numpy scipy click joblib msgspec PyYAML rich networkx starlette uvicorn
CRUX_BUILD=sim .venv/bin/python setup.py --quiet build_ext --inplace
export PYTHONPATH="$PWD:$PWD/launcher"
# The files of these packages; those that import torch are left out by name.
cd tests
set -- agreement/test_*.py dispatch/test_*.py network/test_*.py host/test_rdma.py host/test_pcie.py \
  project/test_files.py project/test_settings.py project/test_warn_once.py schedule/test_*.py sim/test_*.py \
  store/test_*.py
files=
for file in "$@"; do
  case $file in
    agreement/test_job_channel.py | dispatch/test_this_host.py) ;;
    *) files="$files tests/$file" ;;
  esac
done
cd ..
# shellcheck disable=SC2086  # files are words
exec .venv/bin/python -m pytest -n "$workers" --dist loadgroup -q -m "not slow and not full and not hypothesis" $files
