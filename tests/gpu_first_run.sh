#!/bin/sh
# The first ten minutes on a GPU, in an environment with the test extra: sh tests/gpu_first_run.sh
# It stops at the first line that fails. docs/gpu.md says what each line means and what to do when it fails.
# A rehearsal on a CPU: DEVICE=cpu STEPS=8 sh tests/gpu_first_run.sh model=tiny model.layers=1 model.span=64
set -eu
device=${DEVICE:-cuda}
rows=outputs/gpu_first_run
size="runtime.device=$device model.dropout=0.0 ${*:-model=base}"
ours="variant=adaptive_span runtime.deterministic=true $size"

stage() { printf '\n== %s\n' "$1"; }
train() { # NAME WORD..: a run in a folder of its own; recompilations go to a file
  folder=$rows/$1
  shift
  TORCH_LOGS=recompiles TORCH_LOGS_OUT=$folder.log python train.py $ours batch.carry=true data=stdlib budget.steps=${STEPS:-300} \
    variant.groups.spans.lr_scale=30 checkpoint.every_seconds=null eval.bytes=100000 outputs="$folder" "$@"
}

rm -rf "$rows"
mkdir -p "$rows"
if [ "$device" = cuda ]; then
  stage "driver and device (seconds)"
  nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
  python -c 'import torch; torch.ones(1, device="cuda"); print(torch.__version__, torch.cuda.get_device_name())'
fi
stage "host compiler and Python.h, for torch.compile and Triton (seconds)"
c++ --version
python -c 'import pathlib, sysconfig; assert pathlib.Path(sysconfig.get_path("include"), "Python.h").is_file(), "no Python.h"'
stage "kernels against float64 (2 minutes)"
if [ "$device" = cuda ]; then python -m pytest -m gpu; fi
stage "one variant: contract, then logits and gradients on the device against float64 (1 minute)"
python -m bench.check variant=adaptive_span runtime.device="$device" position=rotary model.cache=kv
stage "memory as predicted (1 minute)"
python -m bench.fit $ours largest=[] batch.carry=true outputs=$rows/fit
stage "300 steps three times, spans moving fast: compiled, compiled again, eager (4 minutes)"
train compiled runtime.compile=true
train again runtime.compile=true
train eager runtime.compile=false
stage "utilisation (1 minute)"
python -m bench.cost $size variant=mhsa lengths=[512] mode=stream streams=16 backends=[auto] rounds=3 rows=$rows/cost.jsonl
if [ "$(python -c 'import torch; print(torch.accelerator.device_count())')" -ge 2 ]; then
  stage "two processes (1 minute)"
  torchrun --nproc-per-node 2 train.py $ours data=stdlib budget.steps=20 eval.bytes=100000 outputs=$rows/two
fi
stage "what the runs say of each other"
python -m tests.gpu_rows "$rows" "$device"
