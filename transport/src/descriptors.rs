//! File descriptors: the limit of the process, and the share of connections.
//!
//! The connections of all ports together may use half of the process's limit. The other half is
//! reserved for the log, model files, peers and executors, so clients cannot exhaust the descriptors.

use rustix::io::Errno;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::port_limits::PortLimits;

/// Soft limit of descriptors that a server requests, up to the hard limit.
pub const WANTED: u64 = 65_536;
/// Fewest descriptors with which a server starts. With fewer, a quarter of the smallest port would be
/// less than the 256 connections that each address is promised.
pub const NEEDED: u64 = 4_096;

/// The descriptor limit of this process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DescriptorLimit {
    /// Soft limit of the process, at most [`WANTED`].
    pub limit: u64,
}

/// Reason why a server does not start.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DescriptorError {
    /// The hard limit is below [`NEEDED`].
    #[error(
        "this process may have {limit} file descriptors and a server needs {NEEDED}: raise its hard limit (`ulimit -Hn`, LimitNOFILE= of a systemd unit, or nofile under ulimits of a compose file)"
    )]
    TooFew {
        /// Hard limit of descriptors.
        limit: u64,
    },
    /// The configured connections of the ports exceed the share for connections.
    #[error(
        "{connections} connections were asked for, and half of this process's {limit} file descriptors are for connections: ask for at most {most} in all{}",
        if *limit < WANTED { ", or raise its hard limit of descriptors" } else { "" }
    )]
    TooManyConnections {
        /// Sum of the explicitly configured connections of the ports.
        connections: u64,
        /// Largest valid sum, which leaves one connection for each other port.
        most: u64,
        /// Descriptor limit of the process.
        limit: u64,
    },
    /// The kernel refused to raise the limit.
    #[error("cannot raise this process's limit of file descriptors to {wanted}: {errno}")]
    KernelRefused {
        /// Limit that was requested.
        wanted: u64,
        /// Error of the kernel.
        errno: Errno,
    },
}

/// A port's share of the descriptors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PortShare {
    /// Weight of the port among the ports of the process.
    pub weight: u64,
    /// Explicitly configured number of connections. If set, the weight is ignored.
    pub connections: Option<usize>,
}

impl DescriptorLimit {
    /// Raises the soft limit to [`WANTED`], or to the hard limit if that is lower.
    ///
    /// # Errors
    /// Returns a [`DescriptorError`] if the hard limit is too low for a server, or if the kernel refuses.
    pub fn raise() -> Result<Self, DescriptorError> {
        let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
        let wanted = maximum.unwrap_or(WANTED).min(WANTED);
        if wanted < NEEDED {
            return Err(DescriptorError::TooFew { limit: wanted });
        }
        // Never lowers a soft limit that is already higher.
        if let Some(current) = current
            && current < wanted
        {
            setrlimit(Resource::Nofile, Rlimit { current: Some(wanted), maximum })
                .map_err(|errno| DescriptorError::KernelRefused { wanted, errno })?;
        }
        Ok(Self { limit: current.unwrap_or(wanted).max(wanted).min(WANTED) })
    }

    /// Divides half of the descriptors among the ports of the process. `address_max` is the
    /// configured cap per address on each port, if any.
    ///
    /// # Errors
    /// Returns [`DescriptorError::TooManyConnections`] if the explicitly configured ports exceed the share.
    pub fn divide<const N: usize>(
        self,
        ports: [PortShare; N],
        address_max: Option<usize>,
    ) -> Result<[PortLimits; N], DescriptorError> {
        let total = self.limit / 2;
        let asked: u64 = ports.iter().filter_map(|port| port.connections).map(|it| it as u64).sum();
        let unset: u64 = ports.iter().filter(|port| port.connections.is_none()).map(|port| port.weight).sum();
        let most = total - ports.iter().filter(|port| port.connections.is_none()).count() as u64;
        let Some(left) = total.checked_sub(asked).filter(|_| asked <= most) else {
            return Err(DescriptorError::TooManyConnections { connections: asked, most, limit: self.limit });
        };
        Ok(ports.map(|port| {
            let part = || usize::try_from(left * port.weight / unset.max(1)).unwrap_or(usize::MAX).max(1);
            PortLimits { connections_max: port.connections.unwrap_or_else(part), address_max }
        }))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const fn port(weight: u64, connections: Option<usize>) -> PortShare {
        PortShare { weight, connections }
    }

    #[test]
    fn the_fewest_descriptors_leave_every_address_256_connections_of_the_client_port() {
        let [client, ..] = DescriptorLimit { limit: NEEDED }
            .divide([port(2, None), port(1, None), port(1, None)], None)
            .unwrap();
        assert_eq!(client.address_max_of("192.0.2.1".parse().unwrap()), Some(256));
        assert_eq!(client.address_max_of("127.0.0.1".parse().unwrap()), None);
    }

    #[test]
    fn more_connections_than_half_of_the_descriptors_are_refused() {
        let descriptors = DescriptorLimit { limit: NEEDED };
        let refused = descriptors.divide([port(2, Some(2049)), port(1, None)], None).unwrap_err();
        let too_many = DescriptorError::TooManyConnections { connections: 2049, most: 2047, limit: NEEDED };
        assert_eq!(refused, too_many);
        assert!(refused.to_string().contains("at most 2047 in all, or raise"), "{refused}");
        assert!(descriptors.divide([port(2, Some(2048)), port(1, None)], None).is_err());
        let most = descriptors.divide([port(2, Some(2047)), port(1, None)], None).unwrap();
        assert_eq!(most.map(|it| it.connections_max), [2047, 1]);
        let enough = DescriptorLimit { limit: WANTED }.divide([port(2, Some(40_000))], None).unwrap_err();
        assert!(enough.to_string().ends_with("at most 32768 in all"), "{enough}");
        let [client, internal] = descriptors.divide([port(2, Some(2000)), port(1, None)], None).unwrap();
        assert_eq!((client.connections_max, internal.connections_max), (2000, 48));
    }

    #[test]
    fn raising_the_limit_again_changes_nothing() {
        let raised = DescriptorLimit::raise().unwrap();
        assert_eq!(DescriptorLimit::raise().unwrap(), raised);
        assert!(raised.limit >= NEEDED);
    }

    proptest! {
        #[test]
        fn ports_take_half_of_the_descriptors_at_most(
            limit in NEEDED..=WANTED,
            ports in any::<[(u8, Option<u16>); 3]>(),
        ) {
            let ports = ports.map(|(weight, set)| port(1 + u64::from(weight), set.map(usize::from)));
            if let Ok(divided) = (DescriptorLimit { limit }).divide(ports, None) {
                let sum: u64 = divided.iter().map(|port| port.connections_max as u64).sum();
                // Each port gets at least one connection, even if its share is 0.
                prop_assert!(sum <= limit / 2 + 3, "{divided:?}");
            }
        }
    }
}
