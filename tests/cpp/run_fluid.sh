#!/bin/sh
# Builds the fluid engine's C++ tests with AddressSanitizer and UBSan, and runs them.
# Usage: tests/cpp/run_fluid.sh [folder for the program; default: a temporary one]
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
out=${1:-}
if [ -z "$out" ]; then
  out=$(mktemp -d)
  trap 'rm -rf "$out"' EXIT
fi
"${CXX:-g++}" -std=c++17 -O1 -g -Wall -Wextra -Werror -ffp-contract=off -D_GLIBCXX_ASSERTIONS \
  -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer \
  "$root/tests/cpp/test_fluid.cpp" "$root"/csrc/fluid/*.cc -o "$out/test_fluid"
"$out/test_fluid"
