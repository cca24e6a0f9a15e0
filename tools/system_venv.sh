#!/bin/sh
# A virtual environment over a Python that has torch already, where no package registry can be reached.
# Usage: tools/system_venv.sh PYTHON VENV [WHEELS]
#   PYTHON  the interpreter that imports torch; it may itself live in a virtual environment
#   WHEELS  folder with wheels of what PYTHON lacks; nothing is fetched
set -eu

python=$1 venv=$2 wheels=${3:-}
packages='click hypothesis matplotlib msgspec networkx numpy nvidia-ml-py pybind11 pytest
pytest-rerunfailures pytest-timeout PyYAML rich scipy setuptools wheel'

"$python" -c 'import torch' || { echo "$python has no torch" >&2; exit 1; }
[ -x "$venv/bin/python" ] || "$python" -m venv --without-pip "$venv"
# --system-site-packages would show the packages of the base interpreter, not those of an environment.
"$python" - "$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" <<'END'
import pathlib, site, sys, sysconfig
paths = dict.fromkeys([*map(sysconfig.get_path, ("purelib", "platlib")), *site.getsitepackages()])
lines = [f"import site; site.addsitedir({path!r})\n" for path in paths]
pathlib.Path(sys.argv[1], "zz_below.pth").write_text("".join(lines))
END
# shellcheck disable=SC2086
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-index \
  ${wheels:+--find-links "$wheels"} $packages || {
  echo "put the wheels of what is missing into a folder, and name it: WHEELS=folder" >&2
  exit 1
}
