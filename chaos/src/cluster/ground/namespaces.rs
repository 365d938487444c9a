//! A ground on which each process has its own network namespace. All namespaces, and the harness's,
//! are on one bridge.
//!
//! ```text
//!   millrace-chaos-PID-controller-1        millrace-chaos-PID-worker-1
//!        eth0 10.213.0.10                       eth0 10.213.0.13
//!          │ veth                                 │ veth
//!   ───────┴────── bridge "chaos" 10.213.0.1 ─────┴───────  millrace-chaos-PID: the harness
//!                      nft: rules for the cuts
//! ```
//! The bridge is in the harness's own namespace ([`HarnessNamespace`]), so that the network of this machine
//! is not touched. A cut drops the packets from an address to another on the bridge. An
//! unplugged process has its link down. TCP sends the lost packets again later.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::Write as _;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::AsFd as _;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context as _, ensure};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use super::owner;
use super::placement::ProcessPlacement;
use super::tools::{check_success, run_for_output};

/// The folder in which `ip netns` keeps names.
const NAMES: &str = "/run/netns";
const BRIDGE: &str = "chaos";
/// The harness's own address, which is also the address of its proxies.
pub(in crate::cluster) const HARNESS: Ipv4Addr = Ipv4Addr::new(10, 213, 0, 1);
/// The last byte of the first process's address.
const FIRST: u8 = 10;
/// The ports of each process, which are the same as on separate machines.
const CLIENT_PORT: u16 = 8080;
const INTERNAL_PORT: u16 = 7070;

/// The harness's own namespace, with the bridge. The name is removed when the value is dropped; the
/// namespace itself ends with the harness.
#[derive(Debug)]
pub struct HarnessNamespace {
    name: String,
}

impl HarnessNamespace {
    /// Removes the namespaces that killed harnesses left behind, makes the harness's namespace, and
    /// moves this thread into it. Threads that this thread starts later are in the namespace too.
    ///
    /// # Errors
    /// If this machine does not allow the namespace.
    pub fn enter() -> anyhow::Result<Self> {
        ensure!(rustix::process::geteuid().is_root(), "network namespaces require root");
        for tool in ["nft", "nsenter"] {
            run(Command::new(tool).arg("--version"))?;
        }
        for name in names().iter().filter(|name| owner::is_orphan(name)) {
            run(ip().args(["netns", "delete", name]))?;
        }
        let switch = Self { name: owner::own() };
        run(ip().args(["netns", "add", &switch.name]))?;
        let path = Path::new(NAMES).join(&switch.name);
        let file = std::fs::File::open(&path).with_context(|| format!("cannot open {}", path.display()))?;
        move_into_link_name_space(file.as_fd(), Some(LinkNameSpaceType::Network))
            .context("cannot enter a network namespace")?;
        batch(&format!(
            "link set lo up\nlink add {BRIDGE} type bridge\naddress add {HARNESS}/24 dev {BRIDGE}\nlink set {BRIDGE} up\n"
        ))?;
        // Some kernels have no filter for bridges. Try the filter here, so that the error does not
        // wait for the first cut.
        filter(&[])?;
        Ok(switch)
    }
}

impl Drop for HarnessNamespace {
    fn drop(&mut self) {
        // The next harness removes a namespace that this command leaves.
        let _removed = run(ip().args(["netns", "delete", &self.name]));
    }
}

/// The namespaces of a cluster, which are removed when the value is dropped.
#[derive(Debug)]
pub(in crate::cluster) struct Namespaces {
    /// The number of each process on the bridge, by the name of the process.
    numbers: BTreeMap<String, u8>,
}

impl Namespaces {
    pub(super) fn new() -> Self {
        Self { numbers: BTreeMap::new() }
    }

    pub(super) fn house(&mut self, name: &str) -> anyhow::Result<ProcessPlacement> {
        let number = FIRST + u8::try_from(self.numbers.len()).context("too many processes")?;
        let namespace = namespace(name);
        let link = link(number);
        let ip = address(number);
        // Insert the number before the commands: the drop then removes a namespace that was made in
        // part.
        self.numbers.insert(name.to_owned(), number);
        run(self::ip().args(["netns", "add", &namespace]))?;
        batch(&format!(
            "link add {link} type veth peer name eth0 netns {namespace}\nlink set {link} master {BRIDGE}\nlink set {link} up\n"
        ))?;
        for words in [
            format!("address add {ip}/24 dev eth0"),
            "link set eth0 up".to_owned(),
            "link set lo up".to_owned(),
        ] {
            run(self::ip().args(["-netns", &namespace]).args(words.split(' ')))?;
        }
        Ok(ProcessPlacement {
            prefix: vec!["nsenter".to_owned(), format!("--net={NAMES}/{namespace}")],
            words: vec!["--insecure".to_owned()],
            client: SocketAddr::from((ip, CLIENT_PORT)),
            internal: SocketAddr::from((ip, INTERNAL_PORT)),
        })
    }

    /// Drops the packets from the first to the second process of each pair, and lets all others
    /// pass.
    pub(in crate::cluster) fn apply_cuts(&self, cuts: &[(String, String)]) -> anyhow::Result<()> {
        let number = |name: &String| {
            self.numbers.get(name).copied().map(address).with_context(|| format!("there is no {name}"))
        };
        let pairs = cuts.iter().map(|(from, to)| anyhow::Ok((number(from)?, number(to)?)));
        filter(&pairs.collect::<anyhow::Result<Vec<_>>>()?)
    }

    /// Takes a process's link down, or up again.
    pub(in crate::cluster) fn plug(&self, name: &str, up: bool) -> anyhow::Result<()> {
        let number = self.numbers.get(name).with_context(|| format!("there is no {name}"))?;
        run(ip().args(["link", "set", &link(*number), if up { "up" } else { "down" }]))
    }
}

impl Drop for Namespaces {
    fn drop(&mut self) {
        for (name, number) in &self.numbers {
            // Remove the links explicitly: a namespace ends only with its last process, and the
            // next cluster uses the same links. The next harness removes anything that these
            // commands leave.
            let _link = run(ip().args(["link", "delete", &link(*number)]));
            let _name = run(ip().args(["netns", "delete", &namespace(name)]));
        }
        let _filter = filter(&[]);
    }
}

fn namespace(process: &str) -> String {
    format!("{}-{process}", owner::own())
}

fn link(number: u8) -> String {
    format!("{BRIDGE}-{number}")
}

fn address(number: u8) -> Ipv4Addr {
    let [a, b, c, _] = HARNESS.octets();
    Ipv4Addr::new(a, b, c, number)
}

/// Returns the names that `ip netns` knows.
fn names() -> Vec<String> {
    let entries = std::fs::read_dir(NAMES).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().into_string().ok()).collect()
}

/// Makes the bridge drop the packets from the first to the second address of each pair, and no
/// others. All rules change at once.
fn filter(cuts: &[(Ipv4Addr, Ipv4Addr)]) -> anyhow::Result<()> {
    let mut command = Command::new("nft");
    command.args(["-f", "-"]);
    run_with_input(&mut command, &rules(cuts))
        .context("cannot set rules for the bridge (they require nftables for bridges)")
}

fn rules(cuts: &[(Ipv4Addr, Ipv4Addr)]) -> String {
    // The first line creates the table if it is missing, so that the second line can delete it.
    let mut text = format!(
        "table bridge {BRIDGE}\ndelete table bridge {BRIDGE}\ntable bridge {BRIDGE} {{\n chain cuts {{\n  type filter hook forward priority 0;\n"
    );
    for (from, to) in cuts {
        let _always = writeln!(text, "  ip saddr {from} ip daddr {to} drop");
    }
    text.push_str(" }\n}\n");
    text
}

fn ip() -> Command {
    Command::new("ip")
}

/// Runs several commands of `ip` at once.
fn batch(commands: &str) -> anyhow::Result<()> {
    run_with_input(ip().args(["-batch", "-"]), commands)
}

fn run_with_input(command: &mut Command, text: &str) -> anyhow::Result<()> {
    command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut child = command.spawn().with_context(|| format!("cannot run {command:?}"))?;
    child.stdin.take().context("stdin is piped")?.write_all(text.as_bytes())?;
    check_success(command, child.wait_with_output()?).map(drop)
}

fn run(command: &mut Command) -> anyhow::Result<()> {
    run_for_output(command).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rules_replace_the_whole_table() {
        let [a, b] = [address(10), address(11)];
        let rules = rules(&[(a, b)]);
        let lines: Vec<_> = rules.lines().map(str::trim).collect();
        assert_eq!(lines[..2], ["table bridge chaos", "delete table bridge chaos"]);
        let drops: Vec<_> = lines.iter().filter(|line| line.contains("drop")).collect();
        assert_eq!(drops, [&"ip saddr 10.213.0.10 ip daddr 10.213.0.11 drop"]);
    }
}
