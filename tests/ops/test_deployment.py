"""Consistency of the deployment files."""

import re
import subprocess
from pathlib import Path

import pytest
import yaml

from gateway.admission.access import Access
from outrider.config import DraftConfig, GatewayConfig, TargetConfig, parse_flags

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
    ("gateway-tpu", "target", "draft-tpu"),
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
        scheme, host, port = found[kind].split(":")
        assert (scheme, host) == ("dns", name)  # all containers of the service
        assert not {"entrypoint", "healthcheck"} & services[name].keys()  # those of the image
        image = (ROOT / "docker" / f"{kind}.Dockerfile").read_text()
        assert f'ENTRYPOINT ["outrider", "{kind}", "--listen", "0.0.0.0:{port}"]' in image
        assert f'CMD ["outrider", "healthcheck", "127.0.0.1:{port}"]' in image


@pytest.mark.parametrize("name", ["target", "draft", "target-gpu", "draft-gpu"])
def test_a_service_has_as_many_containers_as_divide_its_cores(name):
    service, kind = yaml.safe_load(COMPOSE)["services"][name], name.partition("-")[0]
    number = f"${{{kind.upper()}_REPLICAS:-1}}"
    assert service["scale"] == number
    assert f"--cores auto --machine-replicas {number} " in service["command"]
    command = VARIABLES.sub(lambda found: {f"{kind.upper()}_REPLICAS": "3"}.get(found[1], found[2]), service["command"])
    config = parse_flags(TargetConfig if kind == "target" else DraftConfig, command.split(), f"outrider {kind}")
    assert (config.cores, config.machine_replicas) == ("auto", 3)


def test_no_name_keeps_a_service_from_having_several_containers():
    for name, service in yaml.safe_load(COMPOSE)["services"].items():
        assert not {"container_name", "hostname"} & service.keys(), name


def test_containers_share_no_sockets():
    composed = yaml.safe_load(COMPOSE)
    assert "unix:" not in COMPOSE
    for name, service in composed["services"].items():
        assert not any("sock" in volume for volume in service.get("volumes", ())), name


@pytest.mark.parametrize("name", ["target", "draft"])
def test_a_container_has_a_gpu_where_its_image_is_built_for_one(name):
    services = yaml.safe_load(COMPOSE)["services"]
    plain, gpu = services[name], services[f"{name}-gpu"]
    assert "deploy" not in plain
    assert "gpu" in gpu["deploy"]["resources"]["reservations"]["devices"][0]["capabilities"]
    assert gpu["profiles"] == ["gpu"]
    assert plain["build"]["args"]["ACCELERATOR"] == "${ACCELERATOR:-cpu}"
    assert gpu["build"]["args"]["ACCELERATOR"] == "${ACCELERATOR_GPU:-cuda13}"
    for service, variable in ((plain, "TORCH_INDEX"), (gpu, "TORCH_INDEX_GPU")):
        assert service["build"]["args"].get("TORCH_INDEX") == (f"${{{variable}:-}}" if name == "target" else None)
    (device,) = gpu["deploy"]["resources"]["reservations"]["devices"]
    assert device["device_ids"] == [f"${{{name.upper()}_GPUS:-0}}"]
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


# --- what a stranger, or a process that was taken over, can do ---

SERVICES = yaml.safe_load(COMPOSE)["services"]
OWN = sorted(name for name in SERVICES if name.split("-")[0] in ("token", "target", "draft", "gateway"))


def default(text):
    """A value with the defaults of its variables."""
    return VARIABLES.sub(r"\2", str(text))


@pytest.mark.parametrize("name", SERVICES)
def test_containers_are_confined(name):
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert not {"privileged", "cap_add", "pid", "ipc", "user"} & service.keys()
    assert list(map(default, service.get("devices", ()))) == (["/dev/vfio"] if name == "draft-tpu" else [])
    assert service.get("network_mode") != "host"
    assert re.fullmatch(r"\d+[mg]", default(service["mem_limit"]))
    assert 0 < service["pids_limit"] <= 4096
    written = [volume.split(":") for volume in map(str, service.get("volumes", ())) if not volume.endswith(":ro")]
    assert {default(source) for source, _ in written} <= {"cache", "token", "prometheus", "grafana"}
    assert all(folder != "/run/outrider" for _, folder in written) or name == "token"


@pytest.mark.parametrize("name", OWN)
def test_services_and_gateways_have_the_token_that_one_container_makes(name):
    service, file = SERVICES[name], "/run/outrider/token"
    if name == "token":
        assert service["entrypoint"] == ["outrider", "token"]
        assert service["command"] == file
        assert default(service["environment"]["OUTRIDER_SERVICE_TOKEN"]) == ""
        assert service["restart"] == "no"
        return
    assert f"--service-token-file {file}" in service["command"]
    assert "token:/run/outrider:ro" in service["volumes"]
    first = service if "token" in service["depends_on"] else SERVICES[next(iter(service["depends_on"]))]
    assert first["depends_on"]["token"] == {"condition": "service_completed_successfully"}
    image = (ROOT / "docker" / f"{name.split('-')[0]}.Dockerfile").read_text()
    assert "--owner=outrider --group=outrider --mode=0700 /run/outrider" in image
    assert "--allow-unauthenticated" not in COMPOSE + image


@pytest.mark.parametrize("name", [name for name in OWN if name.startswith("gateway")])
def test_the_gateway_gets_the_keys_of_its_callers(name):
    given = SERVICES[name]["environment"]
    assert given["OUTRIDER_API_KEY"] == "${API_KEY:-}"
    assert given["OUTRIDER_ADMIN_API_KEY"] == "${ADMIN_API_KEY:-}"


@pytest.mark.parametrize("hosts", [(), ("api.example.com", ".example.org")])
@pytest.mark.parametrize("name", [name for name in OWN if name.startswith("gateway")])
def test_an_operator_reaches_the_control_routes_by_the_names_in_the_settings(name, hosts):
    settings = {"ALLOWED_HOSTS": " ".join(hosts), "ALLOWED_ORIGINS": "https://page.example"}
    command = VARIABLES.sub(lambda found: settings.get(found[1], found[2]), SERVICES[name]["command"])
    config = parse_flags(GatewayConfig, command.split(), "outrider gateway")
    config.check_access()
    assert (config.allowed_hosts, config.allowed_origins) == (hosts, ("https://page.example",))
    access = Access(config)
    assert [access.allows(host) for host in ("api.example.com", "a.example.org", "evil.example")] == [
        *[bool(hosts)] * 2,
        False,
    ]
    environment = {key: VARIABLES.sub("superior", value) for key, value in SERVICES[name]["environment"].items()}
    assert config.admin_keys(environment) == ["superior"]


def test_only_gateways_are_published_with_the_api():
    for name, service in SERVICES.items():
        hosts = {port.split("}")[0] + "}" if port.startswith("$") else port for port in service.get("ports", ())}
        follows = {host for host in hosts if host.startswith("${PUBLISH")}
        assert bool(follows) == name.startswith("gateway"), name
        assert name.startswith("gateway") or not set(service.get("networks", ["default"])) >= {"default", "services"}
        for port in service.get("ports", ()):
            assert default(port).startswith("127.0.0.1:")
        if name.startswith(("target", "draft")):
            assert service["networks"] == ["services"]
            assert "ports" not in service


def test_every_image_of_another_project_is_pinned_to_a_release():
    images = [default(service["image"]) for name, service in SERVICES.items() if name not in OWN]
    images += [default(SERVICES[name]["build"]["args"]["BASE_IMAGE"]) for name in OWN]
    images += re.findall(r"^ARG BASE_IMAGE=(.+)$", "".join(map(Path.read_text, (ROOT / "docker").glob("*file"))), re.M)
    assert len(images) == 2 + len(OWN) + 3
    for image in images:
        assert re.search(r":v?\d+\.\d+\.\d+", image), image


@pytest.mark.parametrize(("password", "starts"), [("", False), ("secret", True)])
def test_grafana_has_no_password_that_everybody_knows_and_admits_no_anonymous_users(tmp_path, password, starts):
    grafana = SERVICES["grafana"]
    assert default(grafana["environment"]["GF_SECURITY_ADMIN_PASSWORD"]) == ""
    assert grafana["environment"]["GF_AUTH_ANONYMOUS_ENABLED"] == "false"
    shell, flag, script = grafana["entrypoint"]
    executable(tmp_path / "run.sh", "echo started")
    script = script.replace("$$", "$").replace("/run.sh", f"{tmp_path}/run.sh")
    result = subprocess.run(
        [shell, flag, script], env={"GF_SECURITY_ADMIN_PASSWORD": password}, capture_output=True, text=True
    )
    assert (result.returncode == 0, "started" in result.stdout) == (starts, starts)
    assert starts or "GRAFANA_PASSWORD" in result.stderr
