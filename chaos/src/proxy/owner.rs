//! Finds the process at the other end of a local connection. The kernel lists each socket in
//! /proc/net/tcp, and each process's sockets in /proc/PID/fd.

use std::fs;
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4};

/// Returns the process among `pids` whose socket is bound to `peer` and connected to `front`.
pub(super) fn pid_of(peer: SocketAddr, front: SocketAddr, pids: impl Iterator<Item = u32>) -> Option<u32> {
    let table = fs::read_to_string("/proc/net/tcp").ok()?;
    let socket = format!("socket:[{}]", inode(&table, peer, front)?);
    // A process that has ended meanwhile has no descriptors.
    let has = |pid: &u32| {
        let descriptors = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
        descriptors.into_iter().any(|it| fs::read_link(it.path()).is_ok_and(|to| to.as_os_str() == &*socket))
    };
    pids.into_iter().find(has)
}

/// Returns the inode of the socket with these addresses, from the kernel's table.
fn inode(table: &str, local: SocketAddr, remote: SocketAddr) -> Option<&str> {
    table.lines().skip(1).find_map(|line| {
        let mut fields = line.split_whitespace();
        let from = fields.nth(1)?;
        let to = fields.next()?;
        // The skipped fields are state, queues, timers, retransmits, owner and timeout.
        let inode = fields.nth(6)?;
        (parse(from)? == local && parse(to)? == remote).then_some(inode)
    })
}

/// Parses an address in the kernel's format: hex digits of the bytes in this machine's order.
fn parse(text: &str) -> Option<SocketAddr> {
    let (ip, port) = text.split_once(':')?;
    let ip = Ipv4Addr::from(u32::from_str_radix(ip, 16).ok()?.to_ne_bytes());
    Some(SocketAddrV4::new(ip, u16::from_str_radix(port, 16).ok()?).into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg(target_endian = "little")]
    fn an_inode_is_read_from_the_table_of_the_kernel() {
        let table = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n   0: 0100007F:1F90 0100007F:9C40 01 00000000:00000000 00:00000000 00000000  1000        0 4242 1 0000000000000000 20 4 30 10 -1\n";
        let a = "127.0.0.1:8080".parse().unwrap();
        let b = "127.0.0.1:40000".parse().unwrap();
        assert_eq!(inode(table, a, b), Some("4242"));
        assert_eq!(inode(table, b, a), None);
    }

    #[test]
    fn this_process_is_found_by_its_own_connection() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (_accepted, peer) = listener.accept().unwrap();
        let front = stream.peer_addr().unwrap();
        let own = std::process::id();
        assert_eq!(pid_of(peer, front, [1, own].into_iter()), Some(own));
        assert_eq!(pid_of(peer, front, std::iter::empty()), None);
    }
}
