//! Tests the calls of NVML in a child process, the example `nvml`, in front of which the loader finds
//! the example `nvml_fake` as `libnvidia-ml.so.1`. `cargo test -p millrace-device` builds both. The
//! fake follows nvml.h; it is no record of a real driver.
#![allow(missing_docs, clippy::unwrap_used)]

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use millrace_device::nvml::Machine;

/// Returns a file of `target/*/examples`, if the examples were built.
fn example(file: &str) -> Option<PathBuf> {
    let test = std::env::current_exe().unwrap();
    let path = test.parent()?.parent()?.join("examples").join(file);
    path.exists().then_some(path)
}

/// Runs the example on the fake library. Returns `None`, with a message, if the examples were not
/// built.
fn run(arguments: &[&str], envs: &[(&str, &str)]) -> Option<Output> {
    let (Some(program), Some(library)) = (example("nvml"), example("libnvml_fake.so")) else {
        println!("skipped: build the examples with `cargo build -p millrace-device --examples`");
        return None;
    };
    // A folder of this test's own: no other program may find the fake as the driver's library.
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("nvml-{}", std::process::id()));
    let folder = folder.join(std::thread::current().name().unwrap());
    std::fs::create_dir_all(&folder).unwrap();
    let link = folder.join("libnvidia-ml.so.1");
    if !link.exists() {
        std::os::unix::fs::symlink(library, link).unwrap();
    }
    let mut command = Command::new(program);
    command.args(arguments).envs(envs.iter().copied()).env("LD_LIBRARY_PATH", &folder);
    let output = command.output().unwrap();
    std::fs::remove_dir_all(folder).unwrap();
    Some(output)
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

#[test]
fn the_record_holds_the_answers_and_leaves_out_the_lost_gpu() {
    let Some(output) = run(&[], &[]) else { return };
    let machine: Machine = serde_json::from_slice(&output.stdout).unwrap();
    let gpu = |index: u32, pci: &str, other: u32, remote_pci: &str| {
        let link = |link: u32| {
            serde_json::json!({
                "link": link, "active": true, "version": 6, "remote": "gpu",
                "remote_pci_bus_id": remote_pci, "speed_mb_per_s": 26_562,
            })
        };
        let inactive = serde_json::json!({
            "link": 2, "active": false, "version": null, "remote": null,
            "remote_pci_bus_id": null, "speed_mb_per_s": null,
        });
        serde_json::json!({
            "index": index, "uuid": format!("GPU-{index}"), "name": "NVIDIA H100 80GB HBM3",
            "memory_bytes": 80_u64 << 30, "pci_bus_id": pci, "numa_node": 1, "cpus": "0-1,64",
            "compute_capability": "9.0", "pcie_gen_max": 5, "pcie_width_max": 16, "mig_enabled": null,
            "nvlinks": [link(0), link(1), inactive],
            "peers": [
                { "gpu": other, "ancestor": "single", "read": "ok" },
                { "gpu": 2, "ancestor": null, "read": null },
            ],
            "fabric": { "state": "completed", "status": 0, "cluster": "ab".repeat(16), "clique": 4 },
            "unanswered": ["common ancestor: no data", "peer read: no data"],
        })
    };
    let expected = serde_json::json!({
        "format": "millrace-nvml-1", "driver": "580.1", "cuda": "13.0",
        "gpus": [gpu(0, "0000FFFE:01:00.0", 1, "0000FFFE:02:00.0"), gpu(1, "0000FFFE:02:00.0", 0, "0000FFFE:01:00.0")],
        "unreadable": [{ "index": 2, "reason": "device fell off the bus or has otherwise become inacessible" }],
    });
    assert_eq!(machine, serde_json::from_value(expected).unwrap());
}

#[test]
fn the_watch_reports_faults_once_with_the_drivers_advice() {
    let Some(output) = run(&["--health", "1"], &[]) else { return };
    let lines: Vec<&str> = text(&output.stdout).lines().collect();
    let expected = [
        r#"GPUs without events: ["GPU-1", "GPU-2"]"#,
        r#"GPU-0: GpuSample { gpu_percent: Some(7), memory_percent: Some(8), memory_used: Some(Bytes(5368709120)), temperature_celsius: Some(40), throttle_reasons: Some(["GPU_IDLE"]), power_milliwatts: Some(70000), pcie_to_gpu: Some(BytesPerSec(1001000)), pcie_from_gpu: Some(BytesPerSec(1000000)), sm_clock_mhz: Some(1001), memory_clock_mhz: Some(1002) }"#,
    ];
    assert_eq!(lines[..2], expected, "{}", text(&output.stderr));
    let events: Vec<&str> = lines.iter().copied().filter(|line| line.starts_with("HealthEvent")).collect();
    let expected = [
        r#"HealthEvent { gpu: "GPU-0", xid: Some(31), verdict: ProgramFault, text: "Xid 31: a program's own fault" }"#,
        r#"HealthEvent { gpu: "GPU-2", xid: None, verdict: Unhealthy, text: "the GPU fell off the bus or needs a reset" }"#,
        r#"HealthEvent { gpu: "GPU-0", xid: Some(79), verdict: Unhealthy, text: "Xid 79: the driver asks for a restart of the machine" }"#,
        r#"HealthEvent { gpu: "GPU-0", xid: None, verdict: Unhealthy, text: "memory error that ECC cannot correct: the driver asks for a restart of the machine" }"#,
    ];
    assert_eq!(events, expected);
    assert!(output.status.success());
}

#[test]
fn an_old_driver_and_a_machine_without_gpus_are_refused_with_a_hint() {
    let check = |name: &str, value: &str, expected: &str| {
        let Some(output) = run(&["--topology"], &[(name, value)]) else { return };
        assert_eq!(text(&output.stderr), expected);
        assert_eq!((output.status.code(), output.stdout.is_empty()), (Some(1), true));
    };
    check(
        "FAKE_DRIVER",
        "570.86.15",
        "error: the NVIDIA driver 570.86.15 is too old: Millrace needs version 580 or newer\n\
         hint: install an NVIDIA driver (580 or newer), or start with --device emulated\n",
    );
    check(
        "FAKE_GPUS",
        "0",
        "error: no NVIDIA GPU on this machine: the driver finds none\n\
         hint: check `lspci` for the GPU, or pass the GPUs to this container, or start with --device emulated\n",
    );
}
