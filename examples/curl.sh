#!/bin/sh
# The demo by curl. In one terminal: scripts/serve. In another: examples/curl.sh [http://HOST:PORT]
set -eu
url=${1-http://localhost:8000}
say() { printf '\n== %s\n' "$1"; }
curl() { command curl -w '\n' "$@"; }

say "is the server ready?"
curl -sf "$url/v2/health/ready"

say "the models of the default tenant, acme, and of globex"
curl -sf -X POST "$url/v2/repository/index"
curl -sf -X POST "$url/v2/repository/index" -H 'X-Tenant: globex'

say "an inference in JSON"
curl -sf "$url/v2/models/identity/infer" \
  -d '{"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1, 2.5]}]}'

say "the same as globex"
curl -sf "$url/v2/models/identity/infer" -H 'X-Tenant: globex' \
  -d '{"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1, 2.5]}]}'

say "an inference with a binary tensor: 1.0 and 2.0"
json='{"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2], "parameters": {"binary_data_size": 8}}]}'
{ printf %s "$json"; printf '\000\000\200\077\000\000\000\100'; } |
  curl -sf "$url/v2/models/identity/infer" -H "Inference-Header-Content-Length: ${#json}" --data-binary @-

say "an error names the field, what came and what was expected"
curl -s "$url/v2/models/identity/infer" -d '{"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1, null]}]}'

say "another tenant's model looks like one that does not exist"
curl -s "$url/v2/models/stripes" -H 'X-Tenant: globex'

say "who holds which cores, and on which cores work really ran"
curl -sf "$url/admin/partitions"
curl -sf -X POST "$url/admin/partitions/probe"

say "metrics"
curl -sf "$url/metrics" | grep nv_inference_request_success
