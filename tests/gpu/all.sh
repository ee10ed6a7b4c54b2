#!/usr/bin/env bash
# Runs what there is for a GPU, from the project's root, each part with its own log and limit, all within ten minutes:
#   bash tests/gpu/all.sh OUT [PART...]        OUT is the folder for the logs; by default the first five parts
#   tests    pytest tests/gpu without those of alone and felt, SIDE (4) at a time   tests.log, tests.xml
#   alone    pytest tests/gpu -m alone: those that measure time or memory, one at a time     alone.log, alone.xml, partitions.json
#   felt     pytest on change, isolation and confinement                    felt.log, felt.xml, felt/partitions.json
#   memcheck tests/gpu/sanitize.sh                                          memcheck.log, memcheck.tests.log
#   change   python -m benchmarks.change                                    change.log, change.json
#   starting, lending, isolation: the benchmark of that name, each by itself    starting.log, ... isolation.json
# A part may take LIMIT_tests, LIMIT_alone, LIMIT_felt, LIMIT_memcheck, LIMIT_change ... seconds, and all together LIMIT (590).
# change leaves out what it has no time for, so it is best run by itself as well. CHANGE_OPTIONS, LENDING_OPTIONS and
# ISOLATION_OPTIONS are more options for these.
# The exit status is that of the first part that failed: 124 where it ran past its limit. The others are run all the same.
set -uo pipefail
[ $# -gt 0 ] || { sed -n '2,14s/^# \{0,1\}//p' "$0"; exit 2; }
out=$1
shift
[ $# -gt 0 ] || set -- tests alone felt memcheck change
mkdir -p "$out/felt"
python=${PYTHON:-python3}
apart="tests/gpu/test_change.py tests/gpu/test_isolation.py tests/gpu/test_confinement.py"
ignored=()
for file in $apart; do ignored+=("--ignore=$file"); done
others="not alone and not load and not ray"
side="--numprocesses=${SIDE:-4}"
status=0
nvidia-smi -L > "$out/gpus.log" 2>&1 || echo "nvidia-smi finds no GPU here: without one, tests are skipped" >&2

# What a part may take that wants so many seconds; SECONDS are those since the script began.
limit() {
  local left=$((${LIMIT:-590} - SECONDS))
  echo $(($1 < left ? $1 : left > 30 ? left : 30))
}

head() {
  echo "command:  $*"
  echo "date:     $(date -u '+%Y-%m-%d %H:%M UTC')"
  echo "revision: ${REVISION:-$(git describe --always --dirty 2>/dev/null || echo unknown)}"
  echo "GPU:      $(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null || echo none)"
  echo
}

# run NAME LIMIT COMMAND...: the command's output goes to NAME.log under its command line, the date and the revision.
run() {
  local name=$1 limit=$2 code
  shift 2
  head "$@" > "$out/$name.log"
  timeout -k 10 "$limit" "$@" >> "$out/$name.log" 2>&1
  code=$?
  printf '\nended with %s\n' "$code" >> "$out/$name.log"
  echo "== $name: $code, $(grep -E '^(=+ )?[0-9]+ (passed|failed|skipped|error)|ERROR SUMMARY' "$out/$name.log" | tail -n 1)"
  [ "$status" -ne 0 ] || status=$code
}

for part in "$@"; do
  case $part in
    tests)
      # shellcheck disable=SC2086  # Options.
      OUT='' run tests "$(limit "${LIMIT_tests:-200}")" "$python" -m pytest -q tests/gpu "${ignored[@]}" -m "$others" $side \
        -p no:cacheprovider -p no:benchmark --junitxml="$out/tests.xml" ;;
    alone)
      OUT=$out run alone "$(limit "${LIMIT_alone:-240}")" "$python" -m pytest -q tests/gpu "${ignored[@]}" -m alone \
        -p no:cacheprovider --junitxml="$out/alone.xml" ;;
    felt)
      # shellcheck disable=SC2086  # File names without spaces.
      OUT=$out/felt run felt "$(limit "${LIMIT_felt:-270}")" "$python" -m pytest -q $apart -p no:cacheprovider --junitxml="$out/felt.xml" ;;
    memcheck)
      OUT='' run memcheck.tests "$(limit "${LIMIT_memcheck:-120}")" env LOG="$out/memcheck.log" bash tests/gpu/sanitize.sh ;;
    change)
      seconds=$(limit "${LIMIT_change:-480}")
      # shellcheck disable=SC2086  # Options.
      run change "$seconds" "$python" -m benchmarks.change --device cuda --within "$((seconds - 15))" --output "$out/change.json" \
        ${CHANGE_OPTIONS:-} ;;
    starting)
      run starting "$(limit "${LIMIT_starting:-240}")" "$python" -m benchmarks.starting --device cuda --starts 5 ;;
    lending)
      # shellcheck disable=SC2086  # Options.
      run lending "$(limit "${LIMIT_lending:-580}")" "$python" -u -m benchmarks.lending --device cuda ${LENDING_OPTIONS:-} ;;
    isolation)
      # shellcheck disable=SC2086  # Options.
      run isolation "$(limit "${LIMIT_isolation:-580}")" "$python" -u -m benchmarks.isolation --device cuda --json "$out/isolation.json" \
        ${ISOLATION_OPTIONS:-} ;;
    *)
      echo "there is no part $part; there are tests, alone, felt, memcheck, change, starting, lending, isolation" >&2
      exit 2 ;;
  esac
done
exit "$status"
