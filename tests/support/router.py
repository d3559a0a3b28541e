# SPDX-License-Identifier: Apache-2.0
"""vllm-router itself, and a list of pods in which it finds engines as in Kubernetes."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
from aiohttp import web
from aiohttp.test_utils import TestServer

from kvhma.cli.serve_pair import free_ports
from support.examples import kubernetes_objects, pod_commands

ROUTER = shutil.which("vllm-router", path=os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])))
"""That of this environment first: no shell has to have activated it."""


def command_of_kubernetes(port):
    """The command of examples/kubernetes, where all engines serve at one port."""
    return [ROUTER, *pod_commands(kubernetes_objects())["router"][1:], "--service-discovery-port", str(port)]


@asynccontextmanager
async def started(command, tmp_path, environment):
    """The router, with further options for its ports, and a client of it."""
    port, metrics = free_ports(2)
    command = [*command, "--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics)]
    with (
        (tmp_path / "log").open("wb") as log,
        subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | environment) as process,
    ):
        try:
            async with aiohttp.ClientSession(f"http://127.0.0.1:{port}/") as client:
                while await status_of(client, "/readiness") != 200:
                    assert process.poll() is None, (tmp_path / "log").read_text()
                    await asyncio.sleep(0.05)
                yield client, process
        finally:
            process.kill()  # also a router that waits for an answer


async def status_of(client, path, method="GET"):
    try:
        async with client.request(method, path) as answer:
            return answer.status
    except aiohttp.ClientConnectionError:
        return None


class Cluster:
    """Kubernetes' list of pods, as a client of its API watches it."""

    def __init__(self):
        self.pods, self.watchers = [], []
        app = web.Application()
        app.router.add_get("/api/v1/namespaces/kvhma/pods", self.answer)
        self.server = TestServer(app)

    async def answer(self, request):
        if request.query.get("watch") != "true":
            found = {"apiVersion": "v1", "kind": "PodList", "metadata": {"resourceVersion": "1"}, "items": self.pods}
            return web.json_response(found)
        events = web.StreamResponse(headers={"Content-Type": "application/json"})
        await events.prepare(request)
        self.watchers.append(events)
        await asyncio.Event().wait()
        return events

    async def tell(self, kind, pod):
        for events in self.watchers:
            await events.write(json.dumps({"type": kind, "object": pod}).encode() + b"\n")

    def config(self, tmp_path):
        """The file that tells a client where the API is."""
        here = {"name": "here", "cluster": {"server": f"http://127.0.0.1:{self.server.port}"}}
        context = {"name": "here", "context": {"cluster": "here", "user": "router"}}
        found = {"apiVersion": "v1", "kind": "Config", "current-context": "here", "clusters": [here]}
        found |= {"contexts": [context], "users": [{"name": "router", "user": {"token": "t"}}]}
        (tmp_path / "config").write_text(json.dumps(found))
        return str(tmp_path / "config")


def pod(role, host, ready=True, **metadata):
    """A pod with the labels of a deployment of examples/kubernetes."""
    (labels,) = (
        one["spec"]["template"]["metadata"]["labels"]
        for one in kubernetes_objects()
        if (one["kind"], one["metadata"]["name"]) == ("Deployment", role)
    )
    metadata |= {"name": f"{role}-{host}", "namespace": "kvhma", "uid": host, "resourceVersion": "1", "labels": labels}
    conditions = [{"type": "Ready", "status": str(ready)}]
    status = {"phase": "Running", "podIP": host, "conditions": conditions}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"containers": []}, "status": status}
