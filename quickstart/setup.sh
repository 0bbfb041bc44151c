# Sourced by quickstart/run.sh and tests/run.sh from the repository root, with a requirements file as argument:
# puts the active virtual environment, or else .venv in the repository, first on PATH with those packages installed.

requirements=$1
if [[ -n "${VIRTUAL_ENV:-}" ]]; then
    venv=$VIRTUAL_ENV
    echo "setup: using the active virtual environment $venv"
else
    venv=$PWD/.venv
    if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then # not there, or half made
        python=${PYTHON:-python3}
        "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
            echo "error: $python is older than Python 3.11; name a newer one: PYTHON=python3.12 bash $0" >&2
            exit 1
        }
        echo "setup: making the virtual environment $venv"
        "$python" -m venv "$venv"
    fi
fi
export PATH="$venv/bin:$PATH"

# the stamp holds the checksum of what was installed last; pip runs only when the files ask for something else
stamp=$venv/installed-requirements
checksum=$(cat requirements.txt "$requirements" | cksum)
if [[ "$(cat "$stamp" 2>/dev/null)" != "$checksum" ]]; then
    "$venv/bin/python" -m pip --version >/dev/null 2>&1 || "$venv/bin/python" -m ensurepip || {
        echo "error: $venv has no pip, and ensurepip cannot add it: make it with python -m venv" >&2
        exit 1
    }
    echo "setup: pip install -r $requirements (into $venv)"
    rm -f "$stamp"
    python -m pip install --quiet --disable-pip-version-check -r "$requirements"
    echo "$checksum" >"$stamp"
fi

# glibc maps large tensors afresh each time; huge pages make that cheap on Linux
export GLIBC_TUNABLES=${GLIBC_TUNABLES:-glibc.malloc.hugetlb=1}
