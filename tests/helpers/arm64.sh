#!/usr/bin/env bash
# Makes a folder with what runs redrafter's tests on an emulated 64-bit ARM CPU: root (Debian's Python), site (packages).
# Nothing is installed on this machine. Usage: arm64.sh FOLDER PYTHON, from the repository's root.
set -euo pipefail
folder=$(mkdir -p "$1" && realpath "$1")
python=$2
for tool in aarch64-linux-gnu-g++ qemu-aarch64 apt-get dpkg; do
    command -v $tool >/dev/null || { echo "no $tool here: apt install g++-aarch64-linux-gnu qemu-user (Debian)" >&2; exit 1; }
done

mkdir -p "$folder"/apt/{lists,archives}/partial
touch "$folder/apt/status" # nothing is installed, so every dependency is downloaded
apt() {
    apt-get -qq -o APT::Architecture=arm64 -o APT::Architectures=arm64 -o Dir::State="$folder/apt" \
        -o Dir::State::status="$folder/apt/status" -o Dir::Cache="$folder/apt" "$@"
}
apt update
apt install -y --download-only --no-install-recommends python3 libstdc++6
rm -rf "$folder/root"
for package in "$folder"/apt/archives/*.deb; do dpkg -x "$package" "$folder/root"; done

# All packages by name: pip would choose dependencies for this machine. torch 2.10.0 for ARM comes without CUDA.
version=$(readlink "$folder/root/usr/bin/python3")
grep -v '^torch==' constraints.txt >"$folder/constraints.txt"
rm -rf "$folder/site"
"$python" -m pip install --quiet --target "$folder/site" --no-deps --only-binary :all: --implementation cp \
    --python-version "${version#python}" --platform manylinux_2_28_aarch64 --platform manylinux2014_aarch64 \
    -c "$folder/constraints.txt" torch==2.10.0 accelerate annotated-doc anyio certifi click filelock fsspec h11 \
    hf-xet httpcore2 httpx2 huggingface_hub idna iniconfig jinja2 markdown-it-py markupsafe mdurl mpmath networkx numpy \
    packaging pluggy psutil pygments pytest pyyaml regex rich safetensors sentencepiece shellingham sympy tokenizers \
    tqdm transformers truststore typer typing-inspection typing_extensions
