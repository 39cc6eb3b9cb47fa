# shellcheck shell=bash
# What the scripts of this folder share. Their argument is the bin folder of a venv with MPICH.

set -euo pipefail
name=test-$(basename "$0" .sh)
bin=$(realpath "$1")
cd "$(dirname "$0")/../.."
train=(-m mpirun traces/1f1b.json --model mpirun.examples.mlp:tiny) # for 4 ranks

fail() {
    echo "$name: $1" >&2
    exit 1
}

# needs PACKAGES TOOL...: fails without one of the tools, root or MPICH
needs() {
    local tool
    [ "$(id -u)" = 0 ] || fail "only root can do this"
    for tool in "${@:2}"; do
        [ "$(command -v "$tool")" ] || fail "there is no $tool: apt-get install --no-install-recommends $1"
    done
    "$bin/mpiexec" --version 2> /dev/null | grep HYDRA > /dev/null || fail "the mpiexec in $bin is not MPICH's"
}

# await SECONDS COMMAND...: until the command succeeds; fails if that takes longer
await() {
    local end=$((SECONDS + $1))
    until "${@:2}" 2> /dev/null; do
        [ $SECONDS -lt $end ] || return 1
        sleep 0.1
    done
}

ended() { ! kill -0 "$1"; }

now() { date +%s.%N; }

# since TIME: seconds
since() { awk "BEGIN { printf \"%.1f\", $(now) - $1 }"; }
