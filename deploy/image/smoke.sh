#!/usr/bin/env bash
# Builds the CPU image and continues a text through it: target, draft and orchestrator, each from the image, without Ray.
# `deploy/image/smoke.sh [FOLDER]` keeps images and layers in FOLDER. Where Debian's image cannot be pulled the base is
# made by mmdebstrap. What pip of this machine needs to reach packages (PIP_CERT, PIP_FIND_LINKS) is lent to the build.
set -euo pipefail
cd "$(dirname "$0")/../.."
store=$(realpath -m "${1:-.deploy/images}")
base=docker.io/library/debian:bookworm-slim
own_base=localhost/debian:bookworm-slim

skip() { echo "image-smoke: skipped: $1"; exit 0; }
command -v buildah > /dev/null || skip "buildah is not installed"
[ "$(id -u)" = 0 ] || skip "buildah --isolation chroot needs root here"
work=$(mktemp -d)
buildah() { command buildah --root "$store" --runroot "$store.run" --storage-driver "${STORAGE_DRIVER:-overlay}" "$@"; }
container=
stop() {
    for pid in $(jobs -p); do kill -- "-$pid" 2> /dev/null || true; done  # a job's whole group: buildah passes nothing on
    wait
    [ -z "$container" ] || buildah rm "$container" > /dev/null
    findmnt --raw --noheadings --output TARGET | grep "^$store" | sort --reverse | xargs --no-run-if-empty umount
    rm -rf "$work"
}
trap stop EXIT

if ! buildah inspect --type image "$own_base" > /dev/null 2>&1; then
    if ! timeout 120 command buildah --root "$store" --runroot "$store.run" pull --quiet "$base" > /dev/null 2>&1; then
        command -v mmdebstrap > /dev/null || skip "neither is $base to be had, nor is mmdebstrap installed"
        mmdebstrap --quiet --variant=minbase bookworm "$work/root.tar"
        fresh=$(buildah from scratch)
        buildah add --quiet "$fresh" "$work/root.tar" / > /dev/null
        buildah commit --quiet --rm "$fresh" "$own_base" > /dev/null
        base=$own_base
    fi
else
    base=$own_base
fi

lent=()
[ -z "${PIP_CERT:-}" ] || lent+=(--volume "$PIP_CERT:/run/pip/ca.crt:ro" --build-arg "PIP_ARGS=--cert /run/pip/ca.crt")
if [ -n "${PIP_FIND_LINKS:-}" ]; then
    lent+=(--volume "$PIP_FIND_LINKS:/run/pip/wheels:ro" --build-arg TORCH_WHEELS=/run/pip/wheels)
fi
buildah bud --quiet --layers --isolation chroot --format docker --build-arg "BASE=$base" "${lent[@]}" \
    --build-arg "REVISION=$(git rev-parse HEAD 2> /dev/null || echo unknown)" \
    --file deploy/image/Dockerfile --tag specahead:cpu . > /dev/null
echo "image-smoke: built specahead:cpu"

container=$(buildah from specahead:cpu)
inside() { buildah run --isolation chroot --user 10001:10001 "$container" -- "$@"; }
writable=$(inside find / -xdev '(' -path /proc -o -path /dev -o -path /sys ')' -prune -o -writable -not -type l -print \
    2> /dev/null || true)
for path in $writable; do
    case $path in
        /cache | /tmp | /var/tmp | /run/lock) ;;
        *) echo "image-smoke: its user may write to $path" >&2; exit 1 ;;
    esac
done
[ -n "$writable" ] && echo "image-smoke: its user may write nowhere but to $(echo "$writable" | paste -sd ' ')"
set -m  # each job gets a group of its own
{
    inside env OMP_NUM_THREADS=1 python -m target_service --port 50152 &
    inside env OMP_NUM_THREADS=1 python -m draft_service --port 50153 --target 127.0.0.1:50152 &
    inside python -m orchestrator.launch --target-address 127.0.0.1:50152 --draft-address 127.0.0.1:50153 \
        --timeouts '{"connect": 120}' --grpc-port 50151 --port 50180 &
} > "$work/services.log" 2>&1
for port in 50152 50153 50151; do
    for _ in $(seq 120); do
        if answer=$(inside specahead health "127.0.0.1:$port" 2>&1); then break; fi
        sleep 1
    done
    [ -z "$answer" ] || { cat "$work/services.log"; echo "image-smoke: $answer" >&2; exit 1; }
done
echo "image-smoke: $(inside specahead generate --url http://127.0.0.1:50180 --prompt "The old man looked at the sea and" \
    --max-tokens 32 --temperature 0 --exactness approximate --json)" | tee "$work/answer"
grep -q '"completion_tokens": 32' "$work/answer"

# What is in it, Debian's packages and Python's.
syft=$(PATH="$PWD/.deploy/tools/bin:$PATH" command -v syft) || { echo "image-smoke: no SBOM, syft is not installed"; exit 0; }
SYFT_CHECK_FOR_APP_UPDATE=false "$syft" scan --quiet "dir:$(buildah mount "$container")" --source-name specahead \
    --output "cyclonedx-json=$store/sbom.cdx.json"
for name in libc6 python3.11-minimal torch ray specahead; do
    grep -q "\"name\": *\"$name\"" "$store/sbom.cdx.json" || { echo "image-smoke: no $name in the SBOM" >&2; exit 1; }
done
echo "image-smoke: wrote $store/sbom.cdx.json"
