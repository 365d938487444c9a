#!/usr/bin/env python3
"""Measures Millrace and its peers in turns, with one client, and prints ratios.

All servers run at the same time, but only one has load. In each round each server gets the same load
from `millrace load`, in an order that changes by round. A figure is the median over rounds with its
range. A ratio is taken within each round, so that other load on the machine affects both sides.
Prepare with benches/peers/setup.sh.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
PEERS = ROOT / "target" / "peers"
MILLRACE = ROOT / "target" / "dist" / "millrace"
MODELS = {"mlp": [64], "resnet50": [3, 224, 224]}

# The name under which Millrace serves the MLP with batches of up to 64 requests, as Triton does. Under
# the name `mlp`, Millrace runs each request alone.
BATCHED = "mlp-batched"

# Each case: name, model, Millrace's name of the model, protocol, concurrency, peers, seconds of a turn.
CASES = [
    ("MLP 1x64, gRPC, concurrency 1", "mlp", "mlp", "grpc", 1, ["triton", "mlserver"], 3),
    ("MLP 1x64, gRPC, concurrency 64", "mlp", "mlp", "grpc", 64, ["triton", "mlserver"], 3),
    ("MLP 1x64, gRPC, concurrency 64, batching", "mlp", BATCHED, "grpc", 64, ["triton", "mlserver"], 3),
    ("MLP 1x64, HTTP, concurrency 1", "mlp", "mlp", "http", 1, ["triton"], 3),
    ("ResNet-50-like, gRPC, concurrency 1", "resnet50", "resnet50", "grpc", 1, ["triton"], 6),
]


class Server:
    """A server of the Open Inference Protocol on this machine's loopback."""

    def __init__(self, name, http, grpc, command, env, log):
        self.name, self.http, self.grpc = name, http, grpc
        self.log = open(log, "wb")
        self.process = subprocess.Popen(
            command, env={**os.environ, **env}, stdout=self.log, stderr=subprocess.STDOUT, cwd=log.parent
        )

    def url(self, protocol):
        return f"{protocol}://127.0.0.1:{self.grpc if protocol == 'grpc' else self.http}"

    def wait(self, models):
        deadline = time.monotonic() + 120
        for model in models:
            while True:
                if self.process.poll() is not None:
                    said = Path(self.log.name).read_text(errors="replace")[-6000:]
                    sys.exit(f"{self.name} exited with {self.process.returncode}: {said}")
                try:
                    url = f"http://127.0.0.1:{self.http}/v2/models/{model}/ready"
                    with urllib.request.urlopen(url, timeout=2):
                        break
                except (urllib.error.URLError, OSError):
                    if time.monotonic() > deadline:
                        sys.exit(f"{self.name} did not load {model} in time: see {self.log.name}")
                    time.sleep(0.2)

    def stop(self):
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def start_millrace(scratch, models):
    server = Server(
        "millrace", 8180, 8180,
        [str(MILLRACE), "up", "--ephemeral", "--listen", "127.0.0.1:8180", "--gpus", "1"],
        {}, scratch / "millrace.log",
    )
    ready = "http://127.0.0.1:8180/v2/health/ready"
    for _ in range(300):
        try:
            urllib.request.urlopen(ready, timeout=1).close()
            break
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    functions = {**{model: (model, "") for model in models}, BATCHED: ("mlp", "  batching: {maxSize: 64}\n")}
    for name, (model, more) in functions.items():
        manifest = scratch / f"{name}.yaml"
        manifest.write_text(
            f"apiVersion: millrace/v1\nkind: Function\nmetadata: {{name: {name}}}\n"
            f"spec:\n  model: {{file: '{PEERS / 'models' / (model + '.onnx')}'}}\n{more}"
        )
        subprocess.run(
            [str(MILLRACE), "apply", "-e", "127.0.0.1:8180", "-f", str(manifest)],
            check=True, stdout=subprocess.DEVNULL,
        )
    return server


def start_triton(scratch, models):
    packages = PEERS / "triton/lib"
    packages = next(packages.glob("python3.*")) / "site-packages"
    triton = packages / "pytriton" / "tritonserver"
    version = packages.parent.name.removeprefix("python")
    backends = scratch / "backends" / "python"
    shutil.copytree(triton / "backends" / "python", backends)
    shutil.copy(triton / "python_backend_stubs" / version / "triton_python_backend_stub", backends)
    for model in models:
        folder = scratch / "repository" / model / "1"
        folder.mkdir(parents=True)
        shutil.copy(HERE / "triton_model.py", folder / "model.py")
        dims = ", ".join(map(str, MODELS[model]))
        out = 64 if model == "mlp" else 1000
        (folder.parent / "config.pbtxt").write_text(
            f'name: "{model}"\nbackend: "python"\nmax_batch_size: 64\n'
            f'input [ {{ name: "x" data_type: TYPE_FP32 dims: [ {dims} ] }} ]\n'
            f'output [ {{ name: "y" data_type: TYPE_FP32 dims: [ {out} ] }} ]\n'
            "dynamic_batching { max_queue_delay_microseconds: 0 }\n"
            "instance_group [ { kind: KIND_CPU count: 1 } ]\n"
        )
    command = [
        str(triton / "bin" / "tritonserver"), f"--model-repository={scratch / 'repository'}",
        f"--backend-directory={scratch / 'backends'}", "--http-address=127.0.0.1", "--http-port=8190",
        "--grpc-address=127.0.0.1", "--grpc-port=8191", "--metrics-port=8192",
    ]
    env = {
        "PYTHONPATH": str(packages), "PEER_PACKAGES": str(packages), "PEER_MODELS": str(PEERS / "models"),
        "LD_LIBRARY_PATH": str(packages / "nvidia_pytriton.libs"),
    }
    return Server("triton", 8190, 8191, command, env, scratch / "triton.log")


def start_mlserver(scratch, models):
    folder = scratch / "mlserver"
    folder.mkdir()
    settings = {
        "debug": False, "parallel_workers": 0, "host": "127.0.0.1", "http_port": 8110,
        "grpc_port": 8111, "metrics_port": 8112, "metrics_endpoint": None,
    }
    (folder / "settings.json").write_text(json.dumps(settings))
    for model in models:
        (folder / model).mkdir()
        (folder / model / "model-settings.json").write_text(
            json.dumps({
                "name": model, "implementation": "mlserver_model.OnnxModel",
                "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, *MODELS[model]]}],
            })
        )
    return Server(
        "mlserver", 8110, 8111, [str(PEERS / "mlserver/bin/mlserver"), "start", str(folder)],
        {"PYTHONPATH": str(HERE), "PEER_MODELS": str(PEERS / "models")}, scratch / "mlserver.log",
    )


START = {"millrace": start_millrace, "triton": start_triton, "mlserver": start_mlserver}


def load(server, protocol, model, called, concurrency, seconds):
    shape = "x=1x" + "x".join(map(str, MODELS[model]))
    command = [
        str(MILLRACE), "load", "--url", server.url(protocol), "--model", called,
        "--concurrency", str(concurrency), "--duration", f"{seconds}s", "--warm-up", "1s",
        "--input-shape", shape, "-o", "json",
    ]
    answer = subprocess.run(command, stdout=subprocess.PIPE)
    report = json.loads(answer.stdout or "{}")
    if answer.returncode or report["failed"]:
        sys.exit(f"{server.name} failed {report.get('errors')} in {' '.join(command)}")
    return report


def spread(values):
    return f"{statistics.median(values):.2f} ({min(values):.2f}–{max(values):.2f})"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--peers", default="triton,mlserver", help="comma list; empty: Millrace alone")
    parser.add_argument("--cases", default="", help="only cases with this in their name")
    parser.add_argument("--json", type=Path, help="also write every report here")
    options = parser.parse_args()
    peers = [peer for peer in options.peers.split(",") if peer]
    reports = []
    with tempfile.TemporaryDirectory(prefix="millrace-peers-") as folder:
        scratch, servers = Path(folder), {}
        try:
            for name in ["millrace", *peers]:
                servers[name] = START[name](scratch, MODELS)
            for server in servers.values():
                server.wait(MODELS)
            for case in (case for case in CASES if options.cases in case[0]):
                reports += measure(case, servers, options.rounds)
        finally:
            for server in servers.values():
                server.stop()
    if options.json:
        options.json.write_text(json.dumps(reports, indent=1))


def measure(case, servers, rounds):
    title, model, ours, protocol, concurrency, peers, seconds = case
    names = ["millrace", *(peer for peer in peers if peer in servers)]
    reports = []
    for number in range(rounds):
        turn = names[number % len(names):] + names[: number % len(names)]
        for name in turn:
            called = ours if name == "millrace" else model
            report = load(servers[name], protocol, model, called, concurrency, seconds)
            reports.append({**report, "case": title, "round": number, "name": name})
    print(f"\n{title} ({rounds} rounds of {seconds} s, median and range)")
    of = lambda name, read: [read(r) for r in reports if r["name"] == name]
    p50 = lambda r: r["latency_us"]["p50"]
    throughput = lambda r: r["throughput"]
    for name in names:
        line = f"  {name:9} p50 {spread(of(name, p50))} µs, p99 "
        line += f"{spread(of(name, lambda r: r['latency_us']['p99']))} µs, {spread(of(name, throughput))} req/s"
        if name == "millrace":
            run, added = (of(name, lambda r, part=part: r["server_us"][part]["p50"]) for part in ("run", "added"))
            line += f"; run p50 {spread(run)} µs, added to it p50 {spread(added)} µs"
        print(line)
    for name in names[1:]:
        latency = [a / b for a, b in zip(of("millrace", p50), of(name, p50))]
        rate = [a / b for a, b in zip(of("millrace", throughput), of(name, throughput))]
        print(f"  millrace ÷ {name}: p50 {spread(latency)}×, throughput {spread(rate)}×")
    sys.stdout.flush()
    return reports


if __name__ == "__main__":
    main()
