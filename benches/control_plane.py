#!/usr/bin/env python3
"""Measures durable, replicated writes of three Millrace controllers against three etcd servers.

Both groups run on this machine's loopback with their data on the same disk. While one group is
measured, the other is idle. One client program writes 256-byte values to each group's leader. In
each round both groups get each number of clients, in an order that changes. A figure is the median
over rounds with its range. A ratio is taken within a round, so that other load on the machine
affects both sides. Needs etcd on the PATH (Debian: etcd-server) and

    cargo build --release && cargo build --release -p millrace-controller --example write_load
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TARGET = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "release"
MILLRACE, LOAD = TARGET / "millrace", TARGET / "examples" / "write_load"
MEMBERS = 3
AIMS = {1: 1.0, 64: 1.0, 256: 1.0}


def free_ports(count):
    sockets = [socket.socket() for _ in range(count)]
    for sock in sockets:
        sock.bind(("127.0.0.1", 0))
    ports = [sock.getsockname()[1] for sock in sockets]
    for sock in sockets:
        sock.close()
    return ports


def wait_for(what, ready, seconds=60):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        value = ready()
        if value:
            return value
        time.sleep(0.1)
    sys.exit(f"{what} did not start within {seconds} s")


class Group:
    """A group of servers, whose processes are ended by stop()."""

    def __init__(self, scratch, name):
        self.folder, self.name, self.processes = scratch / name, name, []
        self.folder.mkdir()

    def spawn(self, command):
        log = open(self.folder / f"{len(self.processes)}.log", "wb")
        self.processes.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT))

    def stop(self):
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()


class Etcd(Group):
    def __init__(self, scratch):
        super().__init__(scratch, "etcd")
        ports = free_ports(2 * MEMBERS)
        self.clients, peers = ports[:MEMBERS], ports[MEMBERS:]
        cluster = ",".join(f"m{n}=http://127.0.0.1:{peer}" for n, peer in enumerate(peers))
        for n, (client, peer) in enumerate(zip(self.clients, peers)):
            client, peer = f"http://127.0.0.1:{client}", f"http://127.0.0.1:{peer}"
            self.spawn([
                "etcd", "--name", f"m{n}", "--data-dir", str(self.folder / f"m{n}"),
                "--listen-client-urls", client, "--advertise-client-urls", client,
                "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
                "--initial-cluster", cluster, "--initial-cluster-state", "new", "--log-level", "error",
            ])
        self.leader = wait_for("etcd", self.find_leader)

    def find_leader(self):
        for client in self.clients:
            try:
                request = urllib.request.Request(
                    f"http://127.0.0.1:{client}/v3/maintenance/status", data=b"{}", method="POST")
                with urllib.request.urlopen(request, timeout=1) as answer:
                    status = json.load(answer)
            except OSError:
                return None
            if status.get("leader") and status["leader"] == status["header"]["member_id"]:
                return f"127.0.0.1:{client}"
        return None


class Millrace(Group):
    def __init__(self, scratch):
        super().__init__(scratch, "millrace")
        ports = free_ports(2 * MEMBERS)
        self.clients, internals = ports[:MEMBERS], ports[MEMBERS:]
        for n, (client, internal) in enumerate(zip(self.clients, internals)):
            begin = ["--join", f"127.0.0.1:{internals[0]}"] if n else ["--bootstrap"]
            self.spawn([
                str(MILLRACE), "controller", "--id", str(n + 1), "--data-dir", str(self.folder / f"c{n}"),
                "--listen", f"127.0.0.1:{client}", "--internal-listen", f"127.0.0.1:{internal}", *begin,
            ])
        self.leader = wait_for("the controllers", self.find_leader)

    def find_leader(self):
        endpoints = ",".join(f"127.0.0.1:{client}" for client in self.clients)
        asked = subprocess.run(
            [str(MILLRACE), "cluster", "status", "-e", endpoints, "-o", "json"], capture_output=True, text=True)
        if asked.returncode:
            return None
        members = json.loads(asked.stdout)["controllers"]
        voters = [member for member in members if member["voter"] and member["reachable"]]
        leaders = [member["clientAddress"] for member in voters if member["role"] == "Leader"]
        return leaders[0] if leaders and len(voters) == MEMBERS else None


def load(kind, address, clients, seconds):
    done = subprocess.run(
        [str(LOAD), kind, address, str(clients), str(seconds)], check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


def spread(values, digits=0):
    low, high = min(values), max(values)
    return f"{statistics.median(values):,.{digits}f} ({low:,.{digits}f}–{high:,.{digits}f})"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=3, help="of each measurement")
    parser.add_argument("--clients", default="1,64,256")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="millrace-control-plane-") as folder:
        groups = []
        try:
            groups.append(Etcd(Path(folder)))
            groups.append(Millrace(Path(folder)))
            for clients in map(int, options.clients.split(",")):
                compare(groups, clients, options)
        finally:
            for group in groups:
                group.stop()


def compare(groups, clients, options):
    results = {group.name: [] for group in groups}
    for number in range(options.rounds):
        for group in groups if number % 2 else reversed(groups):
            results[group.name].append(load(group.name, group.leader, clients, options.seconds))
    print(f"\n{clients} clients, 256-byte values, {MEMBERS} members "
          f"({options.rounds} rounds of {options.seconds} s, median and range)")
    for name, reports in results.items():
        column = lambda key: [report[key] for report in reports]
        print(f"  {name:9} {spread(column('rate'))} writes/s, "
              f"p50 {spread(column('p50_us'))} µs, p99 {spread(column('p99_us'))} µs")
    ratios = [ours["rate"] / theirs["rate"] for ours, theirs in zip(results["millrace"], results["etcd"])]
    aim = f", aim {AIMS[clients]:.1f}×" if clients in AIMS else ""
    print(f"  millrace ÷ etcd: throughput {spread(ratios, 2)}×{aim}", flush=True)


if __name__ == "__main__":
    main()
