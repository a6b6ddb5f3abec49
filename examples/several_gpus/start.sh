#!/usr/bin/env bash
# Start one engine per GPU, and nginx in front of them. Not run on GPUs yet, only with `--device cpu`.
#
#     examples/several_gpus/start.sh Qwen/Qwen3-0.6B
#     GPUS="0 2" LISTEN=8080 examples/several_gpus/start.sh Qwen/Qwen3-0.6B --api-key KEY
#     ENGINES=2 examples/several_gpus/start.sh demo --device cpu --threads 1    # without a GPU
#
# What follows the model is passed to each `nanoactor serve`. Ctrl-C or SIGTERM stops everything;
# answers that have begun are finished first.
set -euo pipefail

model=${1:?"usage: start.sh MODEL [OPTIONS OF nanoactor serve]"}
shift
listen=${LISTEN:-127.0.0.1:8000}
if [ -n "${ENGINES:-}" ]; then # that many, and no GPU is chosen for them
  gpus=()
  for ((engine = 0; engine < ENGINES; engine++)); do gpus+=(""); done
else
  read -ra gpus <<<"${GPUS:-$(nvidia-smi --query-gpu=index --format=csv,noheader | tr '\n' ' ')}"
fi

# The folder of sockets and of nginx's files; only its owner may enter.
run=$(mktemp -d "${TMPDIR:-/tmp}/nanoactor.XXXXXX")
pids=() front=""
stop() {
  trap '' INT TERM
  # Both finish what has begun: nginx at QUIT, engines at TERM.
  kill -QUIT $front 2>/dev/null || true
  kill -TERM "${pids[@]}" 2>/dev/null || true
  wait
  rm -rf "$run"
}
trap stop EXIT
trap 'exit 0' INT TERM

cp "$(dirname "$0")/nginx.conf" "$run/"
echo "listen $listen;" >"$run/listen.conf"
# Engines listen on Unix sockets, which no other user and no other machine can reach. An engine that
# is down refuses at once, so nginx need not remember it as failed.
for engine in "${!gpus[@]}"; do
  echo "server unix:$run/engine-$engine.sock max_fails=0;"
done >"$run/engines.conf"
# Started by root, nginx would serve as another user, who may not use the sockets.
user=$([ "$(id -u)" != 0 ] || echo "user root;")
nginx=(nginx -p "$run" -c "$run/nginx.conf" -g "daemon off; $user")
"${nginx[@]}" -t -q # what is wrong with it is said before models are loaded

# Run an engine, and start it again if it ends. `setsid` keeps the terminal's Ctrl-C from it: the
# second of two signals would cut off its answers.
keep_running() {
  local engine=$1 gpu=$2
  shift 2
  trap 'kill -TERM $(jobs -p) || true; wait; exit' TERM
  [ -z "$gpu" ] || export CUDA_VISIBLE_DEVICES=$gpu CUDA_DEVICE_ORDER=PCI_BUS_ID # as nvidia-smi
  while true; do
    setsid nanoactor serve "$model" --uds "$run/engine-$engine.sock" "$@" </dev/null &
    wait
    [ -e "$run/started" ] || exit 1 # an option or a model is wrong: it would only fail again
    echo "engine $engine has ended and is started again" >&2
    sleep 1
  done
}
for engine in "${!gpus[@]}"; do
  keep_running "$engine" "${gpus[engine]}" "$@" &
  pids+=($!)
done

for engine in "${!gpus[@]}"; do
  until curl -sf --unix-socket "$run/engine-$engine.sock" http://localhost/ready >/dev/null; do
    kill -0 "${pids[engine]}" || exit 1
    sleep 0.2
  done
done
touch "$run/started"
setsid "${nginx[@]}" &
front=$!
echo "${#gpus[@]} engines behind $listen, sockets in $run" >&2
wait "$front"
