//! The connection limits of a server's ports.

use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::str::FromStr;

use millrace_transport::PortLimits;
use millrace_transport::descriptors::{DescriptorLimit, PortShare};

use crate::failure::CommandFailure;

/// The connection limits of a process.
#[derive(Debug, Clone, Default, clap::Args)]
pub(crate) struct ConnectionLimits {
    /// Limits of connections, such as client=300,address=20. A controller has the ports client and
    /// internal; a worker has the port worker. address limits the connections of one address on each port;
    /// if it is set, it holds for loopback addresses too. By default, half of the process's file descriptors
    /// are divided among the ports, twice as many for the client port as for any other; an address off
    /// loopback gets a quarter of its port's connections, and a loopback address has no limit.
    #[arg(long = "connections-max", value_name = "PORT=N", value_delimiter = ',')]
    limits: Vec<ConnectionLimit>,
}

/// The subject of a connection limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum LimitedConnections {
    /// The port of a controller for clients.
    Client,
    /// The port of a controller for workers and other controllers.
    Internal,
    /// The port of a worker.
    Worker,
    /// The connections of one address on each port.
    Address,
}

use LimitedConnections::{Address, Client, Internal, Worker};

/// The subjects of a controller's limits.
pub(crate) const OF_CONTROLLERS: [LimitedConnections; 3] = [Client, Internal, Address];
/// The subjects of a worker's limits.
pub(crate) const OF_WORKERS: [LimitedConnections; 2] = [Worker, Address];

/// The subjects of the limits of a cluster on this machine.
pub(crate) const OF_CLUSTERS: [LimitedConnections; 4] = [Client, Internal, Worker, Address];

const SUBJECTS: [(&str, LimitedConnections); 4] =
    [("client", Client), ("internal", Internal), ("worker", Worker), ("address", Address)];

impl LimitedConnections {
    fn word(self) -> &'static str {
        SUBJECTS.iter().find(|(_, subject)| *subject == self).map_or("", |(word, _)| word)
    }
}

/// One limit, as a user writes it: `client=300`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct ConnectionLimit {
    subject: LimitedConnections,
    connections: NonZeroU32,
}

impl FromStr for ConnectionLimit {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let words: Vec<_> = SUBJECTS.iter().map(|(word, _)| *word).collect();
        let Some((word, number)) = text.split_once('=') else {
            return Err(format!(
                "write the subject and the number, such as address=20; subjects: {}",
                words.join(", ")
            ));
        };
        let Some((_, subject)) = SUBJECTS.iter().find(|(known, _)| *known == word) else {
            return Err(format!("{word:?} is not one of {}", words.join(", ")));
        };
        let connections =
            number.parse().map_err(|_| format!("{number:?} is not a number of connections from 1 on"))?;
        Ok(Self { subject: *subject, connections })
    }
}

impl ConnectionLimits {
    /// Returns the limits of the client port, the internal port and each worker's port, in a
    /// process that serves all of them.
    pub(crate) fn ports(&self, workers: NonZeroU32) -> Result<[PortLimits; 3], CommandFailure> {
        let limits = self.checked(&OF_CLUSTERS)?;
        let shares = [share(&limits, Client), share(&limits, Internal), share(&limits, Worker)];
        let [client, internal, mut worker] = divide(shares, &limits)?;
        if !limits.contains_key(&Worker) {
            worker.connections_max = (worker.connections_max / workers.get() as usize).max(1);
        }
        Ok([client, internal, worker])
    }

    /// Returns the limits of the client port and the internal port, in a process that serves these
    /// two.
    pub(crate) fn of_controller(&self) -> Result<[PortLimits; 2], CommandFailure> {
        let limits = self.checked(&OF_CONTROLLERS)?;
        divide([share(&limits, Client), share(&limits, Internal)], &limits)
    }

    /// Returns the limits of the worker's port, in a process that serves only this port.
    pub(crate) fn of_worker(&self) -> Result<PortLimits, CommandFailure> {
        let limits = self.checked(&OF_WORKERS)?;
        let [worker] = divide([share(&limits, Worker)], &limits)?;
        Ok(worker)
    }

    /// Returns the command-line words for the limits of a process with these subjects.
    pub(crate) fn words(&self, subjects: &[LimitedConnections]) -> Vec<String> {
        let limits = self.limits.iter().filter(|limit| subjects.contains(&limit.subject));
        let limits: Vec<_> =
            limits.map(|limit| format!("{}={}", limit.subject.word(), limit.connections)).collect();
        if limits.is_empty() {
            return Vec::new();
        }
        vec!["--connections-max".to_owned(), limits.join(",")]
    }

    /// Refuses limits that none of the processes with these subjects can have, before any of them
    /// starts.
    pub(crate) fn check(&self, subjects: &[LimitedConnections]) -> Result<(), CommandFailure> {
        self.checked(subjects).map(drop)
    }

    /// Refuses a limit that is set twice or that this process cannot have.
    fn checked(&self, subjects: &[LimitedConnections]) -> Result<GivenLimits, CommandFailure> {
        let mut limits = BTreeMap::new();
        for ConnectionLimit { subject, connections } in &self.limits {
            let word = subject.word();
            if !subjects.contains(subject) {
                let known: Vec<_> = subjects.iter().map(|known| known.word()).collect();
                return Err(CommandFailure::usage(format!(
                    "--connections-max {word}={connections}: this process has no {word} port"
                ))
                .hint(format!("use one of {}", known.join(", "))));
            }
            if limits.insert(*subject, connections.get() as usize).is_some() {
                return Err(CommandFailure::usage(format!("--connections-max sets {word} twice")));
            }
        }
        Ok(limits)
    }
}

/// The limits that the command line sets.
type GivenLimits = BTreeMap<LimitedConnections, usize>;

fn share(limits: &GivenLimits, port: LimitedConnections) -> PortShare {
    let weight = if port == Client { 2 } else { 1 };
    PortShare { weight, connections: limits.get(&port).copied() }
}

fn divide<const N: usize>(
    ports: [PortShare; N],
    limits: &GivenLimits,
) -> Result<[PortLimits; N], CommandFailure> {
    let address = limits.get(&Address).copied();
    let divided = DescriptorLimit::raise().and_then(|descriptors| descriptors.divide(ports, address));
    divided.map_err(|error| CommandFailure::failed(error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commands::testing::options;

    fn parsed(words: &[&str]) -> ConnectionLimits {
        options(words).unwrap()
    }

    #[test]
    fn ports_with_a_set_limit_have_that_limit() {
        let set = parsed(&["--connections-max", "client=300,address=10"]);
        let [client, internal] = set.of_controller().unwrap();
        assert_eq!(client, PortLimits { connections_max: 300, address_max: Some(10) });
        assert!(internal.connections_max > 300);
        let workers = NonZeroU32::new(4).unwrap();
        let [.., one] = parsed(&[]).ports(NonZeroU32::MIN).unwrap();
        let [.., of_four] = parsed(&[]).ports(workers).unwrap();
        assert_eq!(of_four.connections_max, one.connections_max / 4);
        let refused = parsed(&["--connections-max", "client=4000000"]).ports(workers).unwrap_err();
        assert!(refused.message.as_deref().unwrap_or_default().contains("file descriptors"), "{refused:?}");
    }

    #[test]
    fn a_limit_of_a_port_that_the_process_lacks_is_refused() {
        let refused = parsed(&["--connections-max", "client=300"]).of_worker().unwrap_err();
        let message = "--connections-max client=300: this process has no client port";
        assert_eq!(refused.message.as_deref(), Some(message));
        assert_eq!(refused.hint.as_deref(), Some("use one of worker, address"));
        assert!(parsed(&["--connections-max", "worker=300"]).of_controller().is_err());
        assert!(parsed(&["--connections-max", "worker=300,address=7"]).of_worker().is_ok());
    }

    #[test]
    fn a_limit_that_is_set_twice_is_refused() {
        let twice = parsed(&["--connections-max", "client=300", "--connections-max", "client=301"]);
        let refused = twice.of_controller().unwrap_err();
        assert_eq!(refused.message.as_deref(), Some("--connections-max sets client twice"));
    }

    #[test]
    fn a_limit_without_a_port_or_a_number_is_refused_with_the_form() {
        for (text, due) in [
            ("300", "write the subject and the number, such as address=20"),
            ("gateway=300", "\"gateway\" is not one of client, internal, worker, address"),
            ("client=0", "\"0\" is not a number of connections from 1 on"),
            ("client=-1", "\"-1\" is not a number of connections from 1 on"),
            ("client=", "\"\" is not a number of connections from 1 on"),
        ] {
            let refused = options::<ConnectionLimits>(["--connections-max", text]).unwrap_err().to_string();
            assert!(refused.contains(due), "{refused}");
        }
    }

    #[test]
    fn each_process_of_a_group_gets_the_limits_of_its_ports() {
        let limits = parsed(&["--connections-max", "client=300,worker=100,address=10"]);
        assert_eq!(limits.words(&OF_CONTROLLERS), ["--connections-max", "client=300,address=10"]);
        assert_eq!(limits.words(&OF_WORKERS), ["--connections-max", "worker=100,address=10"]);
        assert!(parsed(&[]).words(&OF_WORKERS).is_empty());
    }
}
