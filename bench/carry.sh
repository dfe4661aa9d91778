#!/bin/sh
# What a GPU machine without a network must be brought, into .carry/ (ignored by git): wheels for Python 3.12 on x86-64 of what
# its image lacks, and the corpus.
#
#     sh bench/carry.sh path/to/mwiki8.xz          (PYTHON=... chooses the Python whose pip is used)
#
# There, before anything else:
#
#     python3 -m pip install -q --no-index --no-deps --no-compile --target SITE .carry/wheels/*.whl && export PYTHONPATH=SITE
#
# torch, triton, numpy, einops, rich, matplotlib, pyyaml, pytest and hypothesis are on that image. wandb is left out: with
# record.wandb.mode=disabled nothing asks for it. Versions are those of constraints.txt.
set -eu
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
corpus=${1:-}
limit_mib=60 # of the 64 that travel, code included

mkdir -p .carry/wheels
rm -f .carry/wheels/*.whl

version() {
    sed -n "s/^$1==//p" constraints.txt
}

wheel() {
    "$python" -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
        --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
        -d .carry/wheels "$1"
}

for name in hydra-core omegaconf x-transformers einx loguru torch-einops-utils; do
    wheel "$name==$(version $name)"
done
wheel frozendict # of einx
# Hydra's parser is published as source only; it is plain Python, so the wheel made here serves there.
"$python" -m pip wheel -q --no-deps --no-cache-dir -w .carry/wheels "antlr4-python3-runtime==$(version antlr4-python3-runtime)"

if [ -n "$corpus" ]; then
    cp -f "$corpus" .carry/
fi

size_mib=$(du -sm .carry | cut -f1)
ls -l .carry .carry/wheels
echo ".carry: $size_mib MiB"
if [ "$size_mib" -gt "$limit_mib" ]; then
    echo "more than $limit_mib MiB: it will not travel" >&2
    exit 1
fi
