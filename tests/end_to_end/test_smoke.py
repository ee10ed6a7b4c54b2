import httpx


def test_an_inference_in_json_is_answered(http: httpx.Client) -> None:
    body = {"inputs": [{"name": "x", "shape": [1, 3], "datatype": "FP32", "data": [1, 2, 3.5]}]}
    answer = http.post("/v2/models/identity/infer", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["outputs"] == [{"name": "y", "datatype": "FP32", "shape": [1, 3], "data": [1, 2, 3.5]}]


def test_spin(http: httpx.Client) -> None:
    body = {"inputs": [{"name": "turns", "shape": [], "datatype": "INT64", "data": [100]}, {"name": "x", "shape": [2, 2], "datatype": "FP32", "data": [1, 2, 3.5, 1]}]}
    answer = http.post("/v2/models/spin/infer", json=body)
    assert answer.status_code == 200, answer.text
    answer = http.post("/v2/repository/index")
    print(answer.text)
