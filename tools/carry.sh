#!/bin/sh
# Fills a folder with what a machine without a package registry lacks, for `make test-gpu SYSTEM_PYTHON=...`.
# Usage: tools/carry.sh FOLDER [PYTHON_VERSION]    (default 3.12; of that machine's Python)
#   FOLDER/wheels   for WHEELS=
#   FOLDER/bin      ip and tc of this machine with their libraries; goes in front of PATH there
set -eu

folder=$1 version=${2:-3.12}
mkdir -p "$folder/wheels" "$folder/bin" "$folder/lib"

python3 -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: \
  --python-version "$version" --implementation cp --platform manylinux_2_28_x86_64 \
  --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
  -d "$folder/wheels" msgspec==0.22.0 pytest-rerunfailures==16.7

for tool in ip tc; do
  path=$(PATH=$PATH:/sbin:/usr/sbin command -v $tool) || { echo "no $tool here to carry" >&2; exit 1; }
  cp -L "$path" "$folder/lib/$tool"
  # What every Linux has stays behind: a C library must not meet another one's loader.
  ldd "$path" | awk '$3 ~ /^\// { print $3 }' | grep -Ev '/lib(c|m|z)\.so' | xargs -r cp -Lt "$folder/lib"
  # By the loader's own option: a variable would go on to what `ip netns exec` starts.
  cat >"$folder/bin/$tool" <<'END'
#!/bin/sh
lib=$(dirname "$(readlink -f "$0")")/../lib
exec /lib64/ld-linux-x86-64.so.2 --library-path "$lib" "$lib/$(basename "$0")" "$@"
END
  chmod +x "$folder/bin/$tool"
done
du -sh "$folder"
