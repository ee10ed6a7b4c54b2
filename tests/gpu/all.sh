#!/usr/bin/env bash
# Runs what there is for a GPU, from the project's root, each part with its own log and limit, all within ten minutes:
#   bash tests/gpu/all.sh OUT [PART...]        OUT is the folder for the logs; by default the first seven parts
#   tests    pytest tests/gpu without those of the next parts, SIDE (4) at a time   tests.log, tests.xml
#   alone    pytest tests/gpu -m alone: those that measure time or memory, one at a time     alone.log, alone.xml, partitions.json
#   felt     pytest on change, isolation and confinement                    felt.log, felt.xml, felt/partitions.json
#   memcheck tests/gpu/sanitize.sh                                          memcheck.log, memcheck.tests.log
#   two      pytest tests/gpu/test_two_devices.py: skipped where fewer are seen   two.log, two.xml, two_devices.json
#   mps      pytest tests/gpu/test_mps*.py and test_loading.py, apart from the rest as their faults end all of MPS   mps.log, mps.xml, mps_server.json
#   soak     python -m benchmarks.soak for 8 minutes                        soak.log, soak.json
#   prove    python -m tests.gpu.proving: greenlane prove of two tenants    prove.log, prove.json
#   change   python -m benchmarks.change                                    change.log, change.json
#   apart    python -m benchmarks.apart: 14 tenants of a granule, in one device process and in one each      apart.log, apart.json
#   fence    python -m benchmarks.isolation --memory --fence FENCE (0.2): hogs with a fence, and then without      fence.log, fence.json
#   fence-prove  python -m tests.gpu.proving --memory twice, without a fence and with one   fence-prove.log, fence-prove*.json
#   starting, lending, isolation: the benchmark of that name, each by itself    starting.log, ... isolation.json
# With MPS=on the parts tests, alone, felt and two run those of their tests that start servers as processes, with a device process
# for each tenant, which soak, prove, fence, fence-prove, change and lending have then as well. Their files have names as felt-mps.log. Without it all of
# these have mps = "off", which is not the default; a server with the default is among what the part mps starts.
# The parts fence and fence-prove take 330 s each, unless LIMIT_fence and LIMIT_fence_prove say otherwise; FENCE is the rate.
# A part may take LIMIT_tests, LIMIT_alone, LIMIT_felt, LIMIT_memcheck, LIMIT_two, LIMIT_mps ... seconds, and all together LIMIT (590).
# With CUDA_VISIBLE_DEVICES, and cores of its own (taskset), it may run beside another on another GPU, each with its own OUT.
# A log in tests/gpu/results is named DATE-GPU-REVISION-PART.log there; python -m tests.gpu.truth reads them.
# change leaves out what it has no time for, so it is best run by itself as well. SOAK_OPTIONS, PROVE_OPTIONS (such as
# "--tenants 15 --only t00 --seconds 120"), FENCE_OPTIONS, CHANGE_OPTIONS, APART_OPTIONS, LENDING_OPTIONS and ISOLATION_OPTIONS are more options for these.
# The exit status is that of the first part that failed: 124 where it ran past its limit. The others are run all the same.
set -uo pipefail
[ $# -gt 0 ] || { sed -n '2,27s/^# \{0,1\}//p' "$0"; exit 2; }
out=$1
shift
[ $# -gt 0 ] || set -- tests alone felt memcheck two mps change
export MPS=${MPS:-off}
mps=""
[ "$MPS" = off ] || mps=-mps
mkdir -p "$out/felt$mps"
python=${PYTHON:-python3}
apart="tests/gpu/test_change.py tests/gpu/test_isolation.py tests/gpu/test_confinement.py"
faults="tests/gpu/test_mps.py tests/gpu/test_loading.py tests/gpu/test_mps_server.py"
servers="tests/gpu/test_process.py tests/gpu/test_lost.py tests/gpu/test_ladder.py tests/gpu/test_fence.py"
side_by_side=tests/gpu
ignored=()
for file in $apart $faults tests/gpu/test_two_devices.py; do ignored+=("--ignore=$file"); done
side=4
if [ "$mps" ]; then
  side_by_side=$servers
  apart=tests/gpu/test_change.py
  side=1 # As two daemons on one GPU take turns.
fi
others="not alone and not load and not ray"
side="--numprocesses=${SIDE:-$side}"
status=0
# Without these libraries all works, but slower: not what is to be tested.
for library in server.launch_loop.library partitions.cuda.kernel_loads; do "$python" -m "$library" > /dev/null || exit 1; done
nvidia-smi -L > "$out/gpus.log" 2>&1 || echo "nvidia-smi finds no GPU here: without one, tests are skipped" >&2

# What a part may take that wants so many seconds; SECONDS are those since the script began.
limit() {
  local left=$((${LIMIT:-590} - SECONDS))
  echo $(($1 < left ? $1 : left > 30 ? left : 30))
}

# The GPUs that are seen, with the driver; several of one kind as "2 x ...".
gpus() {
  nvidia-smi ${CUDA_VISIBLE_DEVICES:+"--id=$CUDA_VISIBLE_DEVICES"} --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null |
    sort | uniq -c | sed -E 's/^ *1 //; s/^ *([0-9]+) /\1 x /' | paste -sd ';' | grep . || echo none
}

head() {
  echo "command:  $*"
  echo "date:     $(date -u '+%Y-%m-%d %H:%M UTC')"
  echo "revision: ${REVISION:-$(git describe --always --dirty 2>/dev/null || echo unknown)}"
  echo "GPU:      $(gpus)"
  echo
}

# run NAME LIMIT COMMAND...: the command's output goes to NAME.log under its command line, the date and the revision.
run() {
  local name=$1 limit=$2 code
  shift 2
  head "MPS=$MPS" "$@" > "$out/$name.log"
  # SIGINT, so that pytest still prints what failed; what a shell starts in the background ignores it otherwise.
  timeout -s INT -k 20 "$limit" env --default-signal=INT "$@" >> "$out/$name.log" 2>&1
  code=$?
  printf '\nended with %s\n' "$code" >> "$out/$name.log"
  echo "== $name: $code, $(grep -E '^(=+ )?[0-9]+ (passed|failed|skipped|error)|ERROR SUMMARY' "$out/$name.log" | tail -n 1)"
  [ "$status" -ne 0 ] || status=$code
}

for part in "$@"; do
  case $part in
    tests)
      # shellcheck disable=SC2086  # Options, and file names without spaces.
      OUT='' run "tests$mps" "$(limit "${LIMIT_tests:-200}")" "$python" -m pytest -q $side_by_side "${ignored[@]}" -m "$others" $side \
        -p no:cacheprovider -p no:benchmark --junitxml="$out/tests$mps.xml" ;;
    alone)
      # shellcheck disable=SC2086  # File names without spaces.
      OUT=$out run "alone$mps" "$(limit "${LIMIT_alone:-480}")" "$python" -m pytest -q $side_by_side "${ignored[@]}" -m alone \
        -p no:cacheprovider --junitxml="$out/alone$mps.xml" ;;
    felt)
      # shellcheck disable=SC2086  # File names without spaces.
      OUT=$out/felt$mps run "felt$mps" "$(limit "${LIMIT_felt:-330}")" "$python" -m pytest -q $apart -p no:cacheprovider \
        --junitxml="$out/felt$mps.xml" ;;
    memcheck)
      OUT='' run memcheck.tests "$(limit "${LIMIT_memcheck:-120}")" env LOG="$out/memcheck.log" GPUS="$(gpus)" bash tests/gpu/sanitize.sh ;;
    two)
      OUT=$out run "two$mps" "$(limit "${LIMIT_two:-180}")" "$python" -m pytest -q tests/gpu/test_two_devices.py -p no:cacheprovider \
        --junitxml="$out/two$mps.xml" ;;
    mps)
      # shellcheck disable=SC2086  # File names without spaces.
      OUT=$out run mps "$(limit "${LIMIT_mps:-200}")" "$python" -m pytest -q $faults -p no:cacheprovider --junitxml="$out/mps.xml" ;;
    soak)
      # shellcheck disable=SC2086  # Options.
      run "soak$mps" "$(limit "${LIMIT_soak:-580}")" "$python" -m benchmarks.soak --device cuda ${mps:+--mps} --minutes 8 \
        --json "$out/soak$mps.json" ${SOAK_OPTIONS:-} ;;
    prove)
      # shellcheck disable=SC2086  # Options.
      run "prove$mps" "$(limit "${LIMIT_prove:-300}")" "$python" -m tests.gpu.proving --json "$out/prove$mps.json" ${PROVE_OPTIONS:-} ;;
    fence)
      # shellcheck disable=SC2086  # Options.
      run "fence$mps" "$(limit "${LIMIT_fence:-330}")" "$python" -u -m benchmarks.isolation --device cuda ${mps:+--mps} --memory \
        --fence "${FENCE:-0.2}" --victim gemm mob enc tiny --rate 200 --arrivals fixed --seconds 0.8 --rounds 2 --json "$out/fence$mps.json" ${FENCE_OPTIONS:-} ;;
    fence-prove)
      # shellcheck disable=SC2086  # Options.
      run "fence-prove$mps" "$(limit "${LIMIT_fence_prove:-330}")" "$python" -u -m tests.gpu.proving --fence "${FENCE:-0.2}" \
        --memory --strains memory-read,random-sectors,pcie-out --seconds 36 --json "$out/fence-prove$mps.json" ${PROVE_OPTIONS:-} ;;
    change)
      seconds=$(limit "${LIMIT_change:-480}")
      # shellcheck disable=SC2086  # Options.
      run "change$mps" "$seconds" "$python" -m benchmarks.change --device cuda ${mps:+--mps} --within "$((seconds - 15))" \
        --output "$out/change$mps.json" ${CHANGE_OPTIONS:-} ;;
    apart)
      # shellcheck disable=SC2086  # Options.
      run apart "$(limit "${LIMIT_apart:-280}")" "$python" -u -m benchmarks.apart --tenants 14 --kills 2 --json "$out/apart.json" \
        ${APART_OPTIONS:-} ;;
    starting)
      run starting "$(limit "${LIMIT_starting:-240}")" "$python" -m benchmarks.starting --device cuda --starts 5 ;;
    lending)
      # shellcheck disable=SC2086  # Options.
      run "lending$mps" "$(limit "${LIMIT_lending:-580}")" "$python" -u -m benchmarks.lending --device cuda ${mps:+--mps} \
        ${LENDING_OPTIONS:-} ;;
    isolation)
      # shellcheck disable=SC2086  # Options.
      run isolation "$(limit "${LIMIT_isolation:-580}")" "$python" -u -m benchmarks.isolation --device cuda --json "$out/isolation.json" \
        ${ISOLATION_OPTIONS:-} ;;
    *)
      echo "there is no part $part; there are tests, alone, felt, memcheck, two, mps, soak, prove, fence, fence-prove, change, apart, starting, lending, isolation" >&2
      exit 2 ;;
  esac
done
exit "$status"
