#!/bin/bash
# Make the virtual environment for demo and tests, and install what a new machine lacks.
#   tests/bootstrap.sh VENV
# Megatron-Core needs Python 3.12. Where none is found the submit side is installed alone, and the stage tests and the
# demo say so. PYTHON names an interpreter to use.
set -euo pipefail
venv=$1

say() { printf 'bootstrap: %s\n' "$*" >&2; }

packages() { # Debian's, if this is Debian and root
    local missing
    mapfile -t missing < <(dpkg-query -W -f '${db:Status-Status} ${Package}\n' "$@" 2>&1 |
        sed -n -e 's/^not-installed //p' -e 's/^config-files //p' -e 's/.*no packages found matching //p')
    ((${#missing[@]})) || return 0
    say "installing ${missing[*]}"
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
}

python() { # print the interpreter to use
    local candidate
    for candidate in ${PYTHON:-} python3.12 ~/.pyenv/versions/3.12*/bin/python3.12 ~/.local/share/uv/python/cpython-3.12*/bin/python3.12; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    # uv brings a Python of its own where the machine may download one
    if /usr/bin/python3 -m venv "$venv.uv" && "$venv.uv/bin/pip" install -q uv && "$venv.uv/bin/uv" python install -q 3.12; then
        "$venv.uv/bin/uv" python find 3.12
    else
        say "no Python 3.12 here: Megatron-Core cannot be installed, only the submit side (set PYTHON to one)"
        echo /usr/bin/python3
    fi
    rm -rf "$venv.uv"
}

if ((EUID == 0)) && command -v apt-get >/dev/null; then
    packages git make python3 python3-venv shellcheck procps openssh-client tcsh fish
fi
interpreter=$(python)
rm -rf "$venv"
say "$("$interpreter" --version), into $venv; with torch this takes two minutes and 5.5 GB"
"$interpreter" -m venv "$venv"
extras="test"
[[ $("$interpreter" -c 'import sys; print(sys.version_info >= (3, 12))') != True ]] || extras="test,runtime"
"$venv/bin/pip" install --quiet --disable-pip-version-check -e "${BASH_SOURCE[0]%/*}/..[$extras]"
touch "$venv/ready"
