#!/bin/sh
# Run every finding, and print whether it still holds. Exit code 1 if one does not.
# A script exits with 77 and a sentence if this machine lacks what it needs.
cd "$(dirname "$0")" || exit 1
failed=0
for script in *.sh; do
    case "$script" in packages.sh | run.sh) continue ;; esac
    code=0
    sh "./$script" > "${TMPDIR:-/tmp}/finding.log" 2>&1 || code=$?
    if [ "$code" = 0 ]; then
        printf 'holds    %s\n' "${script%.sh}"
    elif [ "$code" = 77 ]; then
        printf 'skipped  %s: %s\n' "${script%.sh}" "$(tail -n 1 "${TMPDIR:-/tmp}/finding.log")"
    else
        printf 'changed  %s\n' "${script%.sh}"
        tail -n 5 "${TMPDIR:-/tmp}/finding.log" | sed 's/^/    /'
        failed=1
    fi
done
exit "$failed"
