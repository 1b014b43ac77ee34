# Shared by launch/quickstart and launch/test; sourced by bash, never run.
# The user's mistakes and the machine's shortcomings end in one line and exit code 2.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
VENV=${VENV:-$ROOT/.venv}
[[ $VENV == /* ]] || VENV=$PWD/$VENV
NEED_GB=${LARGETRAIN_NEED_GB:-9} # the CUDA build of torch with its libraries takes about 7 GB, pip's unpacking the rest

fail() {
    printf '%s: %s\n' "${0##*/}" "$*" >&2
    exit 2
}

# stage TITLE COMMAND...: a line before, a line with the seconds after; a failing command ends the script.
stage() {
    local title=$1 start=$SECONDS status=0
    shift
    printf '\n==> %s\n' "$title"
    "$@" || status=$?
    if ((status)); then
        printf '<== %s: FAILED with exit code %d after %d s\n' "$title" "$status" $((SECONDS - start)) >&2
        exit "$status"
    fi
    printf '<== %s: %d s\n' "$title" $((SECONDS - start))
}

# Sets PYTHON to the first interpreter that is new enough; $PYTHON from the outside is tried alone.
find_python() {
    local name found="" names=(python3 python3.13 python3.12 python3.11 python3.10 python)
    [[ -n ${PYTHON:-} ]] && names=("$PYTHON")
    for name in "${names[@]}"; do
        command -v "$name" >/dev/null || continue
        if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
            "$name" -c 'import ensurepip, venv' 2>/dev/null ||
                fail "$name has no venv module; install it (Debian, Ubuntu: apt-get install python3-venv)"
            PYTHON=$name
            return
        fi
        found="$found$name is $("$name" -c 'import platform; print(platform.python_version())' 2>/dev/null || echo broken), "
    done
    fail "needs Python 3.10 or newer (${found:-no python3 on PATH, }set PYTHON=/path/to/python to choose one)"
}

need_compiler() {
    command -v "${CXX:-c++}" >/dev/null ||
        fail "no C++ compiler: DeepSpeed compiles its operators here; install g++ (Debian, Ubuntu: apt-get install g++) or set CXX"
}

# need_disk DIRECTORY: $NEED_GB free on the file system that holds it, or will.
need_disk() {
    local directory=$1 free_kb
    while [[ ! -e $directory ]]; do directory=$(dirname "$directory"); done
    free_kb=$(df -Pk "$directory" | awk 'NR == 2 {print $4}')
    ((free_kb >= NEED_GB * 1024 * 1024)) ||
        fail "too little disk at $directory: $((free_kb / 1024 / 1024)) GB free, $NEED_GB GB needed for the environment;" \
            "free some, or set VENV=/roomy/folder"
}

# What an environment was installed from: another answer means that pip has to run again.
fingerprint() {
    printf '%s\n' "$1" "$ROOT" "$(<"$ROOT/setup.cfg")" | cksum
}

# installed EXTRAS FILE: whether FILE says that this checkout was installed with EXTRAS, or with dev and so with more
installed() {
    [[ -f $2 ]] && [[ $(<"$2") == "$(fingerprint "$1")" || $(<"$2") == "$(fingerprint "[dev]")" ]]
}

# make_venv EXTRAS ("" or "[dev]"): $VENV holds a complete installation of this checkout afterwards.
# An installation that was cut short is recognised by its note and made anew; a folder that
# was not made here is never removed.
make_venv() {
    local extras=$1 note=$VENV/.largetrain-installing done=$VENV/.largetrain-installed
    if [[ ! -f $note ]] && installed "$extras" "$done" && "$VENV/bin/python" -c '' 2>/dev/null; then
        printf '%s is complete\n' "$VENV"
        return
    fi
    find_python
    if [[ -f $note ]]; then
        printf '%s: an earlier installation was cut short; making it anew\n' "$VENV"
        rm -rf "$VENV"
    elif [[ -e $VENV ]] && ! "$VENV/bin/python" -c '' 2>/dev/null; then
        [[ -f $done ]] || fail "$VENV exists and is not a working Python environment; move it away or set VENV"
        printf '%s: its Python is gone; making it anew\n' "$VENV"
        rm -rf "$VENV"
    fi
    [[ -f $done ]] || need_disk "$VENV"
    mkdir -p "$VENV"
    : >"$note"
    [[ -x $VENV/bin/python ]] || stage "environment $VENV with $("$PYTHON" --version)" "$PYTHON" -m venv "$VENV"
    stage "pip install largetrain$extras (a few minutes, about 3 GB to download)" pip_install "$ROOT$extras"
    fingerprint "$extras" >"$done"
    rm -f "$note"
}

pip_install() {
    local log=$VENV/pip.log
    rm -f "$log"
    "$VENV/bin/python" -m pip install --disable-pip-version-check --log "$log" --retries "${PIP_RETRIES:-2}" -e "$1" && return
    # pip may keep the reason to itself and only find no version at all of what it needs first, the build backend
    local unreachable='NewConnectionError|NameResolutionError|ConnectTimeout|ProxyError|Max retries exceeded'
    if grep -qE "$unreachable|Network is unreachable|requirement setuptools.*from versions: none" "$log"; then
        fail "no network: pip cannot reach its package index (settings: pip config list; log: $log)"
    elif grep -q 'No space left on device' "$log"; then
        fail "the disk is full: free some space and start again (log: $log)"
    fi
    fail "pip install failed; the reason stands above and in $log"
}
