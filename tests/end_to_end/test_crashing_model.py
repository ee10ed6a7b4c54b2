"""What ends the process that has a model: loading it, each time, or the loss of the device while it runs."""

from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from . import repository
from .harness import cores
from .processes import configure, running_module, tenant
from .wire import SMALL, answered, client, infer, until

pytestmark = pytest.mark.skipif(len(cores()) < 2, reason="two tenants need two cores")


@pytest.mark.parametrize("options", [[], ["--device"]], ids=["tenant process", "device process"])
def test_a_model_that_crashes_is_left_out_and_a_lost_device_is_replaced(tmp_path: Path, options: list[str]) -> None:
    for name in ("crash", "identity", "lose"):
        repository.write(tmp_path / "models", name, repository.IDENTITY)
    path = configure(tmp_path / "greenlane.toml", tmp_path / "models", tenant() + tenant("globex", "identity"))
    with (
        running_module("tests.end_to_end.crashing_server", path, *options) as server,
        client(server, "acme") as acme,
    ):
        server.wait_for_log("it is left out")
        until(lambda: "its process ended each time it was loaded" in refused(acme, "crash"))
        assert infer(acme, "crash", SMALL).status_code == 503
        until(lambda: answered(acme) == 200)
        until(lambda: acme.get("/v2/health/ready").status_code == 200)
        with suppress(httpx.TransportError):  # In the tenant's own process it ends its connections as well.
            assert acme.post("/v2/repository/models/crash/load").status_code == 503
        until(lambda: answered(acme) == 200)
        until(lambda: acme.get("/v2/models/lose/ready").status_code == 200)
        assert "CUDA error 700" in refused(acme, "lose")
        server.wait_for_log("the device is lost, this process exits: CUDA error 700")
        server.wait_for_log("status 70")
        until(lambda: answered(acme) == 200)


def refused(http: httpx.Client, model: str) -> str:
    """The text of the answer to an inference; "" if the connection was lost."""
    try:
        return infer(http, model, SMALL).text
    except httpx.TransportError:
        return ""
