# SPDX-License-Identifier: Apache-2.0
"""The files of examples/ that start P, D and the router: linted, and their ports, names and secrets agree."""

from __future__ import annotations

import copy
import re
import shutil
import subprocess
import sys

import pytest

yaml = pytest.importorskip("yaml")

from kvhma.versions import VLLM, series
from support.examples import (
    COMPOSE,
    EXAMPLES,
    OVERLAYS,
    UNITS,
    commands,
    compose_services,
    kubernetes_files,
    kubernetes_objects,
    pod_commands,
    script_command,
    transfer_config,
)
from support.monitoring import alert_queries, metrics_of

needs_kubectl = pytest.mark.skipif(
    shutil.which("kubectl") is None, reason="no kubectl: apt-get install kubernetes-client"
)


def verify_unit(text, folder, name):
    """systemd's verdict on a unit; its program is not installed here, so another program replaces it."""
    (folder / name).write_text(re.sub(r"^ExecStart=\S+", "ExecStart=/bin/true", text, flags=re.MULTILINE))
    ended = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(folder / name)], capture_output=True, text=True, check=False
    )
    return ended.returncode, ended.stdout + ended.stderr


KEYS = {
    "Unit": {"Description", "Wants", "After", "StartLimitIntervalSec"},
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


@pytest.mark.parametrize(
    ("path", "right", "wrong"),
    [(COMPOSE, "healthcheck:", "healthchecks:"), (EXAMPLES / "grafana/compose.yaml", "content:", "contents:")],
    ids=["engines", "dashboard"],
)
def test_compose_file_is_one(path, right, wrong, tmp_path):
    pytest.importorskip("check_jsonschema", reason="make dev installs it")
    ended = check_compose(path)
    assert ended.returncode == 0, ended.stdout
    (tmp_path / "compose.yaml").write_text(path.read_text().replace(right, wrong))
    assert check_compose(tmp_path / "compose.yaml").returncode == 1


def validate(made):
    kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="make dev installs it")
    newest = kubernetes_validate.latest_version()
    for one in made:
        if one["kind"] == "PodMonitor":  # not Kubernetes' own: the Prometheus operator defines it
            assert one["spec"].keys() == {"jobLabel", "selector", "podMetricsEndpoints"}
            continue
        kubernetes_validate.validate(one, newest, strict=True)
        inside = next(key for key in ("spec", "rules", "roleRef", "data", "metadata") if key in one)
        if isinstance(one[inside], dict) and inside != "data":
            with pytest.raises(kubernetes_validate.ValidationError):
                kubernetes_validate.validate(one | {inside: one[inside] | {"replica": 2}}, newest, strict=True)


@pytest.mark.parametrize("path", kubernetes_files(), ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_kubernetes_takes_the_objects(path):
    validate(yaml.safe_load_all(path.read_text()))


@needs_kubectl
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_kubernetes_takes_what_kustomize_makes(overlay):
    validate(kubernetes_objects(overlay))


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


def test_the_dockerfile_installs_what_the_commands_need(started):
    text = (EXAMPLES / "Dockerfile").read_text()
    version = re.search(r"^ARG VLLM=\S+:v(\S+)", text, re.MULTILINE)[1]
    assert version in VLLM
    supported = re.search(r"vLLM (\S+) to (\S+) for your GPUs", text).groups()
    assert tuple(map(series, supported)) == (series(VLLM[0]), series(VLLM[-1]))
    extras = set(re.search(r"\[([\w,]+)\]", text)[1].split(","))
    tomllib = pytest.importorskip("tomllib", reason="Python 3.11 reads pyproject.toml")
    known = tomllib.loads((EXAMPLES.parent / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras <= known.keys()
    assert {"vllm", "router"} <= extras
    programs = {command[0].rpartition("/")[2] for command in started.values()}
    assert programs == {"vllm", "vllm-router"}
    images = {container["image"] for pod in pods(kubernetes_objects()) for container in pod["spec"]["containers"]}
    assert images == {re.search(r"-t (\S+)", text)[1]}


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


# --- Kubernetes: what one object calls another -----------------------------------------------------------------------


def pods(made):
    return [one["spec"]["template"] for one in made if one["kind"] == "Deployment"]


def ports_of(pod):
    """Ports by name, of all containers of a pod."""
    containers = pod["spec"]["containers"] + pod["spec"].get("initContainers", [])
    return {port["name"]: port["containerPort"] for container in containers for port in container.get("ports", ())}


OUTSIDE = ({"llm-d-router-standalone": "kvhma-epp"},)
"""Labels of pods that other projects start."""
PROMETHEUS = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
METRICS_AT = {"vllm": "--port", "vllm-router": "--prometheus-port"}
"""By program the option that names the port of its metrics."""


def dangling(made):
    """Names, labels and ports that lead nowhere."""
    found = []

    def check(good, *what):
        found.extend([] if good else [" ".join(map(str, what))])

    def chosen(selector, where):
        selector = selector.get("matchLabels", selector)
        match = [pod for pod in pods(made) if selector.items() <= pod["metadata"]["labels"].items()]
        check(match or selector in OUTSIDE, where, "selects no pod:", selector)
        return match

    def named(kind, name, where):
        check(any((one["kind"], one["metadata"]["name"]) == (kind, name) for one in made), where, "no", kind, name)

    def has(port, among, where):
        check(any(port in ports_of(pod) or port in ports_of(pod).values() for pod in among), where, "no port", port)

    for one in made:
        kind, spec = one["kind"], one.get("spec", {})
        where = f"{kind} {one['metadata']['name']}"
        if kind == "Service":
            for port in spec["ports"]:
                has(port["targetPort"], chosen(spec["selector"], where), where)
        elif kind == "Ingress":
            (path,) = spec["rules"][0]["http"]["paths"]
            check(path["path"] == "/v1", where, "passes on more than /v1")
            backend = path["backend"]["service"]
            named("Service", backend["name"], where)
            services = (other for other in made if other["kind"] == "Service")
            check(
                any(backend["port"]["name"] == port["name"] for other in services for port in other["spec"]["ports"]),
                where,
                "no port",
                backend["port"],
            )
        elif kind == "NetworkPolicy":
            among = chosen(spec["podSelector"], where)
            for rule in spec["ingress"]:
                for source in rule["from"]:
                    if "podSelector" in source:
                        chosen(source["podSelector"], where)
                for port in rule.get("ports", ()):
                    has(port["port"], among, where)
        elif kind == "PodMonitor":
            among = chosen(spec["selector"], where)
            jobs = {pod["metadata"]["labels"].get(spec["jobLabel"]) for pod in among}
            check({"prefill", "decode"} <= jobs, where, "alerts need the jobs of the engines, not", jobs)
            for endpoint in spec["podMetricsEndpoints"]:
                has(endpoint["port"], among, where)
        elif kind == "PodDisruptionBudget":
            chosen(spec["selector"], where)
        elif kind == "RoleBinding":
            named(one["roleRef"]["kind"], one["roleRef"]["name"], where)
            for subject in one["subjects"]:
                named(subject["kind"], subject["name"], where)
        elif kind == "Deployment":
            command = pod_commands(made)[one["metadata"]["name"]]
            options = {word.partition("=")[0]: word.partition("=")[2] for word in command if word.startswith("--")}
            check_deployment(one, command, options, check, chosen, named, where)
            check_metrics(one["spec"]["template"], options[METRICS_AT[command[0]]], made, check, where)
    return found


def check_metrics(pod, number, made, check, where):
    """Prometheus scrapes a port with metrics once, since sums would count two scrapes, and a policy lets it in."""
    ports, labels = ports_of(pod), pod["metadata"]["labels"].items()

    def specs(kind, selector):
        return [
            one["spec"]
            for one in made
            if one["kind"] == kind and one["spec"][selector]["matchLabels"].items() <= labels
        ]

    check(int(number) in ports.values(), where, "serves metrics at", number)
    with_metrics = [name for name, port in ports.items() if port == int(number) or name == "metrics"]
    endpoints = [one["port"] for spec in specs("PodMonitor", "selector") for one in spec["podMetricsEndpoints"]]
    scraped = [port for port in endpoints if port in ports]
    check(with_metrics == scraped, where, "has metrics at", with_metrics, "and is scraped at", scraped)
    rules = [rule for spec in specs("NetworkPolicy", "podSelector") for rule in spec["ingress"]]
    allowed = [port["port"] for rule in rules if PROMETHEUS in rule["from"] for port in rule["ports"]]
    check(with_metrics == allowed, where, "has metrics at", with_metrics, "and lets Prometheus in at", allowed)


def check_deployment(one, command, options, check, chosen, named, where):
    pod = one["spec"]["template"]
    check(pod in chosen(one["spec"]["selector"], where), where, "does not select its own pods")
    if "serviceAccountName" in pod["spec"]:
        named("ServiceAccount", pod["spec"]["serviceAccountName"], where)
    (container,) = pod["spec"]["containers"]
    for source in container.get("envFrom", ()):
        named("ConfigMap", source["configMapRef"]["name"], where)
    mounts = {volume["name"] for volume in container.get("volumeMounts", ())}
    check(mounts == {volume["name"] for volume in pod["spec"].get("volumes", ())}, where, "volumes", mounts)
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        if probe in container:
            check(container[probe]["httpGet"]["port"] in ports_of(pod), where, probe)
    check("$(" not in " ".join(command), where, "a variable has no value")
    stop = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    left = pod["spec"]["terminationGracePeriodSeconds"] - stop - int(options.get("--shutdown-timeout", 0))
    check(left >= 15, where, "is killed before it ends")
    check(ports_of(pod)[container["ports"][0]["name"]] == int(options["--port"]), where, "port", options["--port"])
    if command[0] == "vllm-router":
        check(options.get("--prometheus-host") == "0.0.0.0", where, "serves its metrics to its own host only")
        check(
            container["readinessProbe"]["httpGet"]["path"] == "/readiness", where, "is not ready if one engine is gone"
        )
        for role in ("prefill", "decode"):
            at = command.index(f"--{role}-selector")
            for engine in chosen(dict(word.split("=") for word in command[at + 1 : at + 3]), where):
                check(
                    ports_of(engine)["http"] == int(options["--service-discovery-port"]), where, role, "at other port"
                )
                check(engine["metadata"]["labels"]["role"] == role, where, role, "selects others")
    elif options.get("--kv-transfer-config") is not None and "kv_producer" in " ".join(command):
        check(one["spec"]["replicas"] > 1, where, "has one replica")
        check(stop >= 30, where, "ends before D has read")
    for sidecar in pod["spec"].get("initContainers", ()):
        own = dict(word[2:].split("=") for word in sidecar["args"])
        check(int(own["model-server-port"]) == ports_of(pod)["http"], where, "the sidecar asks another port")
        check(int(own["port"]) == ports_of(pod)["sidecar"], where, "the sidecar listens at another port")


@needs_kubectl
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_in_kubernetes_every_name_leads_somewhere(overlay):
    made = kubernetes_objects(overlay)
    assert dangling(made) == []
    assert {one["metadata"]["namespace"] for one in made} == {"kvhma"}


def put(path, value):
    """Change an object: the keys on the way, the last of which gets the value."""
    *keys, last = path.split("/")

    def change(one):
        for key in keys:
            one = one[int(key) if key.isdigit() else key]
        one[int(last) if last.isdigit() else last.replace("~1", "/")] = value

    return change


POD = "spec/template/spec"
WRONG = {
    ("Service", "kvhma"): [put("spec/selector/role", "proxy"), put("spec/ports/0/targetPort", "http")],
    ("Ingress", "kvhma"): [
        put("spec/rules/0/http/paths/0/path", "/"),
        put("spec/rules/0/http/paths/0/backend/service/port/name", "http"),
        put("spec/rules/0/http/paths/0/backend/service/name", "router"),
    ],
    ("NetworkPolicy", "engines"): [
        put("spec/ingress/1/ports/0/port", "api"),
        put("spec/podSelector/matchLabels/app", "x"),
        put("spec/podSelector/matchLabels/role", "decode"),
        put("spec/ingress/1/ports/0/port", "side-channel"),
        put("spec/ingress/1/from/0/namespaceSelector/matchLabels/kubernetes.io~1metadata.name", "x"),
    ],
    ("NetworkPolicy", "router"): [put("spec/ingress/1/ports/0/port", "api")],
    ("NetworkPolicy", "from-router"): [put("spec/ingress/0/from/0/podSelector/matchLabels/role", "proxy")],
    ("PodMonitor", "kvhma"): [
        put("spec/jobLabel", "app"),
        put("spec/podMetricsEndpoints/1/port", "prometheus"),
        put("spec/selector/matchLabels/app", "x"),
        put("spec/podMetricsEndpoints", [{"port": "http"}]),
        put("spec/podMetricsEndpoints", [{"port": "metrics"}]),
        put("spec/podMetricsEndpoints", [{"port": "http"}, {"port": "metrics"}, {"port": "metrics"}]),
        put("spec/selector/matchLabels/engine", "true"),
    ],
    ("PodDisruptionBudget", "prefill"): [put("spec/selector/matchLabels/role", "p")],
    ("RoleBinding", "router"): [put("roleRef/name", "x"), put("subjects/0/name", "x")],
    ("Deployment", "prefill"): [
        put("spec/replicas", 1),
        put(f"{POD}/containers/0/args/0", "$(MODELS)"),
        put("spec/selector/matchLabels/role", "decode"),
        put(f"{POD}/containers/0/envFrom/0/configMapRef/name", "x"),
        put(f"{POD}/containers/0/ports/0/containerPort", 8100),
        put(f"{POD}/containers/0/ports/1/name", "metrics"),
        put(f"{POD}/containers/0/livenessProbe/httpGet/port", "api"),
        put(f"{POD}/containers/0/lifecycle/preStop/sleep/seconds", 5),
        put(f"{POD}/terminationGracePeriodSeconds", 60),
        put(f"{POD}/volumes/0/name", "x"),
    ],
    ("Deployment", "router"): [
        put(f"{POD}/serviceAccountName", "default"),
        put(f"{POD}/containers/0/readinessProbe/httpGet/path", "/health"),
        put(f"{POD}/containers/0/ports/1/containerPort", 9090),
        put(f"{POD}/containers/0/args/18", "--prometheus-host=127.0.0.1"),
        put(f"{POD}/containers/0/args/6", "--service-discovery-port=8100"),
        put(f"{POD}/containers/0/args/9", "role=decode"),
    ],
    ("Deployment", "decode"): [
        put(f"{POD}/initContainers/0/args/0", "--port=8001"),
        put(f"{POD}/initContainers/0/args/1", "--model-server-port=8000"),
    ],
    ("NetworkPolicy", "from-llm-d"): [put("spec/ingress/0/ports/0/port", 80)],
}


@needs_kubectl
def test_a_name_that_leads_nowhere_is_found():
    overlays = {overlay: kubernetes_objects(overlay) for overlay in OVERLAYS}
    for (kind, name), changes in WRONG.items():
        overlay = "llm-d" if name in ("decode", "from-llm-d") else "router"
        for number, change in enumerate(changes):
            made = copy.deepcopy(overlays[overlay])
            (one,) = (one for one in made if (one["kind"], one["metadata"]["name"]) == (kind, name))
            change(one)
            assert dangling(made), (kind, name, number)


@needs_kubectl
def test_every_program_whose_metrics_an_alert_asks_is_in_kubernetes():
    asked = {metric for _, query in alert_queries() for metric in metrics_of(query)}
    programs = {"vllm-router" if metric.startswith("vllm_router_") else "vllm" for metric in asked}
    made = kubernetes_objects("router")
    assert programs == METRICS_AT.keys() == {command[0] for command in pod_commands(made).values()}
    assert len([one for one in made if one["kind"] == "PodDisruptionBudget"]) == len(pods(made)) == 3


@needs_kubectl
def test_without_the_prometheus_operator_only_its_object_is_left_out(tmp_path):
    shutil.copytree(EXAMPLES / "kubernetes", tmp_path, dirs_exist_ok=True)
    for overlay in OVERLAYS:
        path = tmp_path / overlay / "kustomization.yaml"
        path.write_text(re.sub(r"^components: .*\n", "", path.read_text(), flags=re.MULTILINE))
        assert kubernetes_objects(tmp_path / overlay) == [
            one for one in kubernetes_objects(overlay) if one["kind"] != "PodMonitor"
        ]


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
