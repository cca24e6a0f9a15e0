#!/bin/sh
# Installs the Debian packages that the demo and some tests use, where it can; else says what is lost.
set -u

missing=
command -v ip >/dev/null 2>&1 && command -v tc >/dev/null 2>&1 || missing="$missing iproute2"
command -v c++ >/dev/null 2>&1 || missing="$missing g++"
[ -n "$missing" ] || exit 0

if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
  echo "installing$missing"
  # shellcheck disable=SC2086
  { apt-get install -qq -y $missing || { apt-get update -qq && apt-get install -qq -y $missing; }; } \
    >/dev/null 2>&1 && exit 0
fi
echo "not installed:$missing (needs root and apt-get)"
case $missing in
*iproute2*) echo "  without iproute2 no network namespaces: the demo runs on loopback, tests of the fabric skip" ;;
esac
case $missing in
*g++*) echo "  without a C++ compiler the extension can't be built" && exit 1 ;;
esac
exit 0
