#!/usr/bin/env bash
# Test the images: build them, start the system, send a request, kill the target, send it again, remove everything.
# Usage: docker/prove.sh [BASE_IMAGE]      (default: python:3.11.13-slim-bookworm)
# Environment: COMPOSE, the command (default: docker compose if there is one, else docker-compose); PORT and GRPC_PORT,
# free ports to publish (default: 30080, 30081); BUILD_NETWORK, the network of the build (default: default). Exits
# non-zero if any step fails. Containers, networks and volumes are removed in any case; the images stay.
set -euo pipefail
cd "$(dirname "$0")/.."
export BASE_IMAGE=${1:-python:3.11.13-slim-bookworm} PORT=${PORT:-30080} GRPC_PORT=${GRPC_PORT:-30081}
if [ -z "${COMPOSE:-}" ]; then
  if docker compose version >/dev/null 2>&1; then COMPOSE="docker compose"; else COMPOSE="docker-compose"; fi
fi
compose() { $COMPOSE --project-name outrider-proof "$@"; }
url=http://127.0.0.1:$PORT
summary=()
log() { printf '%s %s\n' "$(date +%T)" "$*"; }

finish() {
  status=$?
  if [ "$status" -ne 0 ]; then compose ps -a || true; compose logs --tail 40 || true; fi
  compose down --volumes --timeout 20 >/dev/null 2>&1 || status=1
  printf '\n'
  printf '  %s\n' "${summary[@]}"
  if [ "$status" -eq 0 ]; then echo "PROVED"; else echo "FAILED"; fi
  exit "$status"
}
trap finish EXIT

container() { compose ps -q "$1"; }
state() { docker inspect --format '{{.State.Health.Status}} {{.RestartCount}}' "$(container "$1")"; }

# wait_for SECONDS WHAT COMMAND...: until the command succeeds
wait_for() {
  local end=$((SECONDS + $1)) what=$2
  shift 2
  until "$@"; do
    if [ "$SECONDS" -ge "$end" ]; then log "$what: not in time"; return 1; fi
    sleep 1
  done
}
is_healthy() { [[ "$(state "$1")" == "healthy "* ]]; }
came_back() { [[ "$(state target)" == "healthy $1" ]]; }

ask() {
  curl --silent --show-error --fail --max-time 120 "$url/v1/chat/completions" -H 'Content-Type: application/json' \
    -d '{"model": "default", "temperature": 0, "max_tokens": 24,
         "messages": [{"role": "user", "content": "Name three colours."}]}' |
    python3 -c 'import json, sys; print(json.load(sys.stdin)["choices"][0]["message"]["content"])'
}

log "building on $BASE_IMAGE"
start=$SECONDS
compose build target draft gateway
summary+=("build: $((SECONDS - start)) s")
for name in target draft gateway; do
  summary+=("image $name: $(($(docker image inspect --format '{{.Size}}' "outrider-$name") >> 20)) MiB")
done

log "the gateway's image has neither JAX nor PyTorch, and no container runs as root"
docker run --rm --entrypoint python outrider-gateway -c '
import importlib.util, os, pwd
assert not [name for name in ("jax", "torch") if importlib.util.find_spec(name)]
print("gateway runs as", pwd.getpwuid(os.getuid()).pw_name)'
for name in target draft gateway; do
  [ "$(docker run --rm --entrypoint id "outrider-$name" -u)" -ne 0 ]
done

log "starting"
start=$SECONDS
compose up -d target draft gateway
for name in target draft gateway; do wait_for 900 "$name healthy" is_healthy "$name"; done
summary+=("start until healthy, model converted: $((SECONDS - start)) s")

first=$(ask)
[ -n "$first" ]
summary+=("answer: ${first//$'\n'/ }")

log "killing the target"
start=$SECONDS
compose exec -T target python -c 'import os; os.kill(-1, 9)' || true
wait_for 300 "target back" came_back 1
summary+=("target killed, restarted, healthy: $((SECONDS - start)) s")
wait_for 60 "gateway healthy" is_healthy gateway
second=$(ask)
[ "$first" = "$second" ]
summary+=("the same answer after the kill")

log "stopping"
start=$SECONDS
compose stop --timeout 20
for name in target draft gateway; do
  code=$(docker inspect --format '{{.State.ExitCode}}' "$(compose ps -a -q "$name")")
  summary+=("$name ended with code $code")
  [ "$code" -eq 0 ]
done
summary+=("stop: $((SECONDS - start)) s")
