//! Prints NVML's answers about this machine as a record in JSON, or with `--topology` the topology
//! that Millrace discovers from them:
//!
//! ```sh
//! cargo run -p millrace-device --example nvml > device/topology/recorded/NAME.json
//! ```
//!
//! With `--health SECONDS`, prints the faults of that time and a sample of each GPU.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a program of the command line")]

use std::process::ExitCode;
use std::sync::mpsc;
use std::time::Duration;

use millrace_device::nvml::{self, Error, Nvml};

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let done = match arguments[..] {
        [] => nvml::machine().map(|machine| print(&machine)),
        ["--topology"] => {
            nvml::machine().and_then(|machine| nvml::discover(&machine)).map(|found| print(&found))
        }
        ["--health", seconds] => health(Duration::from_secs(seconds.parse().unwrap_or(1))),
        _ => {
            eprintln!("usage: nvml [--topology | --health SECONDS]");
            return ExitCode::from(2);
        }
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}\nhint: {}", error.hint());
            ExitCode::FAILURE
        }
    }
}

fn print(value: &impl serde::Serialize) {
    println!("{}", serde_json::to_string_pretty(value).expect("a record has no map with odd keys"));
}

fn health(duration: Duration) -> Result<(), Error> {
    let nvml = Nvml::open()?;
    let (faults, received) = mpsc::channel();
    let watch = nvml.watch_health(move |event| drop(faults.send(event)))?;
    println!("GPUs without events: {:?}", watch.without_events());
    for gpu in nvml.machine()?.gpus {
        println!("{}: {:?}", gpu.uuid, nvml.sample(&gpu.uuid)?);
    }
    while let Ok(event) = received.recv_timeout(duration) {
        println!("{event:?}");
    }
    Ok(())
}
