# Sourced by each script: `python_with PIN...` prints a Python that has these packages, and nothing of this repository.
# The environments are kept below a temporary folder, so that scripts with equal pins install once.
set -eu
cd "${TMPDIR:-/tmp}"

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
