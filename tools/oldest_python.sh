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
  pytest-rerunfailures hypothesis numpy scipy click msgspec PyYAML rich networkx starlette uvicorn
CRUX_BUILD=sim .venv/bin/python setup.py --quiet build_ext --inplace
export PYTHONPATH="$PWD:$PWD/launcher"
# The files of these packages; those that import torch are left out by name.
cd tests
set -- test_agreement_model.py test_control_*.py test_dispatch*.py test_fabric_*.py test_files.py test_fluid*.py \
  test_operator.py test_probe*.py test_route.py test_scenario.py test_schedule_*.py \
  test_settings.py test_sim_*.py test_store*.py test_warn_once.py test_workload_*.py
files=
for file in "$@"; do
  case $file in
    test_control_job_channel.py | test_dispatch_this_host.py | test_fabric_host_topology.py | test_fabric_nvml*) ;;
    *) files="$files tests/$file" ;;
  esac
done
cd ..
# shellcheck disable=SC2086  # files are words
exec .venv/bin/python -m pytest -n "$workers" --dist loadgroup -q -m "not slow and not full and not hypothesis" $files
