//! The connection limits of the servers. This file alone names the flag of `millrace controller`
//! and `millrace worker` for these limits.

use std::num::NonZeroU32;
use std::path::Path;
use std::process::Stdio;

use tokio::process::Command;

const FLAG: &str = "--connections-max";
/// The form of the flag's value in the help of the servers.
const VALUE_NAME: &str = "<PORT=N>";

/// Maximum numbers of connections of each port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConnectionCaps {
    /// Maximum connections of each port.
    pub port_max: NonZeroU32,
    /// Maximum connections of each port from one address, loopback included. `None` selects the
    /// servers' default, which has no such limit on loopback.
    pub address_max: Option<NonZeroU32>,
}

impl ConnectionCaps {
    /// Returns limits of `port_max` connections for each port and a quarter of that for each
    /// address.
    #[must_use]
    pub fn of(port_max: NonZeroU32) -> Self {
        Self { port_max, address_max: NonZeroU32::new(port_max.get() / 4) }
    }

    /// Whether a binary knows the flag in this form. A binary of an older version is started without it.
    pub async fn known_to(program: &Path) -> bool {
        let mut help = Command::new(program);
        help.env_clear().args(["controller", "--help"]).stdin(Stdio::null()).stderr(Stdio::null());
        let help = help.output().await.map(|output| output.stdout).unwrap_or_default();
        String::from_utf8_lossy(&help).contains(&format!("{FLAG} {VALUE_NAME}"))
    }

    pub(super) fn controller_words(&self) -> Vec<String> {
        self.words(&["client", "internal"])
    }

    pub(super) fn worker_words(&self) -> Vec<String> {
        self.words(&["worker"])
    }

    /// Returns the connections that a process accepts at all its ports: a controller has two ports,
    /// a worker one.
    #[must_use]
    pub fn of_process(&self, ports: u32) -> u64 {
        u64::from(self.port_max.get()) * u64::from(ports)
    }

    /// Removes the limit by address from the arguments of a process.
    pub(super) fn without_address_cap(words: &mut [String]) {
        let flag = words.iter().position(|word| word == FLAG);
        let Some(value) = flag.and_then(|at| words.get_mut(at + 1)) else { return };
        let others = value.split(',').filter(|limit| !limit.starts_with("address="));
        *value = others.collect::<Vec<_>>().join(",");
    }

    fn words(&self, ports: &[&str]) -> Vec<String> {
        let ports = ports.iter().map(|&port| (port, self.port_max));
        let address = self.address_max.map(|most| ("address", most));
        let limits = ports.chain(address).map(|(subject, most)| format!("{subject}={most}"));
        vec![FLAG.to_owned(), limits.collect::<Vec<_>>().join(",")]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_gets_a_quarter_of_the_connections_of_a_port() {
        let caps = ConnectionCaps::of(NonZeroU32::new(2_048).unwrap());
        let words = "--connections-max client=2048,internal=2048,address=512";
        assert_eq!(caps.controller_words().join(" "), words);
        let mut words = [caps.worker_words(), vec!["--gpus".to_owned()]].concat();
        ConnectionCaps::without_address_cap(&mut words);
        assert_eq!(words, ["--connections-max", "worker=2048", "--gpus"]);
        let uncapped = ConnectionCaps { address_max: None, ..caps };
        assert_eq!(uncapped.worker_words(), ["--connections-max", "worker=2048"]);
    }
}
