"""Clients that ask for sums through an address, one request after another each, and count what came of every one."""

import asyncio
import time
from collections import Counter

import aiohttp
import numpy as np

from server.tenants.auth import digest

ACME, GLOBEX, ADMIN = "key-of-acme", "key-of-globex", "key-of-admin"
TOML = f"""
[server]
admin_key_sha256 = "{digest(ADMIN)}"
[models]
repository = "REPOSITORY"
[tenants.acme]
granules = 1
models = ["*"]
keys_sha256 = ["{digest(ACME)}"]
[tenants.globex]
granules = 3
models = ["*"]
keys_sha256 = ["{digest(GLOBEX)}"]
"""
ELEMENTS = 1000


class Load:
    """`answers` counts statuses, `failures` the texts of those that are not 200, `wrong` answers to something else."""

    def __init__(self, url: str, key: str, clients: int) -> None:
        self.answers: Counter[int | str] = Counter()
        self.failures: Counter[str] = Counter()
        self.wrong = 0
        self.seconds: list[float] = []
        self._url, self._key, self._clients = url, key, clients
        self._go_on = True

    async def run(self) -> None:
        headers = {"Authorization": f"Bearer {self._key}"}
        async with aiohttp.ClientSession(headers=headers, connector=aiohttp.TCPConnector(limit=0)) as http:
            await asyncio.gather(*(self._ask(http, number) for number in range(self._clients)))

    async def until(self, count: int) -> None:
        """Wait until so many more are answered."""
        enough = self.answers.total() + count
        async with asyncio.timeout(120):
            while self.answers.total() < enough:
                await asyncio.sleep(0.02)

    def stop(self) -> None:
        self._go_on = False

    async def _ask(self, http: aiohttp.ClientSession, number: int) -> None:
        values, count = np.arange(ELEMENTS, dtype=np.float32), 0
        while self._go_on:
            count += 1
            values[:2] = number, count
            header, body = binary_request(values)
            began = time.perf_counter()
            try:
                async with http.post(f"{self._url}/v2/models/identity/infer", headers=header, data=body) as answer:
                    content = await answer.read()
            except aiohttp.ClientError as error:
                self.answers["disconnected"] += 1
                self.failures[repr(error)] += 1
                continue
            self.seconds.append(time.perf_counter() - began)
            self.answers[answer.status] += 1
            if answer.status != 200:
                self.failures[content.decode()] += 1
                await asyncio.sleep(1)  # Not into the same server again, while it ends.
            elif content[int(answer.headers["Inference-Header-Content-Length"]) :] != values.tobytes():
                self.wrong += 1


def binary_request(values: np.ndarray) -> tuple[dict[str, str], bytes]:
    """Headers and body of a request for `identity`, with binary tensors both ways."""
    size = f'"parameters": {{"binary_data_size": {values.nbytes}}}'
    tensor = f'{{"name": "x", "datatype": "FP32", "shape": [1, {values.size}], {size}}}'
    head = f'{{"inputs": [{tensor}], "parameters": {{"binary_data_output": true}}}}'.encode()
    return {"Inference-Header-Content-Length": str(len(head))}, head + values.tobytes()
