#!/bin/sh
# Builds the C++ tests, which need neither torch nor Python, and runs them.
# Usage: tests/cpp/run.sh asan|tsan [build]
#        tests/cpp/run.sh fuzz [SECONDS [SEED]]
#   asan   AddressSanitizer and UBSan
#   tsan   ThreadSanitizer
#   build  build them only
#   fuzz   each fuzzer for SECONDS (60), under AddressSanitizer and UBSan; SEED is the time's
# Exit status: 0 all passed; 77 this machine can't run them, and why; else a failure.
set -eu

cxx=${CXX:-g++}
case ${1:-} in
  asan) sanitizer="-fsanitize=address,undefined -fno-sanitize-recover=all" ;;
  tsan) sanitizer="-fsanitize=thread" ;;
  fuzz) sanitizer="-fsanitize=address,undefined -fno-sanitize-recover=all" ;;
  *)
    echo "usage: $0 asan|tsan [build], or $0 fuzz [SECONDS [SEED]]" >&2
    exit 2
    ;;
esac
flags="-O1 -fno-omit-frame-pointer $sanitizer"
cd "$(dirname "$0")/../.."
out=build/cpp-$1
mkdir -p "$out"
# Two runs at once would build over each other.
exec 9>"$out/lock"
flock 9

cannot_run() {
  echo "$0: $1 can't run here: $2" >&2
  exit 77
}

command -v "$cxx" >/dev/null || cannot_run "$1" "no compiler $cxx"
echo 'int main() { return 0; }' >"$out/probe.cc"
# shellcheck disable=SC2086  # flags are words
"$cxx" $flags "$out/probe.cc" -o "$out/probe" 2>"$out/log" ||
  cannot_run "$1" "$cxx can't build with it: $(tail -n 1 "$out/log")"
# A sanitizer's shadow memory has fixed addresses, which randomised ones may hit: from time to time,
# so randomisation goes off wherever that is allowed.
without_aslr="setarch $(uname -m) -R"
if ! $without_aslr "$out/probe" 2>"$out/log"; then
  without_aslr=
  "$out/probe" 2>"$out/log" || cannot_run "$1" "$(head -n 1 "$out/log")"
fi

build() {
  make --no-print-directory -s -j "$(nproc)" -f tests/cpp/Makefile CXX="$cxx" OUT="$out" FLAGS="$flags" "$@"
}

export ASAN_OPTIONS="detect_stack_use_after_return=1:${ASAN_OPTIONS:-}"
export UBSAN_OPTIONS="print_stacktrace=1:${UBSAN_OPTIONS:-}"
if [ "$1" = fuzz ]; then
  build fuzz COVERAGE=-fsanitize-coverage=trace-pc
  for target in routes links fluid; do
    $without_aslr "$out/${target}_fuzz" "${2:-60}" "${3:-$(date +%s)}" "$out/crash-$target" \
      "tests/cpp/corpus/$target"
  done
  exit 0
fi
build
[ "${2:-}" != build ] || exit 0
export TSAN_OPTIONS="halt_on_error=1:second_deadlock_stack=1:${TSAN_OPTIONS:-}"
for test in recorder_test operation_test fluid_test place_test game_test transport_test handover_test links_test; do
  $without_aslr "$out/$test"
done
# Built where <infiniband/verbs.h> is there.
if [ -x "$out/queue_pairs_test" ]; then
  $without_aslr "$out/queue_pairs_test"
fi
