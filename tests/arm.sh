#!/bin/sh
# The kernels' own tests on Arm: cross-compiled, run under qemu with and without dot products, and every output word's hash
# compared with this machine's. Without the tools it is skipped, and says so; ORK_REQUIRE_ARM=1 makes that a failure.
set -eu
cd "$(dirname "$0")/.."

missing() {
    command -v "${CMAKE:-cmake}" >/dev/null || echo cmake
    command -v make >/dev/null || echo make
    command -v c++ >/dev/null || echo g++
    command -v aarch64-linux-gnu-g++ >/dev/null || echo g++-aarch64-linux-gnu
    command -v qemu-aarch64 >/dev/null || echo qemu-user
}
if [ -n "$(missing)" ] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "installing $(missing | tr '\n' ' ')"
    log=$(mktemp)
    # shellcheck disable=SC2046
    { apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends $(missing); } >"$log" 2>&1 || tail -n 5 "$log" >&2
    rm -f "$log"
fi
if [ -n "$(missing)" ]; then
    echo "skipped: the Arm tests need $(missing | tr '\n' ' ')"
    [ "${ORK_REQUIRE_ARM:-0}" != 1 ] && exit 0 || exit 1
fi

build() {   # build <folder> [cmake options]
    folder=$1
    shift
    "${CMAKE:-cmake}" -S . -B "$folder" -DORK_PYTHON=OFF -DORK_TESTS=ON "$@" >/dev/null
    "${CMAKE:-cmake}" --build "$folder" --target test_kernels -j "$(nproc)" >"$folder/build.log" 2>&1 || { cat "$folder/build.log" >&2; exit 1; }
}
build build/native-tests
build build/aarch64 -DCMAKE_TOOLCHAIN_FILE="$PWD/cmake/aarch64.cmake"
native=build/native-tests/test_kernels
arm=build/aarch64/test_kernels

hashes() { awk -v isa="$1" '$2 == isa && $3 == "ok" && NF == 4 { print $1, $4 }' "$2"; }

echo "== qemu-aarch64 -cpu max: portable, neon and neondot"
qemu-aarch64 -cpu max $arm >build/aarch64/max.log && ok=1 || ok=0
cat build/aarch64/max.log
[ $ok = 1 ] || { echo "FAILED: see above" >&2; exit 1; }

echo "== qemu-aarch64 -cpu cortex-a53: no dot products"
if qemu-aarch64 -cpu cortex-a53 $arm --isa neondot >/dev/null 2>&1; then
    echo "FAILED: neondot is offered on a processor without dot products" >&2
    exit 1
fi
qemu-aarch64 -cpu cortex-a53 $arm --isa neon >build/aarch64/a53.log || { cat build/aarch64/a53.log; exit 1; }

echo "== the same words on both architectures"
$native --isa portable >build/aarch64/native.log
hashes portable build/aarch64/native.log >build/aarch64/native.hashes
[ -s build/aarch64/native.hashes ] || { echo "FAILED: no hashes" >&2; exit 1; }
compare() {   # compare <isa> <log> <cpu>
    if ! hashes "$1" "$2" | diff build/aarch64/native.hashes - >&2; then
        echo "FAILED: $1 on $3 differs from portable on $(uname -m)" >&2
        exit 1
    fi
    echo "$1 on $3 equals portable on $(uname -m): $(wc -l <build/aarch64/native.hashes) groups"
}
for isa in portable neon neondot; do compare $isa build/aarch64/max.log "-cpu max"; done
compare neon build/aarch64/a53.log "-cpu cortex-a53"
