#!/usr/bin/env bash
# Test the images: build them, start two targets and two drafts, send a request, kill a target in the middle of an
# answer, add a third draft, send the request again, remove everything.
# Usage: docker/prove.sh [BASE_IMAGE]      (default: python:3.11.13-slim-bookworm)
# Environment: COMPOSE, the command (default: docker compose if there is one, else docker-compose); PORT and GRPC_PORT,
# free ports to publish (default: 30080, 30081); BUILD_NETWORK, the network of the build (default: default). Exits
# non-zero if any step fails. Containers, networks and volumes are removed in any case; the images stay.
set -euo pipefail
cd "$(dirname "$0")/.."
export BASE_IMAGE=${1:-python:3.11.13-slim-bookworm} PORT=${PORT:-30080} GRPC_PORT=${GRPC_PORT:-30081}
export TARGET_REPLICAS=2 DRAFT_REPLICAS=2
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
trap 'exit 1' INT TERM

# states SERVICE: health and restarts of each container
states() { compose ps -q "$1" | xargs docker inspect --format '{{.State.Health.Status}} {{.RestartCount}}' | sort; }

# wait_for SECONDS WHAT COMMAND...: until the command succeeds
wait_for() {
  local end=$((SECONDS + $1)) what=$2
  shift 2
  until "$@"; do
    if [ "$SECONDS" -ge "$end" ]; then log "$what: not in time"; return 1; fi
    sleep 1
  done
}
is_healthy() { ! states "$1" | grep -qv '^healthy '; }
came_back() { [ "$(states target | tr '\n' ' ')" = "healthy 0 healthy 1 " ]; }
# ready TARGETS DRAFTS: as many of them in the gateway's pools, all ready
ready() {
  curl --silent --max-time 5 "$url/health" | python3 -c '
import json, sys
body, wanted = json.load(sys.stdin), [int(word) for word in sys.argv[1:]]
states = [[one["state"] for one in body[pool]] for pool in ("targets", "drafts")]
sys.exit(states != [["ready"] * count for count in wanted])' "$1" "$2" 2>/dev/null
}

# busy: the address of the target that has a session
busy() {
  curl --silent --max-time 5 "$url/metrics" | grep '^outrider_engine_running_sessions{.*service="target".* 1.0$' |
    sed 's/.*address="\([0-9.]*\):.*/\1/' | grep .
}

# ask TOKENS
ask() {
  curl --silent --show-error --fail --max-time 240 "$url/v1/chat/completions" -H 'Content-Type: application/json' \
    -d '{"model": "default", "temperature": 0, "max_tokens": '"$1"', "ignore_eos": true,
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
wait_for 60 "two targets and two drafts in the pools" ready 2 2
summary+=("start of two targets and two drafts until healthy, model converted: $((SECONDS - start)) s")

first=$(ask 800)
[ -n "$first" ]
summary+=("answer: $(head -c 60 <<<"${first//$'\n'/ }")...")

log "killing the target that answers"
start=$SECONDS
answer=$(mktemp)
ask 800 >"$answer" &
asked=$!
address=$(wait_for 60 "a target that answers" busy)
for id in $(compose ps -q target); do
  if docker inspect --format '{{range .NetworkSettings.Networks}}{{.IPAddress}} {{end}}' "$id" | grep -qwF "$address"; then
    docker exec "$id" python -c 'import os; os.kill(-1, 9)' || true
  fi
done
wait "$asked"
[ "$first" = "$(cat "$answer")" ]
curl --silent "$url/metrics" | grep '^outrider_reopened_sessions_total{.*service="target"' | grep -qv ' 0.0$'
summary+=("its target killed, the same answer after $((SECONDS - start)) s")
wait_for 300 "target back" came_back
wait_for 60 "two targets and two drafts in the pools" ready 2 2
summary+=("target killed, restarted, in the pool: $((SECONDS - start)) s")

log "adding a draft"
start=$SECONDS
compose up -d --no-recreate --scale draft=3 target draft gateway
wait_for 300 "three drafts in the pool" ready 2 3
[ "$first" = "$(ask 800)" ]
summary+=("a third draft in the pool: $((SECONDS - start)) s; the same answer")

log "stopping"
start=$SECONDS
compose stop --timeout 20
for name in target draft gateway; do
  codes=$(compose ps -a -q "$name" | xargs docker inspect --format '{{.State.ExitCode}}' | sort -u)
  summary+=("$name ended with code $codes")
  [ "$codes" = 0 ]
done
summary+=("stop: $((SECONDS - start)) s")
