#!/bin/sh
# Writes constraints/lock-*.txt: the pinned versions with the hashes of their files, for each pair of a
# Python and a torch that constraints/ pins, and pip's own. `make lock` calls it after a pin has changed.
# Usage: tools/lock.sh UV
set -eu
uv=$1
cd "$(dirname "$0")/.."

# Reads requirements from standard input. Usage: lock FILE PYTHON [-c CONSTRAINTS]...
lock() {
  file=$1 version=$2
  shift 2
  "$uv" pip compile --quiet --no-header --no-annotate --generate-hashes --python-version "$version" \
    --python-platform x86_64-manylinux_2_28 --output-file "$file" "$@" - >/dev/null
}

for pair in 3.10:2.14.1 3.11:2.11.0 3.11:2.15.0; do
  python=${pair%%:*} torch=${pair##*:}
  { cat requirements.txt; echo "torch==$torch"; } | lock "constraints/lock-python-$python-torch-$torch.txt" \
    "$python" -c "constraints/python-$python.txt" -c "constraints/torch-$torch.txt"
done
# What `make docs` builds with, at the versions of what is installed beside it.
printf 'furo\nmyst-parser\nsphinx\n' | lock constraints/lock-docs.txt 3.11 -c constraints/python-3.11.txt \
  -c constraints/docs.txt
echo "pip==26.3" | lock constraints/lock-pip.txt 3.10
