#!/usr/bin/env python3
"""Measures a small model under two presets in turns on one server, and prints ratios.

The server keeps running. `millrace policy set` changes the preset before each turn, and the order of the
presets changes by round. A ratio is taken within each round, so that other load on the machine affects both
presets.
"""

import argparse
import json
import math
import socket
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PRESETS = ["fifo", "unified"]
CONCURRENCIES = [1, 64]
MANIFEST = """apiVersion: millrace/v1
kind: Function
metadata: {name: mlp}
spec: {runtime: onnx, model: {file: mlp.onnx}}
"""


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class Server:
    """`millrace up` with one emulated GPU and the MLP."""

    def __init__(self, binary, folder):
        self.binary, self.endpoint = binary, f"127.0.0.1:{free_port()}"
        command = [binary, "up", "--ephemeral", "--listen", self.endpoint, "--gpus", "1"]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.verb("cluster", "wait", "--voters", "1", "--nodes", "1", attempts=60)
        (folder / "mlp.yaml").write_text(MANIFEST)
        self.verb("synth", "mlp", "-o", str(folder / "mlp.onnx"))
        self.verb("apply", "-f", str(folder / "mlp.yaml"))

    def verb(self, *words, attempts=1):
        for attempt in range(attempts):
            done = subprocess.run(
                [self.binary, *words, "-e", self.endpoint], capture_output=True, text=True, check=False
            )
            if done.returncode == 0:
                return
            if self.process.poll() is not None:
                raise SystemExit("the server exited")
            time.sleep(1 if attempt + 1 < attempts else 0)
        raise SystemExit(f"{' '.join(words)}: {done.stderr}")

    def throughput(self, concurrency, seconds):
        words = ["load", "--url", f"grpc://{self.endpoint}", "--model", "mlp", "-o", "json"]
        words += ["--concurrency", str(concurrency), "--duration", f"{seconds}s"]
        done = subprocess.run([self.binary, *words], capture_output=True, text=True, check=True)
        return json.loads(done.stdout)["throughput"]


# The median of fewer values lies outside their whole range more often than in 5% of the cases.
ROUNDS_MIN = 6


def median_interval(values):
    """Returns two of the values between which the median lies with at least 95%, by the binomial law."""
    ordered, count = sorted(values), len(values)
    below, rank = 1 / 2**count, 1
    while below + math.comb(count, rank) / 2**count <= 0.025:
        below += math.comb(count, rank) / 2**count
        rank += 1
    return ordered[rank - 1], ordered[count - rank]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--binary", default=str(ROOT / "target" / "release" / "millrace"))
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--seconds", type=int, default=2, help="the length of one turn")
    args = parser.parse_args()
    if args.rounds < ROUNDS_MIN:
        parser.error(f"--rounds must be at least {ROUNDS_MIN}: the median of fewer has no 95% interval")
    measured = {(name, concurrency): [] for name in PRESETS for concurrency in CONCURRENCIES}
    with tempfile.TemporaryDirectory() as folder:
        server = Server(args.binary, Path(folder))
        try:
            for number in range(args.rounds):
                for name in PRESETS[:: 1 if number % 2 == 0 else -1]:
                    # The command returns only when the worker has applied the preset.
                    server.verb("policy", "set", "--preset", name)
                    for concurrency in CONCURRENCIES:
                        measured[name, concurrency].append(server.throughput(concurrency, args.seconds))
        finally:
            server.process.terminate()
            server.process.wait()
    for concurrency in CONCURRENCIES:
        fifo, unified = (measured[name, concurrency] for name in PRESETS)
        ratios = [ours / theirs for ours, theirs in zip(unified, fifo)]
        least, most = median_interval(ratios)
        print(
            f"{concurrency} clients: fifo {statistics.median(fifo):,.0f} requests a second,"
            f" unified {statistics.median(unified):,.0f},"
            f" unified / fifo {statistics.median(ratios):.3f},"
            f" 95% interval of the median {least:.3f}-{most:.3f}, all {min(ratios):.2f}-{max(ratios):.2f}"
        )


if __name__ == "__main__":
    main()
