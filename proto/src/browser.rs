//! Rules that keep web pages out of a server. Pure.
//!
//! A browser lets any page send requests to any address that the user can reach. Two headers reveal
//! such requests. `Host` has the name that the page's author chose, even after DNS rebinding made
//! that name lead to this server. `Origin` has the page that sends the request. Programs other than
//! browsers send no `Origin`.

use std::net::IpAddr;
use std::sync::Arc;

use http::header::{HOST, ORIGIN};
use http::{HeaderMap, HeaderValue, Uri};
use millrace_types::{Failure, Reason};

/// The host names that clients may use for a server: `localhost`, the server's address, and
/// configured names.
#[derive(Debug, Clone)]
pub struct AllowedHosts {
    listens: IpAddr,
    names: Arc<[String]>,
}

impl AllowedHosts {
    /// Creates the names of a server that listens at this address. If the address is unspecified
    /// (`0.0.0.0` or `::`), every address is accepted, because DNS rebinding cannot put an address
    /// into `Host`.
    #[must_use]
    pub fn new(listens: IpAddr, names: Vec<String>) -> Self {
        Self { listens: listens.to_canonical(), names: names.into() }
    }

    /// Checks a request by its headers, before its body. A request without a host is accepted,
    /// because every browser names one.
    ///
    /// # Errors
    /// `PERMISSION_DENIED` if the host is none of these names, or if the request comes from a page
    /// of another origin.
    pub fn check(&self, uri: &Uri, headers: &HeaderMap) -> Result<(), Failure> {
        let target = uri.authority().map(|authority| authority.as_str());
        let hosts = headers.get_all(HOST);
        for host in target.into_iter().chain(hosts.iter().map(text)) {
            if !self.contains(host) {
                let message = format!(
                    "host {host:?} is not a name of this server: use the server's address, or start the server with --host-name"
                );
                return Err(Failure::new(Reason::PermissionDenied, message));
            }
        }
        let own = || target.or_else(|| hosts.iter().next().map(text));
        if headers.get_all(ORIGIN).iter().any(|origin| !is_origin(text(origin), own())) {
            return Err(foreign(headers));
        }
        Ok(())
    }

    fn contains(&self, authority: &str) -> bool {
        let Some(host) = host(authority) else { return false };
        match host.parse::<IpAddr>() {
            Ok(address) => {
                let address = address.to_canonical();
                // A loopback address may be the near end of a tunnel, so loopback is always
                // accepted.
                address.is_loopback()
                    || self.listens.is_unspecified()
                    || address == self.listens
                    || self.names.iter().any(|name| name.parse() == Ok(address))
            }
            Err(_) => {
                host.eq_ignore_ascii_case("localhost")
                    || self.names.iter().any(|name| name.eq_ignore_ascii_case(host))
            }
        }
    }
}

/// Returns the host of `host:port`, in the form that is compared: `name`, `10.0.0.1`, `::1`.
#[must_use]
pub fn host(authority: &str) -> Option<&str> {
    if let Some(bracketed) = authority.strip_prefix('[') {
        let (address, port) = bracketed.split_once(']')?;
        return (port.is_empty() || port.starts_with(':')).then_some(address);
    }
    let host = authority.split_once(':').map_or(authority, |(host, _port)| host);
    let host = host.strip_suffix('.').unwrap_or(host);
    (!host.is_empty() && !host.contains('@')).then_some(host)
}

fn foreign(headers: &HeaderMap) -> Failure {
    let origin = headers.get(ORIGIN).map_or("", text);
    let message = format!(
        "web page {origin:?} must not send requests to this server: send them from a program, without Origin"
    );
    Failure::new(Reason::PermissionDenied, message)
}

/// Returns the text of a header. A value that is not text becomes `@`, which matches no name.
fn text(value: &HeaderValue) -> &str {
    value.to_str().unwrap_or("@")
}

/// Returns whether the origin is that of pages served by this server itself.
fn is_origin(origin: &str, own: Option<&str>) -> bool {
    let page = origin.strip_prefix("http://").or_else(|| origin.strip_prefix("https://"));
    page.zip(own).is_some_and(|(page, own)| page.eq_ignore_ascii_case(own))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(all: &[(&'static str, &str)]) -> HeaderMap {
        all.iter().map(|(name, value)| (name.parse().unwrap(), value.parse().unwrap())).collect()
    }

    fn check(listens: &str, uri: &str, all: &[(&'static str, &str)]) -> bool {
        let own =
            AllowedHosts::new(listens.parse().unwrap(), vec!["Server.example".into(), "10.9.9.9".into()]);
        own.check(&uri.parse().unwrap(), &headers(all)).is_ok()
    }

    #[test]
    fn requests_for_another_host_are_refused() {
        for (listens, host, served) in [
            ("127.0.0.1", "127.0.0.1:8080", true),
            ("127.0.0.1", "127.0.0.1", true),
            ("127.0.0.1", "LOCALHOST:9", true),
            ("127.0.0.1", "localhost.", true),
            ("127.0.0.1", "[::1]:8080", true),
            ("127.0.0.1", "[::ffff:127.0.0.1]:8080", true),
            ("127.0.0.1", "server.example:8080", true),
            ("127.0.0.1", "10.9.9.9:8080", true),
            ("127.0.0.1", "10.0.0.1:8080", false),
            ("127.0.0.1", "attacker.example:8080", false),
            ("127.0.0.1", "127.0.0.1.attacker.example", false),
            ("127.0.0.1", "localhost@attacker.example", false),
            ("127.0.0.1", "[::1]attacker.example", false),
            ("127.0.0.1", "", false),
            ("10.0.0.1", "10.0.0.1:8080", true),
            ("10.0.0.1", "127.0.0.1:8080", true),
            ("10.0.0.1", "10.0.0.2:8080", false),
            ("0.0.0.0", "10.0.0.2:8080", true),
            ("::", "[fd00::1]:8080", true),
            ("0.0.0.0", "attacker.example", false),
        ] {
            assert_eq!(check(listens, "/v2", &[("host", host)]), served, "{host} at {listens}");
        }
        assert!(check("127.0.0.1", "/v2", &[]), "HTTP/1.0 health checks name no host");
        assert!(!check("127.0.0.1", "http://attacker.example/v2", &[("host", "127.0.0.1")]));
        assert!(!check("127.0.0.1", "/v2", &[("host", "127.0.0.1"), ("host", "attacker.example")]));
        assert!(!check(
            "127.0.0.1",
            "/v2",
            &[("host", "attacker.example"), ("x-forwarded-host", "localhost")]
        ));
    }

    #[test]
    fn requests_of_pages_from_another_origin_are_refused() {
        for (origin, served) in [
            ("http://127.0.0.1:8080", true),
            ("https://127.0.0.1:8080", true),
            ("http://127.0.0.1:3000", false),
            ("http://localhost:8080", false),
            ("http://attacker.example", false),
            ("null", false),
            ("", false),
        ] {
            let all = [("host", "127.0.0.1:8080"), ("origin", origin)];
            assert_eq!(check("127.0.0.1", "/v2", &all), served, "{origin}");
        }
        assert!(!check("127.0.0.1", "/v2", &[("origin", "http://127.0.0.1:8080")]));
        assert!(check("127.0.0.1", "http://localhost:1/v2", &[("origin", "http://localhost:1")]));
    }
}
