#!/usr/bin/env bash
# Sets up CANN's environment, then becomes the command.
set -eo pipefail

root=/usr/local/Ascend
toolkit=${ASCEND_TOOLKIT_HOME:-}
driver=${ASCEND_DRIVER_HOME:-$root/driver}

# sources the first of some scripts that is there
source_first() {
    local script
    for script in "$@"; do
        if [ -f "$script" ]; then
            # shellcheck disable=SC1090
            source "$script"
            return
        fi
    done
}

if [ -n "$toolkit" ]; then
    # images set it to the directory of a version, such as ascend-toolkit/latest, beside or below which the scripts are
    source_first "$toolkit/set_env.sh" "$toolkit/../set_env.sh"
    source_first "$toolkit/../nnal/atb/set_env.sh" "$toolkit/../../nnal/atb/set_env.sh"
else
    # CANN is in cann since 8.5
    source_first "$root/cann/set_env.sh" "$root/ascend-toolkit/set_env.sh"
    source_first "$root/nnal/atb/set_env.sh"
fi
if [ -d "$driver/lib64" ]; then
    export LD_LIBRARY_PATH="$driver/lib64:$driver/lib64/driver:$driver/lib64/common${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
else
    echo "warning: no driver at $driver: mount the host's (docs/deployment.md), or no NPU can be used" >&2
fi
exec "$@"
