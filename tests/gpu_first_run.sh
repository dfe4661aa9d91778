#!/bin/sh
# The first ten minutes on a GPU: sh tests/gpu_first_run.sh [--plan | --rehearse] [kernels] [costs] [training] [profile] [agreement]
#
# Without names of stages, all run in this order. --plan prints the commands and the seconds they may take, and runs
# nothing. --rehearse runs them on the CPU with a small model and ten times the seconds. A command that fails or is cut
# off does not stop the others, and one that has succeeded is skipped by the next call. docs/gpu.md explains stages and
# failures. Environment variables:
#   PYTHON  the interpreter, by default python3     ROWS  folder of rows and log, by default outputs/gpu_first_run
#   RUNS    folder of the run folders, by default outputs/gpu_first_run_folders
#   CORPUS  a text to train on, also compressed, by default enwik8, which is downloaded
set -u
cd "$(dirname "$0")/.." || exit
mode=run
case ${1-} in --plan | --rehearse)
  mode=${1#--}
  shift
  ;;
esac
stages=${*:-kernels costs training profile agreement}
python=${PYTHON:-python3}
rows=${ROWS:-outputs/gpu_first_run}
runs=${RUNS:-outputs/gpu_first_run_folders}
plain_corpus=$runs/corpus
first=mhsa,adaptive_span,all_attention,product_key_memory
swept=$(sed -n 's/^ *variant: //p' conf/sweep/leaderboard.yaml)
shipped=$(ls conf/variant | sed 's/.yaml$//' | grep -v '^mhsa_span_' | paste -sd,) # spans are set by the lengths

if [ "$mode" = rehearse ]; then
  device=cpu factor=10 tests="-k kinks" threads=1 lengths=32,64,128 middle=64 parallel=2 calls="rounds=1 seconds=0.01"
  small="model=tiny model.layers=2 model.d_model=32 model.heads=2" step_bytes=64 budget=8192
  batch="model.span=64 batch.streams=2 batch.segment=64 eval.streams=2 eval.segment=64" scored=1000
  ten_layers="model.layers=3 variant.attention.persistent.number=8"
else
  device=cuda factor=1 tests="-m gpu -n 12" threads=2 lengths=1024,8192,32768 middle=8192 parallel=11
  calls="rounds=1 seconds=0.25" small="model=small" step_bytes=32768 budget=12000000
  batch="model.span=2048 batch.streams=16 batch.segment=2048 eval.streams=16 eval.segment=2048" scored=1000000
  ten_layers="variant.attention.persistent.number=204" # 12.9 million parameters, as mhsa
fi
common="runtime=gpu runtime.device=$device model.dropout=0.0"

without() { # LIST NAMES: the names of the comma-separated LIST that are not in NAMES
  echo "$1" | tr , '\n' | grep -vxF "$(echo "$2" | tr , '\n')" | paste -sd,
}

stage() { # NAME SECONDS WHAT: whether the stage is asked for. Seconds that earlier stages have left are added.
  case " $stages " in *" $1 "*) ;; *) return 1 ;; esac
  limit=$(($2 * factor))
  printf '\n== %s, at most %s s: %s\n' "$1" "$limit" "$3"
  total=$((${total-0} + limit))
  end=$((${end-$(date +%s)} + limit))
}

job() { # NAME SECONDS COMMAND..: run a command within the time of its stage, unless it has succeeded before
  name=$1 seconds=$(($2 * factor))
  shift 2
  if [ "$mode" = plan ]; then
    printf '%4s s  %-24s %s\n' "$seconds" "$name" "$*"
    return
  fi
  if grep -qs "^$name	0	" "$rows/jobs.tsv"; then
    echo "$name: done before"
    return
  fi
  began=$(date +%s)
  [ $((end - began)) -lt "$seconds" ] && seconds=$((end - began))
  code=124 # as after a time limit
  if [ "$seconds" -ge 5 ]; then
    printf '\n=== %s: %s\n' "$name" "$*" >>"$rows/log.txt"
    timeout -k 10 "$seconds" "$@" >>"$rows/log.txt" 2>&1
    code=$?
  fi
  took=$(($(date +%s) - began))
  printf '%s\t%s\t%s\n' "$name" "$code" "$took" >>"$rows/jobs.tsv"
  case $code in
    0) echo "$name: $took s" ;;
    124 | 137 | 143) echo "$name: CUT after $took s" ;;
    *)
      echo "$name: FAILED with exit code $code after $took s"
      tail -n 3 "$rows/log.txt"
      ;;
  esac
  return $code
}

costs() { # NAME SECONDS VARIANTS LENGTHS COMPILE [PARALLEL]: rows of bench.cost
  # A process that compiles in itself leaves the other cores to the processes beside it.
  job "costs_$1" "$2" env TORCHINDUCTOR_COMPILE_THREADS=1 "$python" -m bench.cost $common $small mode=cold "lengths=[$4]" \
    step_bytes=$step_bytes "timed=[train,evaluate,generate,generate_64]" "backends=[auto]" $calls runtime.threads=$threads "compile=[$5]" \
    parallel="${6-$parallel}" "variants=[$3]" rows="$rows/cost.jsonl"
}

train() { # FOLDER BYTES SECONDS COMPILE VARIANT WORD..: a run, whose row is written at once
  folder=$runs/$1 bytes=$2 seconds=$3 compile=$4 variant=$5
  shift 5
  job "train_$(basename "$folder")" "$seconds" "$python" train.py variant="$variant" $common $small $batch runtime.compile="$compile" \
    $corpus budget.bytes="$bytes" eval.every=0 eval.bytes=$scored eval.windows=false checkpoint.every_seconds=null outputs="$folder" "$@"
}

keep_run() { # NAME WORD..: append the row of a finished run, as bench.evidence writes it, or the record of one that was cut off
  [ "$mode" = plan ] && return
  folder=$runs/$1
  shift
  if [ -f "$folder/latest/summary.json" ]; then
    grep -qs "\"cell\": \[\"variant=$1\"" "$rows/training.jsonl" || "$python" -c 'import json, sys
print(json.dumps({"cell": [f"variant={sys.argv[2]}", *sys.argv[3:]], "summary": json.load(open(sys.argv[1])), "record": []}))' \
      "$folder/latest/summary.json" "$@" >>"$rows/training.jsonl"
  else
    tail -n 3 "$folder/latest/record.jsonl" >>"$rows/cut.jsonl"
  fi
}

machine() { # print versions and driver as JSON, and fail without a package, a device or a current list of checked files
  "$python" -c 'import json, sys
import hydra, pydantic, torch, wandb
from bench.shipped import SHIPPED, listing
from harness.device.torch_settings import configure_torch
from harness.plan.settings import RuntimeSettings
from omegaconf import OmegaConf
torch.ones(1, device=sys.argv[1])
settings = OmegaConf.to_container(OmegaConf.load("conf/runtime/default.yaml")) | {"device": sys.argv[1]}
print(json.dumps(configure_torch(RuntimeSettings(**settings)).describe(), indent=1))
if json.loads(SHIPPED.read_text()) != listing():
    sys.exit("variants/ has changed: run python -m bench.shipped, or each run checks its mechanism")' "$device"
}

compare() { # NAME WORD..: one of the runs that stage agreement compares; recompilations go to a file
  log=$runs/$1.log name=$1
  shift
  job "agreement_$name" 100 env TORCH_LOGS=recompiles TORCH_LOGS_OUT="$log" "$python" train.py $ours data=stdlib \
    budget.steps=$steps variant.groups.spans.lr_scale=30 checkpoint.every_seconds=null eval.bytes=100000 outputs="$runs/$name" "$@"
}

if [ "$mode" != plan ]; then
  mkdir -p "$rows" "$runs"
fi
corpus="data=enwik8"
file=${CORPUS-}
if [ -f "$file" ]; then
  name=$(basename "$file")
  corpus="data=file data.path=$plain_corpus/${name%.*}"
  if [ "$mode" != plan ]; then # unpacked once, while the first stage runs
    mkdir -p $plain_corpus
    "$python" -c 'import pathlib, sys
from harness.data.sources import OPENERS, unpack
source, target = map(pathlib.Path, sys.argv[1:])
target.write_bytes(unpack(source) if source.suffix in OPENERS else source.read_bytes())' "$file" "${corpus##*=}" &
  fi
fi

if stage kernels 60 "versions, driver, and the kernels against float64"; then
  if [ "$mode" != plan ]; then
    machine >"$rows/machine.json" || exit 1 # nothing else could run
    cat "$rows/machine.json"
  fi
  # These tests need no kernel of the CPU: without a C++ compiler none is compiled. Triton compiles with the C compiler.
  job kernels 60 env CXX=false "$python" -m pytest $tests -p no:cacheprovider tests/variants/test_triton_window.py
fi

if stage costs 240 "training step, prefill, generated byte and memory of every mechanism"; then
  others=$(without "$swept,mhsa_alibi,linear_decay,performer_decay,dynamic_span" $first)
  costs first 120 $first $lengths false,true 8
  costs middle 110 "$others" $middle false
  costs all_lengths 150 "$others" $lengths false 9
  costs combinations 100 "$(without "$shipped" "$first,$others")" $middle false
  costs compiled 240 "$others" $middle true 8
fi

wait # for the corpus
if stage training 380 "12 MB with 12.9 million parameters, compiled"; then
  variants="adaptive_span mhsa all_attention_10 product_key_memory gated_delta mhsa_alibi"
  for variant in $variants; do # all compile at the same time: the graphs are cached for the runs that are timed
    words=
    [ "$variant" = all_attention_10 ] && words=$ten_layers
    if [ "$mode" = plan ] || [ "$mode" = rehearse ]; then
      [ "$variant" != adaptive_span ] && continue
    fi
    train "warm_$variant" $((budget / 100)) 100 true "$variant" $words eval.bytes=40000 &
  done
  wait
  for variant in $variants; do
    words=
    [ "$variant" = all_attention_10 ] && words=$ten_layers
    compile=true
    grep -qs "^train_warm_$variant	[1-9]" "$rows/jobs.tsv" && compile=false
    train "$variant" $budget 60 $compile "$variant" $words
    keep_run "$variant" "$variant" model=small "budget.bytes=$budget"
  done
fi

if stage profile 60 "launches, kernels and gaps of a training step"; then
  for compile in false true; do
    for variant in adaptive_span mhsa; do
      job "profile_${variant}_$compile" 40 "$python" -m tests.support.gpu_profile "$rows/profile.jsonl" variant=$variant $common $small $batch \
        data=synthetic_text runtime.compile=$compile
    done
  done
fi

if stage agreement 480 "contract, predicted memory, and compiled runs against an eager one"; then
  ours="variant=adaptive_span runtime.deterministic=true runtime.device=$device model.dropout=0.0 batch.carry=true" steps=300
  ours="$ours model=base"
  [ "$mode" = rehearse ] && steps=8 && ours="$ours $small model.span=64"
  job agreement_check 60 "$python" -m bench.check variant=adaptive_span runtime.device=$device position=rotary model.cache=kv
  job agreement_fit 60 sh -c "\"\$0\" -m bench.fit $ours >'$runs/fit.txt'" "$python"
  compare compiled runtime.compile=true
  compare again runtime.compile=true
  compare eager runtime.compile=false
  job agreement_rows 20 "$python" -m tests.support.gpu_rows check "$runs" "$device"
  # At dynamo's limit of 8 recompilations, a function runs eagerly from then on.
  job agreement_recompilations 10 sh -c "grep -o 'Recompiling function .*' '$runs/compiled.log' | sort | uniq -c | awk '\$1 >= 8 {exit 1} 1'"
  if [ "$mode" = plan ] || [ "$("$python" -c 'import torch; print(torch.cuda.device_count())')" -ge 2 ]; then
    job agreement_processes 60 "$python" -m torch.distributed.run --nproc-per-node 2 train.py $ours data=stdlib budget.steps=20 eval.bytes=100000 outputs="$runs/two"
  fi
fi

if [ "$mode" = plan ]; then
  printf '\nat most %s s in all; rows go to %s\n' "${total-0}" "$rows"
  exit
fi
printf '\n== rows in %s\n' "$rows"
wc -l "$rows"/*.jsonl
! grep -v '	0	' "$rows/jobs.tsv" # commands that were cut or failed: the exit code is 1
