"""KServe's own client against a server with the tests' standard repository: `python kserve_client.py http://127.0.0.1:8000`.

A script, because the package brings thirty others with it and another protobuf: it runs wherever `kserve` is installed and
needs nothing of ours. Ends with status 0 if every call was answered as it should be.
"""

import asyncio
import sys

import httpx
import numpy as np
from kserve import InferenceRESTClient, InferInput, InferRequest, RESTConfig
from kserve.protocol.infer_type import RequestedOutput


def given(name: str, array: np.ndarray, datatype: str, binary: bool) -> InferInput:
    tensor = InferInput(name, list(array.shape), datatype)
    tensor.set_data_from_numpy(array, binary_data=binary)
    return tensor


async def health(client: InferenceRESTClient, url: str) -> None:
    assert await client.is_server_live(url) is True
    assert await client.is_server_ready(url) is True
    assert await client.is_model_ready(url, "add") is True
    assert await client.is_model_ready(url, "nope") is False


async def inference(client: InferenceRESTClient, url: str, binary_in: bool, binary_out: bool) -> None:
    a, b = np.array([1, 2], np.int32), np.array([30, 40], np.int32)
    inputs = [given("a", a, "INT32", binary_in), given("b", b, "INT32", binary_in)]
    wanted = [RequestedOutput("sum", {"binary_data": binary_out}), RequestedOutput("difference")]
    request = InferRequest("add", inputs, request_id="r-1", request_outputs=wanted)
    answer = await client.infer(url, request, "add")
    assert (answer.model_name, answer.id) == ("add", "r-1")
    assert [output.name for output in answer.outputs] == ["sum", "difference"]
    assert answer.outputs[0].as_numpy().tolist() == [31, 42]
    assert answer.outputs[1].as_numpy().tolist() == [-29, -38]


async def types(client: InferenceRESTClient, url: str, binary: bool) -> None:
    floats = np.array([[1.5, -2]], np.float32)
    parameters = {"binary_data_output": binary}
    request = InferRequest("identity", [given("x", floats, "FP32", binary)], parameters=parameters)
    answer = await client.infer(url, request, "identity")
    assert (answer.outputs[0].as_numpy() == floats).all()
    texts = np.array([b"lane", b""], object)
    request = InferRequest("text", [given("words", texts, "BYTES", binary)], parameters=parameters)
    answer = await client.infer(url, request, "text")
    found = [text.decode() if isinstance(text, bytes) else text for text in answer.outputs[0].as_numpy().tolist()]
    assert found == ["lane", ""]


async def refusals(client: InferenceRESTClient, url: str) -> None:
    for data, name, text in (
        ({"inputs": []}, "add", "inputs: 'a', 'b' missing; the model takes 'a', 'b', '400 Bad Request'"),
        ({"inputs": []}, "nope", "Request for unknown model: 'nope' is not found, '404 Not Found'"),
    ):
        assert (await refusal(client, url, data, name)).startswith(text)


async def refusal(client: InferenceRESTClient, url: str, data: dict, name: str) -> str:
    try:
        await client.infer(url, data, name)
    except httpx.HTTPStatusError as error:
        return str(error)
    raise AssertionError(f"not refused: {data} for {name}")


async def main(url: str) -> None:
    client = InferenceRESTClient(RESTConfig(protocol="v2", retries=0))
    try:
        await health(client, url)
        for binary in (False, True):
            await inference(client, url, binary, binary)
            await inference(client, url, binary, not binary)
            await types(client, url, binary)
        await refusals(client, url)
    finally:
        await client.close()
    print("health, inference, types and refusals: as they should be")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
