"""The manifests for KubeRay: its fields by a schema of those used, its pods by Kubernetes' own, its names and ports."""

import json
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml

from specahead.wire.tls import read_tls
from tests.deploy.tools import DEPLOY, Object, container_of, kustomize, of_kind, run_tool, settings_of, validate

SCHEMA = Path(__file__).with_name("ray_cluster.schema.json")


@pytest.fixture(scope="module")
def objects() -> list[Object]:
    return kustomize(DEPLOY / "kuberay")


@pytest.fixture(scope="module")
def cluster(objects: list[Object]) -> Object:
    (found,) = of_kind(objects, "RayCluster")
    return found


def groups(cluster: Object) -> dict[str, Object]:
    workers = {group["groupName"]: group for group in cluster["spec"]["workerGroupSpecs"]}
    return {"head": cluster["spec"]["headGroupSpec"]} | workers


def test_the_cluster_has_only_fields_that_kuberay_knows(cluster: Object, tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(yaml.safe_dump(cluster))
    run_tool("check-jsonschema", "--schemafile", SCHEMA, file)
    cluster = json.loads(json.dumps(cluster))
    cluster["spec"]["authOptions"]["secret"] = "x"
    file.write_text(yaml.safe_dump(cluster))
    run_tool("check-jsonschema", "--schemafile", SCHEMA, file, fails=True)


def test_all_else_is_valid(objects: list[Object], cluster: Object, tmp_path: Path) -> None:
    pods = [
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": group["template"]["spec"]}
        for name, group in groups(cluster).items()
    ]
    validate([item for item in objects if item is not cluster] + pods, tmp_path)


def test_ray_is_the_images(cluster: Object) -> None:
    assert cluster["spec"]["rayVersion"] == version("ray")


def test_services_run_where_the_launch_wants_them(objects: list[Object], cluster: Object) -> None:
    (launch,) = of_kind(objects, "Deployment")
    container = container_of(launch)
    config = {item["metadata"]["name"]: item["data"] for item in of_kind(objects, "ConfigMap")}
    environment = {
        name: value
        for source in container["envFrom"]
        for name, value in config[source["configMapRef"]["name"]].items()
        if name.startswith("SPECAHEAD_")
    }
    command = container["args"][-1].strip().splitlines()[-1].removeprefix("exec ").split()
    settings = settings_of(command, environment)
    for side in ("target", "draft"):
        parameters = groups(cluster)[side]["rayStartParams"]
        assert json.loads(json.loads(parameters["resources"])) == {settings["node_resources"][side]: 1}
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"http": settings["port"], "grpc": settings["grpc_port"]}
    assert (settings["service_host"], settings["host"]) == ("", "0.0.0.0"), "services listen at their pods' addresses"


def test_every_process_of_ray_has_the_token_and_tls(objects: list[Object], cluster: Object) -> None:
    assert cluster["spec"]["authOptions"] == {"mode": "token", "secretName": "specahead-ray"}
    (launch,) = of_kind(objects, "Deployment")
    names = {item["name"]: item for item in container_of(launch)["env"]}
    assert names["RAY_AUTH_TOKEN"]["valueFrom"]["secretKeyRef"]["name"] == "specahead-ray"
    environments = {item["metadata"]["name"]: item["data"] for item in of_kind(objects, "ConfigMap")}
    pods = [group["template"]["spec"] for group in groups(cluster).values()]
    for pod in [*pods, launch["spec"]["template"]["spec"]]:
        (container,), (maker,) = pod["containers"], pod["initContainers"]
        environment = environments[container["envFrom"][0]["configMapRef"]["name"]]
        assert environment["RAY_USE_TLS"] == "1"
        for mounts in (container["volumeMounts"], maker["volumeMounts"]):
            assert Path(environment["RAY_TLS_SERVER_CERT"]).parent.as_posix() in {item["mountPath"] for item in mounts}
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        assert volumes["make-certificate"]["configMap"]["name"] in environments
        assert container["image"] == maker["image"] == "specahead:0.1.0-cpu"
        assert pod["enableServiceLinks"] is False and container["securityContext"]["readOnlyRootFilesystem"]


def test_a_pod_makes_a_certificate_that_its_authority_signed(tmp_path: Path) -> None:
    ca, own = tmp_path / "ca", tmp_path / "tls"
    own.mkdir()
    ca.mkdir()
    authority = [
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
        "-subj",
        "/CN=ca",
    ]
    run_tool("openssl", *authority, "-keyout", ca / "tls.key", "-out", ca / "tls.crt")
    script = (DEPLOY / "kuberay" / "make_certificate.sh").read_text().replace("cd /etc/ray/tls", f"cd {own}")
    environment = {"POD_IP": "10.1.2.3", "POD_NAMESPACE": "here", "RAY_CA": str(ca)}
    run_tool("env", *(f"{name}={value}" for name, value in environment.items()), "bash", "-c", script)
    read_tls(*(str(own / name) for name in ("tls.crt", "tls.key", "ca.crt")))
    said = run_tool("openssl", "x509", "-in", own / "tls.crt", "-noout", "-ext", "subjectAltName")
    assert "IP Address:10.1.2.3" in said and "DNS:specahead-head-svc.here.svc.cluster.local" in said
