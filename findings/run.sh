#!/bin/sh
# Run every finding, and print whether it still holds. Exit code 1 if one does not.
cd "$(dirname "$0")" || exit 1
failed=0
for script in *.sh; do
    case "$script" in packages.sh | run.sh) continue ;; esac
    if sh "./$script" > "${TMPDIR:-/tmp}/finding.log" 2>&1; then
        printf 'holds    %s\n' "${script%.sh}"
    else
        printf 'changed  %s\n' "${script%.sh}"
        tail -n 5 "${TMPDIR:-/tmp}/finding.log" | sed 's/^/    /'
        failed=1
    fi
done
exit "$failed"
