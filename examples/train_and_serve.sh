#!/bin/sh
# From a model to a server with a drafter of its own: examples/train_and_serve.sh MODEL FOLDER [options of train]
#
#   examples/train_and_serve.sh my-fine-tune my-drafter              about 20 minutes, for a first impression
#   examples/train_and_serve.sh my-fine-tune my-drafter --updates 8000
#
# MODEL is a Hugging Face id or a folder, FOLDER is where the drafter goes. PORT is the server's (8000).
set -eu
model=$1 folder=$2
shift 2
[ $# -gt 0 ] || set -- --minutes 20

redrafter train --model "$model" --out "$folder" "$@"   # the same command goes on where it was stopped
redrafter compare --model "$model" --drafter "$folder" --max-new-tokens 32 "Why is the sky blue?"

port=${PORT:-8000}
redrafter serve --model "$model" --drafter "$folder" --name my-model --port "$port" &
server=$!
trap 'kill "$server"' EXIT
until curl --silent --fail --output /dev/null "http://127.0.0.1:$port/health"; do
    kill -0 "$server"
    sleep 1
done
curl --silent "http://127.0.0.1:$port/v1/completions" -H 'Content-Type: application/json' \
    -d '{"model": "my-model", "prompt": "Why is the sky blue?", "max_tokens": 32, "temperature": 0}'
echo
[ -n "${ONCE:-}" ] || wait "$server"   # ONCE=1: one answer, then end
