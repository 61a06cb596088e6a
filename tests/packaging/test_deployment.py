"""What stands around images and pods: files that exist, YAML that Kubernetes takes, a script that starts a server."""

from __future__ import annotations

import os
import pathlib
import re
import signal
import subprocess
import sys
from typing import Any

import httpx
import kubernetes_validate
import pytest
import yaml

from ascend_vllm.args.engine_args import EngineArgs
from ascend_vllm.args.parser import FlexibleArgumentParser
from tests.server import ROOT, free_port, wait_until

KUBERNETES = ROOT / "examples" / "kubernetes"
DOCKER = ROOT / "docker"
# a small trained one
MODEL = ROOT / "tests" / "compat" / "model"
PAGE = ROOT / "docs" / "deployment.md"
# the newest whose schemas come with the validator, and the oldest
API_VERSIONS = ("1.37", "1.25")


def documents() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((KUBERNETES / "config.yaml").read_text()))


def container() -> dict[str, Any]:
    (deployment,) = [document for document in documents() if document["kind"] == "Deployment"]
    (found,) = deployment["spec"]["template"]["spec"]["containers"]
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("version", API_VERSIONS)
def test_kubernetes_takes_every_document(version: str) -> None:
    for document in documents():
        kubernetes_validate.validate(document, version, strict=True)


def test_the_validator_notices_a_wrong_field() -> None:
    (deployment, _) = documents()
    deployment["spec"]["template"]["spec"]["containers"][0]["readinessProb"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(deployment, API_VERSIONS[0], strict=True)


def test_the_pod_is_the_sources_one() -> None:
    (deployment, service) = documents()
    pod = deployment["spec"]["template"]["spec"]
    assert pod["schedulerName"] == "volcano"
    assert pod["nodeSelector"] == {"accelerator/huawei-npu": "ascend-1980"}
    resources = container()["resources"]
    assert resources["requests"] == resources["limits"] == {"huawei.com/ascend-1980": "1"}
    mounts = {mount["name"]: mount["mountPath"] for mount in container()["volumeMounts"]}
    volumes = {volume["name"]: volume.get("hostPath", {}).get("path") for volume in pod["volumes"]}
    assert mounts.keys() == volumes.keys()
    for path in (
        "/usr/local/Ascend/driver",
        "/usr/local/Ascend/add-ons",
        "/etc/hccn.conf",
        "/etc/localtime",
        "/usr/local/sbin/npu-smi",
    ):
        (name,) = [name for name, mounted in mounts.items() if mounted == path]
        assert volumes[name] == path
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert deployment["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert service["spec"]["selector"].items() <= labels.items()
    ports = {port["name"] for port in container()["ports"]}
    assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports
    assert {container()[probe]["httpGet"]["port"] for probe in PROBES} <= ports
    # the script that the pod runs lies in a directory that it mounts
    script = pathlib.PurePosixPath(container()["args"][-1])
    assert str(script.parent) in mounts.values() and (KUBERNETES / script.name).is_file()


PROBES = ("startupProbe", "livenessProbe", "readinessProbe")


def test_the_script_starts_a_server_that_answers_the_probes(tmp_path: pathlib.Path) -> None:
    port = free_port()
    settings = {variable["name"]: variable["value"] for variable in container()["env"]}
    settings |= {"MODEL_PATH": str(MODEL), "PORT": str(port), "HOST": "127.0.0.1", "DEVICE": "cpu"}
    settings |= {"PYTHON": sys.executable, "MAX_MODEL_LEN": "256", "MAX_NUM_SEQS": "4", "OMP_NUM_THREADS": "2"}
    log = tmp_path / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            ["bash", KUBERNETES / "run_vllm.sh", "--kv-cache-memory-bytes", "32M", "--served-model-name", "qwen"],
            cwd=ROOT,
            env=os.environ | settings,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as http:

            def answers() -> bool:
                assert process.poll() is None, log.read_text()
                try:
                    return all(http.get(container()[probe]["httpGet"]["path"]).status_code == 200 for probe in PROBES)
                except httpx.TransportError:
                    return False

            assert wait_until(answers, 90), log.read_text()
            assert http.get("/v1/models").json()["data"][0]["id"] == "qwen"
        # what the kubelet sends reaches the server itself
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()


def test_the_script_asks_for_the_model() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "MODEL_PATH"}
    result = subprocess.run(
        ["bash", KUBERNETES / "run_vllm.sh"], env=environment, capture_output=True, text=True, timeout=30, check=False
    )
    assert result.returncode != 0
    assert "MODEL_PATH" in result.stderr


def test_the_page_tells_the_script_s_variables_and_defaults() -> None:
    script = (KUBERNETES / "run_vllm.sh").read_text()
    pairs = re.findall(r'(--[a-z-]+) "\$\{([A-Z_]+):-([^}]+)\}"', script)
    flags = EngineArgs.add_cli_args(FlexibleArgumentParser())._option_string_actions
    page = PAGE.read_text()
    assert len(pairs) >= 10
    for flag, variable, default in pairs:
        if flag in ("--host", "--port"):
            assert f"`{flag}`" in page and default in page
        else:
            assert flag in flags
            assert re.search(rf"\| `{variable}` \| `?{re.escape(default)}`? \| `{flag}` \|", page), variable


def instructions(dockerfile: pathlib.Path) -> list[tuple[str, str]]:
    """Instruction and arguments of each, continued lines joined."""
    text = re.sub(r"^#.*\n", "", dockerfile.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [(line.split()[0], line.split(maxsplit=1)[1]) for line in text.splitlines() if line.strip()]


@pytest.mark.parametrize("name", ["Dockerfile.cpu", "Dockerfile.ascend"])
def test_what_a_dockerfile_names_exists(name: str) -> None:
    found = instructions(DOCKER / name)
    assert {"FROM", "RUN", "COPY", "ENTRYPOINT"} <= {instruction for instruction, _ in found}
    ignored = (ROOT / ".dockerignore").read_text().split()
    for instruction, arguments in found:
        if instruction == "COPY" and not arguments.startswith("--from"):
            source = arguments.split()[0]
            assert (ROOT / source).exists(), source
            assert source.split("/")[0] not in ignored
    extras = set(re.findall(r"'\.\[([a-z,]+)\]'", (DOCKER / name).read_text())[0].split(","))
    assert extras <= set(re.findall(r"^([a-z]+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE))
    assert f"docker/{name}" in PAGE.read_text()


@pytest.mark.parametrize("toolkit", ["ascend-toolkit/latest", "cann"])
def test_the_entrypoint_finds_the_scripts_of_each_generation(tmp_path: pathlib.Path, toolkit: str) -> None:
    """CANN's own, beside "latest" before 8.5 and in "cann" since, and that of NNAL beside both."""
    (tmp_path / toolkit).mkdir(parents=True)
    script = tmp_path / toolkit.partition("/")[0] / "set_env.sh"
    script.write_text("export ASCEND_HOME_PATH=/somewhere\n")
    (tmp_path / "nnal" / "atb").mkdir(parents=True)
    (tmp_path / "nnal" / "atb" / "set_env.sh").write_text("export ATB_HOME_PATH=/atb\n")
    environment = os.environ | {"ASCEND_TOOLKIT_HOME": str(tmp_path / toolkit), "ASCEND_DRIVER_HOME": "/nowhere"}
    command = ["bash", str(DOCKER / "entrypoint_ascend.sh"), "printenv", "ASCEND_HOME_PATH", "ATB_HOME_PATH"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30, check=True)
    assert result.stdout.split() == ["/somewhere", "/atb"]


def test_the_entrypoint_sets_the_environment_up_and_becomes_the_command(tmp_path: pathlib.Path) -> None:
    toolkit, driver = tmp_path / "toolkit", tmp_path / "driver"
    toolkit.mkdir()
    (toolkit / "set_env.sh").write_text("export ASCEND_HOME_PATH=/somewhere\n")
    (driver / "lib64").mkdir(parents=True)
    environment = os.environ | {"ASCEND_TOOLKIT_HOME": str(toolkit), "ASCEND_DRIVER_HOME": str(driver)}
    environment.pop("LD_LIBRARY_PATH", None)
    command = ["bash", str(DOCKER / "entrypoint_ascend.sh"), "printenv", "ASCEND_HOME_PATH", "LD_LIBRARY_PATH"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30, check=True)
    home, path = result.stdout.splitlines()
    assert home == "/somewhere"
    assert path.split(":")[0] == str(driver / "lib64")
    assert result.stderr == ""
    environment["ASCEND_DRIVER_HOME"] = str(tmp_path / "none")
    command[-1] = "ASCEND_HOME_PATH"
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30, check=True)
    assert "no driver" in result.stderr
    ended = subprocess.run([*command[:2], "false"], env=environment, capture_output=True, timeout=30, check=False)
    assert ended.returncode == 1
