"""Triton's Python client and the demo's classifier, with binary tensors.

In one terminal: scripts/serve. In another:

    .venv/bin/python -m pip install 'tritonclient[http]'
    .venv/bin/python examples/tritonclient_stripes.py [HOST:PORT]
"""

import sys

import numpy as np
import tritonclient.http as triton

client = triton.InferenceServerClient(sys.argv[1] if len(sys.argv) > 1 else "localhost:8000")
image = np.tile(np.array([1, 1, 0, 0], np.float32), (1, 1, 8, 2))  # vertical stripes, two pixels wide
given = triton.InferInput("image", list(image.shape), "FP32")
given.set_data_from_numpy(image)
answer = client.infer("stripes", [given], headers={"X-Tenant": "acme"})
print(answer.as_numpy("label"), answer.as_numpy("probabilities"))
