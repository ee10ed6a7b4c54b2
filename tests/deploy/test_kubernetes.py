"""The Helm chart as Helm renders it, and the manifests for KServe: Kubernetes takes them, and Greenlane their configuration."""

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from server import __version__
from server.config.file import load

from .schemas import KServe, kubernetes
from .tools import helm

DEPLOY = Path(__file__).parents[2] / "deploy"
CHART = DEPLOY / "helm" / "greenlane"
OLDEST, NEWEST = "1.26", "1.37"
VALUES = {
    "as it is": (),
    "with everything": (
        "replicas=4,runtimeClassName=nvidia,priorityClassName=high,configSecret=tenants,cache.storageClassName=fast",
        "podMonitor.enabled=true,networkPolicy.enabled=true,networkPolicy.from[0].podSelector.matchLabels.app=web",
        "service.tenantPorts[0].name=acme-grpc,service.tenantPorts[0].port=8101,service.annotations.a=b",
        "nodeSelector.gpu=h100,tolerations[0].key=nvidia.com/gpu,tolerations[0].operator=Exists,podLabels.a=b,podAnnotations.a=b",
        "env[0].name=GREENLANE_LAUNCH_LOOP,env[0].value=zero,image.pullSecrets[0].name=pull,podMonitor.labels.release=prometheus",
        "affinity.nodeAffinity.preferredDuringSchedulingIgnoredDuringExecution=null",
        f"image.digest=sha256:{'0' * 64}",
    ),
    "on cores": ("gpus=0,cache.size=,resources.cpu=4,podDisruptionBudget.enabled=false,restartOnChange=false",),
    "from a bucket": ("models.claim=,serviceAccountName=models,resources.ephemeralStorage=50Gi,cache.size=",),
    "from another volume": ("models.volume.nfs.server=files,models.volume.nfs.path=/models",),
}
Manifest = dict[str, Any]


def template(*settings: str, version: str = NEWEST, chart: Path = CHART) -> "subprocess.CompletedProcess[str]":
    words = [word for setting in settings for word in ("--set", setting)]
    command = [helm(), "template", "release", chart, "--kube-version", version, *words]
    return subprocess.run(command, capture_output=True, text=True)


def rendered(*settings: str, version: str = NEWEST, chart: Path = CHART) -> dict[str, Manifest]:
    """What Helm renders, by kind and name."""
    done = template(*settings, version=version, chart=chart)
    assert done.returncode == 0, done.stderr
    documents = [each for each in yaml.load_all(done.stdout, yaml.CSafeLoader) if each]
    return {f"{each['kind']} {each['metadata']['name']}": each for each in documents}


def pod(manifests: dict[str, Manifest]) -> Manifest:
    return manifests["StatefulSet release-greenlane"]["spec"]["template"]["spec"]


def test_helm_has_nothing_to_say_of_the_chart() -> None:
    done = subprocess.run([helm(), "lint", "--strict", "--quiet", CHART], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
@pytest.mark.parametrize("settings", VALUES.values(), ids=VALUES)
def test_kubernetes_takes_what_the_chart_renders(settings: tuple[str, ...], version: str) -> None:
    for name, manifest in rendered(*settings, version=version).items():
        if manifest["kind"] != "PodMonitor":  # Of the Prometheus operator.
            assert kubernetes(version).mistakes(manifest) == [], name


def test_the_schemas_find_mistakes() -> None:
    manifest = rendered()["StatefulSet release-greenlane"]
    manifest["spec"]["template"]["spec"]["containers"][0]["securityContext"]["readOnlyRootFileSystem"] = True
    manifest["spec"]["replicas"] = "one"
    assert len(kubernetes(NEWEST).mistakes(manifest)) == 2


def test_a_pod_has_one_gpu_or_none() -> None:
    for settings, gpus in ((), "1"), (("gpus=0",), None):
        (container,) = pod(rendered(*settings))["containers"]
        assert container["resources"]["limits"].get("nvidia.com/gpu") == gpus
        assert container["resources"]["limits"] == container["resources"]["requests"], "or the pod is not Guaranteed"


def test_a_pod_has_no_more_rights_than_the_image_needs() -> None:
    spec = pod(rendered())
    (container,) = spec["containers"]
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert f"USER {spec['securityContext']['runAsUser']}" in (DEPLOY / "Dockerfile").read_text().splitlines()
    assert spec["automountServiceAccountToken"] is False
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    mounts = {mount["mountPath"]: mount.get("readOnly", False) for mount in container["volumeMounts"]}
    assert mounts == {"/etc/greenlane": True, "/models": True, "/var/cache/greenlane": False, "/tmp": False}


def test_models_are_on_one_volume_or_on_none() -> None:
    def volume(*settings: str) -> Manifest | None:
        return next((each for each in pod(rendered(*settings))["volumes"] if each["name"] == "models"), None)

    assert volume() == {"name": "models", "persistentVolumeClaim": {"claimName": "greenlane-models", "readOnly": True}}
    assert volume("models.volume.hostPath.path=/data") == {"name": "models", "hostPath": {"path": "/data"}}
    assert volume("models.claim=") is None
    (container,) = pod(rendered("models.claim="))["containers"]
    assert "/models" not in [mount["mountPath"] for mount in container["volumeMounts"]]


def test_a_pod_takes_no_more_of_its_nodes_disk_than_it_has_asked_for() -> None:
    for settings in (), ("cache.size=",):
        spec = pod(rendered(*settings))
        (container,) = spec["containers"]
        assert container["resources"]["limits"]["ephemeral-storage"] == "2Gi"
        assert [each for each in spec["volumes"] if "emptyDir" in each and "sizeLimit" not in each["emptyDir"]] == []
    (runtime,) = _kserve("runtime.yaml")
    assert [each for each in runtime["spec"]["volumes"] if "emptyDir" in each and "sizeLimit" not in each["emptyDir"]] == []


def test_an_upgrade_changes_nothing_that_a_stateful_set_may_not_change(tmp_path: Path) -> None:
    """Kubernetes refuses an upgrade that changes anything else of its `spec` than `template`, `replicas` and the like."""

    def fixed(chart: Path, *settings: str) -> Manifest:
        spec = rendered(*settings, chart=chart)["StatefulSet release-greenlane"]["spec"]
        return {key: value for key, value in spec.items() if key not in ("template", "replicas")}

    newer = tmp_path / "greenlane"
    shutil.copytree(CHART, newer)
    chart = newer / "Chart.yaml"
    chart.write_text(chart.read_text().replace(__version__, "99.0.0"))
    assert rendered(chart=newer) != rendered()
    changed = "replicas=2,gpus=0,resources.cpu=2,config=a=1,image.tag=other,podLabels.a=b,models.claim=,service.port=9000"
    assert fixed(newer, changed) == fixed(CHART)


def test_a_change_of_the_configuration_restarts_servers_if_it_is_to() -> None:
    def annotations(*settings: str) -> Any:
        manifests = rendered("config=a=1", *settings)
        return manifests["StatefulSet release-greenlane"]["spec"]["template"]["metadata"].get("annotations")

    assert annotations() != annotations("config=a=2")
    assert annotations("restartOnChange=false") == annotations("restartOnChange=false", "config=a=2")


def test_mistakes_in_values_are_found() -> None:
    for setting, word in ("gpu=1", "'gpu' not allowed"), ("resources.cpu=500m", "got string, want integer"):
        done = template(setting)
        assert done.returncode != 0
        assert word in done.stderr


def test_prometheus_asks_with_the_admin_key() -> None:
    monitor = rendered("podMonitor.enabled=true")["PodMonitor release-greenlane"]
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert endpoint["path"] == "/metrics"
    assert endpoint["port"] in [port["name"] for port in pod(rendered())["containers"][0]["ports"]]
    assert endpoint["authorization"] == {"type": "Bearer", "credentials": {"name": "greenlane-admin", "key": "key"}}


def test_a_server_may_drain_before_it_is_killed(tmp_path: Path) -> None:
    manifests = rendered()
    config = _configuration(manifests["ConfigMap release-greenlane"], tmp_path)
    assert pod(manifests)["terminationGracePeriodSeconds"] > config.server.drain_grace + config.server.drain_timeout
    assert list(config.tenants) == ["acme", "globex"]
    of_kserve, service = _kserve("inferenceservice.yaml")
    config = _configuration(of_kserve, tmp_path)
    grace = service["spec"]["predictor"]["terminationGracePeriodSeconds"]
    assert grace > config.server.drain_grace + config.server.drain_timeout


def test_the_chart_is_of_this_version() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == __version__
    (container,) = pod(rendered())["containers"]
    (runtime,) = _kserve("runtime.yaml")[0]["spec"]["containers"]
    assert container["image"] == runtime["image"] == f"ghcr.io/greenlane-server/greenlane:{__version__}"


def test_kserve_takes_the_runtime_and_the_example(tmp_path: Path) -> None:
    kserve = KServe(kubernetes(NEWEST))
    (runtime,) = _kserve("runtime.yaml")
    config, service = _kserve("inferenceservice.yaml")
    assert kserve.mistakes(runtime) == []
    assert kserve.mistakes(service) == []
    assert kubernetes(NEWEST).mistakes(config) == []
    assert list(_configuration(config, tmp_path).tenants) == ["acme", "globex"]
    assert service["spec"]["predictor"]["model"]["runtime"] == runtime["metadata"]["name"]
    volumes = {volume["name"]: volume for volume in runtime["spec"]["volumes"]}
    assert volumes["greenlane-config"]["configMap"]["name"] == config["metadata"]["name"]


def test_kserves_schemas_find_mistakes() -> None:
    (runtime,) = _kserve("runtime.yaml")
    runtime["spec"]["protocolVersion"] = "v2"
    runtime["spec"]["containers"][0]["arguments"] = []
    found = KServe(kubernetes(NEWEST)).mistakes(runtime)
    assert len(found) == 2


def _kserve(name: str) -> list[Manifest]:
    return list(yaml.safe_load_all((DEPLOY / "kserve" / name).read_text()))


def _configuration(manifest: Manifest, folder: Path) -> Any:
    """The configuration in a ConfigMap, with the repository where it can be found."""
    (folder / "models").mkdir(exist_ok=True)
    text = manifest["data"]["greenlane.toml"].replace("/mnt/models", "models").replace('"/models"', '"models"')
    (folder / "greenlane.toml").write_text(text)
    return load(folder / "greenlane.toml")
