//! Each process in a network namespace of its own, all on one bridge, and the harness beside it.
//!
//! ```text
//!   millrace-chaos-PID-controller-1        millrace-chaos-PID-worker-1
//!        eth0 10.213.0.10                       eth0 10.213.0.13
//!          │ veth                                 │ veth
//!   ───────┴────── bridge "chaos" 10.213.0.1 ─────┴───────  millrace-chaos-PID: the harness
//!                      nft: who reaches whom
//! ```
//! The bridge is in the harness's own namespace ([`Switch`]), so that nothing of this machine's
//! network is touched. A cut drops the packets from one to another as they cross the bridge; an
//! unplugged process has its link down. What was sent meanwhile is sent again by TCP.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::Write as _;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::AsFd as _;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context as _, ensure};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use super::tools::{said, succeeded};
use super::{House, owner};

/// Where `ip netns` keeps names.
const NAMES: &str = "/run/netns";
const BRIDGE: &str = "chaos";
/// The harness's own address: where its proxies are.
pub(in crate::cluster) const HARNESS: Ipv4Addr = Ipv4Addr::new(10, 213, 0, 1);
/// The last byte of the first process's.
const FIRST: u8 = 10;
/// Ports of each process, as they are on machines of their own.
const CLIENT_PORT: u16 = 8080;
const INTERNAL_PORT: u16 = 7070;

/// The harness's own namespace, with the bridge. Its name goes when this is dropped, and all of it when
/// the harness ends.
#[derive(Debug)]
pub struct Switch {
    name: String,
}

impl Switch {
    /// Makes it, and moves this thread in: those that it starts are there as well. Removes first what
    /// harnesses left behind that were killed.
    ///
    /// # Errors
    /// Why this machine does not let us.
    pub fn enter() -> anyhow::Result<Self> {
        ensure!(rustix::process::geteuid().is_root(), "network namespaces take root");
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
        // Some kernels have no filter for bridges: told now, and not at the first cut.
        filter(&[])?;
        Ok(switch)
    }
}

impl Drop for Switch {
    fn drop(&mut self) {
        // What is left is removed by the next harness.
        let _removed = run(ip().args(["netns", "delete", &self.name]));
    }
}

/// The namespaces of one cluster. They go when it is dropped.
#[derive(Debug)]
pub(in crate::cluster) struct Namespaces {
    /// Each process's number on the bridge, by its name.
    numbers: BTreeMap<String, u8>,
}

impl Namespaces {
    pub(super) fn new() -> Self {
        Self { numbers: BTreeMap::new() }
    }

    pub(super) fn house(&mut self, name: &str) -> anyhow::Result<House> {
        let number = FIRST + u8::try_from(self.numbers.len()).context("too many processes")?;
        let (namespace, link, ip) = (namespace(name), link(number), address(number));
        // From here on: a half that was made goes as well.
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
        Ok(House {
            prefix: vec!["nsenter".to_owned(), format!("--net={NAMES}/{namespace}")],
            words: vec!["--insecure".to_owned()],
            client: SocketAddr::from((ip, CLIENT_PORT)),
            internal: SocketAddr::from((ip, INTERNAL_PORT)),
        })
    }

    /// Lets no packet cross from the one to the other of each pair, and all others.
    pub(in crate::cluster) fn obey(&self, cuts: &[(String, String)]) -> anyhow::Result<()> {
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
            // By hand, as a namespace goes only with its last process, and the next cluster takes the
            // same links. What is left is removed by the next harness.
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

/// The names that `ip netns` knows.
fn names() -> Vec<String> {
    let entries = std::fs::read_dir(NAMES).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().into_string().ok()).collect()
}

/// Has the bridge drop what crosses it from the one to the other of each pair, and nothing else: at
/// once, for all of them.
fn filter(cuts: &[(Ipv4Addr, Ipv4Addr)]) -> anyhow::Result<()> {
    let mut command = Command::new("nft");
    command.args(["-f", "-"]);
    fed(&mut command, &rules(cuts)).context("the bridge takes no rules (it takes nftables for bridges)")
}

fn rules(cuts: &[(Ipv4Addr, Ipv4Addr)]) -> String {
    // The first line makes it where it is not, so that it can be replaced.
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

/// Several commands of `ip` at once.
fn batch(commands: &str) -> anyhow::Result<()> {
    fed(ip().args(["-batch", "-"]), commands)
}

fn fed(command: &mut Command, text: &str) -> anyhow::Result<()> {
    command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut child = command.spawn().with_context(|| format!("cannot run {command:?}"))?;
    child.stdin.take().context("stdin is piped")?.write_all(text.as_bytes())?;
    succeeded(command, child.wait_with_output()?).map(drop)
}

fn run(command: &mut Command) -> anyhow::Result<()> {
    said(command).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rules_are_replaced_as_a_whole() {
        let [a, b] = [address(10), address(11)];
        let rules = rules(&[(a, b)]);
        let lines: Vec<_> = rules.lines().map(str::trim).collect();
        assert_eq!(lines[..2], ["table bridge chaos", "delete table bridge chaos"]);
        let drops: Vec<_> = lines.iter().filter(|line| line.contains("drop")).collect();
        assert_eq!(drops, [&"ip saddr 10.213.0.10 ip daddr 10.213.0.11 drop"]);
    }
}
