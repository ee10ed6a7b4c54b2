"""A picture of usual size for the demo's classifier, in binary and with numpy alone: as JSON it would be above 1 MiB, and 413.

In one terminal: scripts/serve. In another:

    .venv/bin/python examples/picture.py [HOST:PORT]
"""

import json
import sys
from urllib.request import Request, urlopen

import numpy as np

host = sys.argv[1] if len(sys.argv) > 1 else "localhost:8000"
picture = np.tile(np.array([1, 1, 0, 0], np.float32), (1, 1, 640, 160))  # vertical stripes: batch, channels, height, width
described = {"name": "image", "datatype": "FP32", "shape": picture.shape, "parameters": {"binary_data_size": picture.nbytes}}
head = json.dumps({"inputs": [described]}).encode()
headers = {"Inference-Header-Content-Length": str(len(head)), "X-Tenant": "acme"}  # How much of the body is JSON.
with urlopen(Request(f"http://{host}/v2/models/stripes/infer", head + picture.tobytes(), headers)) as answer:
    print(json.load(answer)["outputs"])
