# SPDX-License-Identifier: Apache-2.0
"""The files of examples/ that start P, D and the router: linted, and their ports, names and secrets agree."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys

import pytest

yaml = pytest.importorskip("yaml")

from support.examples import (
    COMPOSE,
    EXAMPLES,
    OVERLAYS,
    UNITS,
    commands,
    compose_services,
    kubernetes_objects,
    script_command,
    transfer_config,
)

needs_kubectl = pytest.mark.skipif(
    shutil.which("kubectl") is None, reason="no kubectl: apt-get install kubernetes-client"
)


@pytest.fixture
def started(tmp_path):
    return commands(tmp_path)


def of(started, how, role):
    (found,) = (command for name, command in started.items() if name.startswith(how) and role in name)
    return found


def port(command):
    joined = " ".join(command)
    return re.search(r"--port[ =](\d+)", joined)[1]


@pytest.mark.parametrize("how", ["examples", "systemd", "compose", "kubernetes"])
def test_engines_are_a_pair(started, how):
    p, d = of(started, how, "prefill"), of(started, how, "decode")
    configs = transfer_config(p), transfer_config(d)
    assert [config["kv_role"] for config in configs] == ["kv_producer", "kv_consumer"]
    for config in configs:
        assert config["kv_connector"] == "KvhmaConnector"
        assert "kv_connector_module_path" not in config, "vLLM knows the name where kvhma is installed"
    assert p[:2] == d[:2] == ["vllm", "serve"]
    assert p[2] == d[2], "the model"
    assert (port(p) == port(d)) == (how == "kubernetes"), "vllm-router looks for all pods at one port"
    for command in (p, d):
        assert "--enable-prompt-tokens-details" in command, "else no client learns what was cached"
    secrets = [config["kv_connector_extra_config"].get("secret_file") for config in configs]
    if how == "examples":
        assert secrets == [None, None]
    else:
        assert secrets[0] == secrets[1] is not None
        assert "allowed_prefill_engines" in configs[1]["kv_connector_extra_config"]
        sent = " ".join(of(started, how, "router"))
        hosts = {"systemd": ("10.0.0.7", "10.0.0.8")}.get(how, ("prefill", "decode"))
        for option, host, command in zip(("--prefill", "--decode"), hosts, (p, d), strict=True):
            url = f"{option}=http://{host}:{port(command)}"
            assert how == "kubernetes" or url in sent.replace(f"{option} ", f"{option}=")


@pytest.mark.parametrize("how", ["systemd", "compose", "kubernetes"])
def test_the_router_takes_its_arguments(started, how):
    launch = pytest.importorskip("vllm_router.launch_router", reason="make dev installs it")
    program, *words = of(started, how, "router")
    assert program.rpartition("/")[2] == "vllm-router"
    options = launch.parse_router_args(words)
    options._validate_router_args()
    assert (options.port, options.prometheus_port) == (8000, 29000)
    assert options.vllm_pd_disaggregation
    assert options.health_check_interval_secs <= 2, "while an engine is gone, requests for it fail"
    assert options.host == ("127.0.0.1" if how == "systemd" else "0.0.0.0")
    urls = (options.prefill_urls, options.decode_urls, options.service_discovery)
    assert [bool(one) for one in urls] == [how != "kubernetes", how != "kubernetes", how == "kubernetes"]


def test_scripts_use_their_environment(tmp_path):
    given = {"PORT": "1", "SIDE_HOST": "h", "SIDE_PORT": "2", "SECRET_FILE": "/s", "ALLOWED": '["a:1"]'}
    for script in ("prefill.sh", "decode.sh"):
        command = script_command(script, tmp_path, **given)
        extra = {"side_channel_host": "h", "side_channel_port": 2, "secret_file": "/s"}
        if script == "decode.sh":
            extra["allowed_prefill_engines"] = ["a:1"]
        assert transfer_config(command)["kv_connector_extra_config"] == extra
        assert port(command) == "1"
        assert command[-2:] == ["--max-model-len", "1024"]


# --- what systemd, compose and Kubernetes accept ----------------------------------------------------------------------


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_systemd_takes_the_units(unit, tmp_path):
    if shutil.which("systemd-analyze") is None:
        pytest.skip("needs systemd-analyze")
    text = re.sub(r"^ExecStart=\S+", "ExecStart=/bin/true", unit.read_text(), flags=re.MULTILINE)
    (tmp_path / unit.name).write_text(text)  # its program is not installed here
    command = ["systemd-analyze", "verify", "--man=no", str(tmp_path / unit.name)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout + ended.stderr) == (0, "")


@pytest.mark.parametrize("path", [COMPOSE, EXAMPLES / "grafana/compose.yaml"], ids=["engines", "dashboard"])
def test_compose_takes_the_files(path):
    pytest.importorskip("check_jsonschema", reason="make dev installs it")
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(path)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout


@needs_kubectl
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_kubernetes_takes_the_objects(overlay):
    kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="make dev installs it")
    for made in kubernetes_objects(overlay):
        assert made["metadata"]["namespace"] == "kvhma"
        if made["kind"] != "PodMonitor":  # not Kubernetes' own: the Prometheus operator defines it
            kubernetes_validate.validate(made, kubernetes_validate.latest_version(), strict=True)


OTHERS_LABELS = {"llm-d-router-standalone": "kvhma-epp"}
"""Labels of pods that another project starts."""


def selectors(value):
    """Every selector of pods inside of an object."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inside in items:
        if key in ("selector", "podSelector"):
            yield inside.get("matchLabels", inside)
        else:
            yield from selectors(inside)


@needs_kubectl
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_kubernetes_objects_find_their_pods_and_ports(overlay):
    """Names that lead nowhere are no error for Kubernetes: traffic and metrics are just missing."""
    made = kubernetes_objects(overlay)
    pods = [one["spec"]["template"] for one in made if one["kind"] == "Deployment"]
    ports = {}
    for pod in pods:
        for container in pod["spec"]["containers"] + pod["spec"].get("initContainers", []):
            ports |= {port["name"]: port["containerPort"] for port in container.get("ports", ())}
    for one in made:
        where = (one["kind"], one["metadata"]["name"])
        for labels in selectors(one.get("spec", {})):
            selected = [pod for pod in pods if labels.items() <= pod["metadata"]["labels"].items()]
            assert selected or labels == OTHERS_LABELS, (*where, labels)
        if one["kind"] in ("Service", "NetworkPolicy", "PodMonitor"):
            text = json.dumps(one["spec"])
            named = re.findall(r'"(?:targetPort|port)": (?:"([a-z-]+)"|(\d+))', text)
            if one["kind"] == "Service":
                named = [(port["targetPort"], "") for port in one["spec"]["ports"]]
            for name, number in named:
                assert name in ports or number in map(str, ports.values()), (*where, name or number)


def test_in_compose_only_the_router_is_where_clients_are():
    services = compose_services()["services"]
    assert {name for name, service in services.items() if "clients" in service["networks"]} == {"router"}
    assert {name for name, service in services.items() if "ports" in service} == {"router"}
    assert all(port.startswith("127.0.0.1:") for port in services["router"]["ports"]), (
        "it obeys every client that reaches it"
    )
    for name in ("prefill", "decode"):
        config = transfer_config([*services[name]["command"]])["kv_connector_extra_config"]
        assert config["side_channel_host"] == name, "other containers know this one by its service's name"
        assert services[name]["environment"]["PORT"] == port(services[name]["command"])
