#!/usr/bin/env bash
# Runs one small test on the GPU under compute-sanitizer's memcheck, from the project's root:
#   bash tests/gpu/sanitize.sh [TEST...]      by default the numbers of two networks, first run, captured and replayed
# What memcheck says goes to $LOG, or $OUT/memcheck.log, under the command line, the date and the revision ($REVISION, or git's).
# It exits 9 where memcheck found something, 3 where there is no compute-sanitizer: it comes with the CUDA toolkit, or with
# pip install nvidia-cuda-sanitizer-api==13.0.85 (14 MB; the version of the driver's CUDA or older).
set -euo pipefail
numbers=tests/gpu/test_engines.py::test_first_captured_and_replayed_outputs_are_those_of_onnx_runtime
[ $# -gt 0 ] || set -- "$numbers[several]" "$numbers[mlp]"
python=${PYTHON:-python3}
sanitizer=$(command -v compute-sanitizer || "$python" -c '
import importlib.util, pathlib
spec = importlib.util.find_spec("nvidia")
paths = spec.submodule_search_locations if spec else []
found = [at for path in paths for at in pathlib.Path(path).glob("cu*/bin/compute-sanitizer")]
print(found[0] if found else "")')
if [ -z "$sanitizer" ]; then
  echo "there is no compute-sanitizer here: pip install nvidia-cuda-sanitizer-api==13.0.85" >&2
  exit 3
fi
[ -x "$sanitizer" ] || chmod +x "$sanitizer"
echo "$sanitizer: $("$sanitizer" --version | tail -n 1)"
log=${LOG:-${OUT:+$OUT/memcheck.log}}
set -- "$sanitizer" --tool memcheck --target-processes all --error-exitcode 9 --print-limit 20 ${log:+--log-file "$log.new"} \
  "$python" -m pytest -q -p no:cacheprovider "$@"
[ -n "$log" ] || exec "$@"
status=0
"$@" || status=$?
{
  echo "command:  $*"
  echo "date:     $(date -u '+%Y-%m-%d %H:%M UTC'), ended with $status"
  echo "revision: ${REVISION:-$(git describe --always --dirty 2>/dev/null || echo unknown)}"
  echo "GPU:      ${GPUS:-$(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null | paste -sd ';')}"
  echo "version:  $("$sanitizer" --version | tail -n 1)"
  cat "$log.new"
} > "$log"
rm -f "$log.new"
exit "$status"
