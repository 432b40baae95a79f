#!/usr/bin/env bash
# Trains on every host of a Cloud TPU slice, one process a host; JAX finds the others by itself.
#   configs/launch/tpu_pod.sh setup                # once: checkout and packages, on every host
#   configs/launch/tpu_pod.sh train [key=value ..] # and again after an interruption: it resumes
#   configs/launch/tpu_pod.sh stop                 # SIGTERM: a checkpoint is saved
set -euo pipefail

TPU_NAME=${TPU_NAME:-mpjax}
ZONE=${ZONE:-us-west4-a}
REPOSITORY=${REPOSITORY:-} # where every host clones from
PYTHON=${PYTHON:-python3.11}
CONFIG=${CONFIG:-configs/gpt_stdlib.yaml}
OUT=${OUT:-/mnt/runs/gpt} # on storage that every host mounts at the same place, such as Filestore

on_every_host() {
  gcloud compute tpus tpu-vm ssh "$TPU_NAME" --zone="$ZONE" --worker=all --command="$1"
}

case ${1:-} in
  setup)
    : "${REPOSITORY:?where the hosts clone from, as in REPOSITORY=https://example.com/mpjax.git}"
    on_every_host "sudo apt-get update && sudo apt-get install -y $PYTHON-venv &&
      git clone $(printf %q "$REPOSITORY") mpjax && cd mpjax &&
      $PYTHON -m venv .venv && .venv/bin/pip install -e '.[train]' 'jax[tpu]'"
    ;;
  train)
    arguments=$(printf ' %q' "$CONFIG" mesh.data=-1 "out=$OUT" "${@:2}")
    on_every_host "cd mpjax && exec .venv/bin/python scripts/train.py$arguments"
    ;;
  stop)
    on_every_host "pkill -TERM -f scripts/[t]rain.py"
    ;;
  *)
    echo "usage: $0 setup | train [key=value ...] | stop" >&2
    exit 2
    ;;
esac
