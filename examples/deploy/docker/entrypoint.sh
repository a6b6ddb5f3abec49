#!/bin/bash
# Prepares the environment, then becomes `nanoactor`, with the container's arguments.
set -euo pipefail

# As a file, the key is in neither `docker inspect` nor a manifest. The server takes the variable
# out of its environment, so that no other process inherits it.
if [[ -n "${NANOACTOR_API_KEY_FILE:-}" ]]; then
  NANOACTOR_API_KEY="$(<"${NANOACTOR_API_KEY_FILE}")"
  export NANOACTOR_API_KEY
fi

# CANN's script reads variables that may be unset.
if [[ -n "${ASCEND_SET_ENV:-}" ]]; then
  set +u
  # shellcheck disable=SC1090
  source "${ASCEND_SET_ENV}"
  set -u
fi

# A volume hides what the image has in its place, and Numba only uses a folder that it may write.
# So the kernels that were compiled with the image are copied, as a whole or not at all: another
# container may use the same volume.
kernels=/usr/share/nanoactor/numba
if [[ -d "${kernels}" && ! -e "${NUMBA_CACHE_DIR}" ]]; then
  if copy="$(mktemp --directory "${NUMBA_CACHE_DIR}.XXXXXX")"; then
    cp --recursive "${kernels}/." "${copy}"
    mv --no-target-directory "${copy}" "${NUMBA_CACHE_DIR}" 2>/dev/null || rm -rf "${copy}"
  else
    echo "nanoactor: ${NUMBA_CACHE_DIR} cannot be written: kernels are compiled at the start" >&2
  fi
fi

exec nanoactor "$@"
