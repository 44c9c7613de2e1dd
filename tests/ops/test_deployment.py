"""Consistency of the deployment files."""

import re
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
COMPOSE = (ROOT / "compose.yaml").read_text()
VARIABLES = re.compile(r"\$\{(\w+):?-([^}]*)\}")


def test_every_variable_of_compose_is_documented_with_its_default():
    used = dict(VARIABLES.findall(COMPOSE))
    log = dict(re.findall(r"^#?([A-Z_]+)=(.*)$", (ROOT / ".env.example").read_text(), re.MULTILINE))
    # Unset, it is a volume of the same name; the value in the file is an example.
    assert used.pop("MODELS_FOLDER") == "models"
    assert log.pop("MODELS_FOLDER")
    assert used == log


def test_a_variable_has_one_default():
    found = VARIABLES.findall(COMPOSE)
    assert len(dict(found)) == len(set(found))


GATEWAYS = [
    ("gateway", "target", "draft"),
    ("gateway-gpu", "target-gpu", "draft"),
    ("gateway-gpus", "target-gpu", "draft-gpu"),
]


@pytest.mark.parametrize(("gateway", "target", "draft"), GATEWAYS)
def test_the_gateway_reaches_the_services_by_tcp_where_their_images_listen(gateway, target, draft):
    services = yaml.safe_load(COMPOSE)["services"]
    command = VARIABLES.sub(r"\2", services[gateway]["command"])
    found = dict(re.findall(r"--(target|draft) (\S+)", command))
    for kind, name in (("target", target), ("draft", draft)):
        # The gateway serves without a draft, and waits for the target alone.
        condition = "service_healthy" if kind == "target" else "service_started"
        assert services[gateway]["depends_on"][name] == {"condition": condition}
        host, port = found[kind].split(":")
        assert host == name
        assert not {"entrypoint", "healthcheck"} & services[name].keys()  # those of the image
        image = (ROOT / "docker" / f"{kind}.Dockerfile").read_text()
        assert f'ENTRYPOINT ["outrider", "{kind}", "--listen", "0.0.0.0:{port}"]' in image
        assert f'CMD ["outrider", "healthcheck", "127.0.0.1:{port}"]' in image


def test_containers_share_no_sockets():
    composed = yaml.safe_load(COMPOSE)
    assert "unix:" not in COMPOSE
    for name, service in composed["services"].items():
        assert not any("sock" in volume for volume in service.get("volumes", ())), name


@pytest.mark.parametrize(("name", "specification"), [("target", "TORCH_SPEC"), ("draft", "JAX_SPEC")])
def test_a_container_has_a_gpu_where_its_image_is_built_for_one(name, specification):
    services = yaml.safe_load(COMPOSE)["services"]
    plain, gpu = services[name], services[f"{name}-gpu"]
    assert "deploy" not in plain
    assert "gpu" in gpu["deploy"]["resources"]["reservations"]["devices"][0]["capabilities"]
    assert gpu["profiles"] == ["gpu"]
    assert plain["build"]["args"][specification].startswith(f"${{{specification}:-")
    assert gpu["build"]["args"][specification].startswith(f"${{{specification}_GPU:-")
    assert plain["image"] != gpu["image"]
    assert (plain["command"], plain["volumes"]) == (gpu["command"], gpu["volumes"])


@pytest.mark.parametrize("name", ["target", "draft", "gateway"])
def test_every_build_argument_can_be_chosen(name):
    dockerfile = (ROOT / "docker" / f"{name}.Dockerfile").read_text()
    for argument in re.findall(r"^ARG (\w+)", dockerfile, re.MULTILINE):
        assert f"{argument}: ${{{argument}:-" in COMPOSE


def executable(path, script):
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


@pytest.mark.parametrize("triton", [True, False])
@pytest.mark.parametrize("headers", [True, False])
@pytest.mark.parametrize("compiler", [True, False])
def test_the_target_s_image_has_a_compiler_of_c_where_triton_needs_it(tmp_path, triton, headers, compiler):
    last = (ROOT / "docker" / "target.Dockerfile").read_text().split("\nFROM ")[-1]
    (script,) = (run for run in re.findall(r"^RUN ((?:.*\\\n)*.*)$", last, re.MULTILINE) if "triton" in run)
    programs, log, include = tmp_path / "bin", tmp_path / "log", tmp_path / "include"
    programs.mkdir()
    include.mkdir()
    if headers:
        (include / "Python.h").touch()
    executable(programs / "python", f'case "$2" in *triton*) exit {int(not triton)};; esac; echo {include}')
    executable(programs / "apt-get", f'echo "$@" >> {log}')
    executable(programs / "rm", "exit 0")
    if compiler:
        executable(programs / "gcc", "exit 0")
    script = script.replace("/opt/outrider/bin/python", str(programs / "python"))
    subprocess.run(["/bin/sh", "-c", script], env={"PATH": str(programs)}, check=True)
    installed = log.read_text().splitlines()[-1] if log.exists() else ""
    assert ("gcc libc6-dev" in installed) == (triton and not compiler)
    assert ("python3-dev" in installed) == (triton and not compiler and not headers)


@pytest.mark.parametrize("name", ["target", "draft", "gateway"])
def test_images_copy_only_what_the_context_holds(name):
    kept = re.findall(r"^!(.+)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE)
    dockerfile = (ROOT / "docker" / f"{name}.Dockerfile").read_text()
    for line in re.findall(r"^COPY (?!--from)(.+)$", dockerfile, re.MULTILINE):
        for source in line.split()[:-1]:
            assert (ROOT / source).exists()
            assert any(source == path or source.startswith(f"{path}/") for path in kept)
