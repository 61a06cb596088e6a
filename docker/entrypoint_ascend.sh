#!/usr/bin/env bash
# Sets up CANN's environment, then becomes the command.
set -eo pipefail

toolkit=${ASCEND_TOOLKIT_HOME:-/usr/local/Ascend/ascend-toolkit}
driver=${ASCEND_DRIVER_HOME:-/usr/local/Ascend/driver}
for script in "$toolkit/set_env.sh" "$toolkit/../nnal/atb/set_env.sh"; do
    # shellcheck disable=SC1090
    if [ -f "$script" ]; then source "$script"; fi
done
if [ -d "$driver/lib64" ]; then
    export LD_LIBRARY_PATH="$driver/lib64:$driver/lib64/driver:$driver/lib64/common${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
else
    echo "warning: no driver at $driver: mount the host's (docs/deployment.md), or no NPU can be used" >&2
fi
exec "$@"
