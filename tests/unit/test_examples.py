# SPDX-License-Identifier: Apache-2.0
"""The files of examples/ that start P, D and the proxy: linted, and their ports and secrets agree."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys

import pytest

pytest.importorskip("yaml")

from support.examples import (
    COMPOSE,
    UNITS,
    commands,
    compose_services,
    kubernetes_objects,
    script_command,
    transfer_config,
)


def verify_unit(text, folder, name):
    """systemd's verdict on a unit; its program is not installed here, so another program replaces it."""
    (folder / name).write_text(re.sub(r"^ExecStart=\S+", "ExecStart=/bin/true", text, flags=re.MULTILINE))
    ended = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(folder / name)], capture_output=True, text=True, check=False
    )
    return ended.returncode, ended.stdout + ended.stderr


KEYS = {
    "Unit": {"Description", "Wants", "After"},
    "Service": {
        *("User", "Group", "DynamicUser", "EnvironmentFile", "Environment", "ExecStart", "Restart"),
        *("RestartSec", "TimeoutStartSec", "TimeoutStopSec", "LimitMEMLOCK", "LimitNOFILE", "NoNewPrivileges"),
        *("ProtectSystem", "ProtectHome"),
    },
    "Install": {"WantedBy"},
}
"""The options of systemd.unit(5), systemd.service(5) and systemd.exec(5) that the units use: for other systems."""


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_units_have_keys_of_their_sections(unit):
    section = None
    for line in unit.read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        if line.startswith("["):
            section = line.strip("[]")
        else:
            assert line.partition("=")[0] in KEYS[section], line


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_systemd_takes_the_units(unit, tmp_path):
    if shutil.which("systemd-analyze") is None:
        pytest.skip("needs systemd-analyze")
    assert verify_unit(unit.read_text(), tmp_path, unit.name) == (0, "")
    wrong = unit.read_text().replace("RestartSec=", "RestartSeconds=")
    assert "RestartSeconds" in verify_unit(wrong, tmp_path, unit.name)[1]


def check_compose(path):
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_compose_file_is_one(tmp_path):
    pytest.importorskip("check_jsonschema", reason="make dev installs it")
    ended = check_compose(COMPOSE)
    assert ended.returncode == 0, ended.stdout
    (tmp_path / "compose.yaml").write_text(COMPOSE.read_text().replace("healthcheck:", "healthchecks:"))
    assert check_compose(tmp_path / "compose.yaml").returncode == 1


@pytest.mark.parametrize("made", kubernetes_objects(), ids=lambda made: f"{made['kind']} {made['metadata']['name']}")
def test_kubernetes_takes_the_objects(made):
    kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="make dev installs it")
    newest = kubernetes_validate.latest_version()
    kubernetes_validate.validate(made, newest, strict=True)
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(made | {"spec": made["spec"] | {"replica": 2}}, newest, strict=True)


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
    assert port(p) != port(d)
    assert "--enable-prompt-tokens-details" in d, "else the proxy cannot see whether D loaded a cache"
    secrets = [config["kv_connector_extra_config"].get("secret_file") for config in configs]
    if how == "examples":
        assert secrets == [None, None]
    else:
        assert secrets[0] == secrets[1] is not None
        assert "allowed_prefill_engines" in configs[1]["kv_connector_extra_config"]
        sent = " ".join(of(started, how, "proxy"))
        host = {"systemd": ("10.0.0.7", "10.0.0.8")}.get(how, ("prefill", "decode"))
        assert f"--prefill=http://{host[0]}:{port(p)}" in sent.replace("--prefill ", "--prefill=")
        assert f"--decode=http://{host[1]}:{port(d)}" in sent.replace("--decode ", "--decode=")


@pytest.mark.parametrize("how", ["systemd", "compose", "kubernetes"])
def test_the_proxy_takes_its_arguments(started, how):
    pytest.importorskip("aiohttp", reason="make dev installs it")
    from kvhma import proxy

    python, option, module, *words = of(started, how, "proxy")
    assert re.fullmatch(r"(.*/)?python3?", python)
    assert (option, module) == ("-m", "kvhma.proxy")
    options = proxy.parser().parse_args(words)
    assert (options.host, options.port) == ("0.0.0.0", 8000)


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


def test_in_kubernetes_every_name_leads_somewhere():
    made = {(one["kind"], one["metadata"]["name"]): one for one in kubernetes_objects()}
    pods = {name: one["spec"]["template"] for (kind, name), one in made.items() if kind == "Deployment"}
    for (kind, _), one in made.items():
        chosen = one["spec"].get("podSelector", {}).get("matchLabels") or one["spec"]["selector"]
        chosen = chosen.get("matchLabels", chosen)
        assert any(chosen.items() <= pod["metadata"]["labels"].items() for pod in pods.values()), one["metadata"]
        for port in one["spec"].get("ports", []) if kind == "Service" else []:
            (pod,) = (pod for pod in pods.values() if chosen.items() <= pod["metadata"]["labels"].items())
            assert port["targetPort"] in {named["name"] for named in pod["spec"]["containers"][0]["ports"]}
    for pod in pods.values():
        (container,) = pod["spec"]["containers"]
        assert {volume["name"] for volume in container.get("volumeMounts", ())} == {
            volume["name"] for volume in pod["spec"].get("volumes", ())
        }
    rule = made["NetworkPolicy", "kvhma-engines"]["spec"]
    assert rule["podSelector"]["matchLabels"].items() <= pods["prefill"]["metadata"]["labels"].items()
    assert not rule["podSelector"]["matchLabels"].items() <= pods["proxy"]["metadata"]["labels"].items()


def test_in_compose_only_the_proxy_is_where_clients_are():
    services = compose_services()["services"]
    assert {name for name, service in services.items() if "clients" in service["networks"]} == {"proxy"}
    assert {name for name, service in services.items() if "ports" in service} == {"proxy"}
    for name in ("prefill", "decode"):
        config = transfer_config([*services[name]["command"]])["kv_connector_extra_config"]
        assert config["side_channel_host"] == name, "other containers know this one by its service's name"
        assert services[name]["environment"]["PORT"] == port(services[name]["command"])
