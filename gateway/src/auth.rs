//! Who is calling, decided once at the door for every protocol behind it.

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;

use http::HeaderMap;
use millrace_types::{Failure, Reason};

/// Who makes a request. In every request's extensions, whichever service it is for.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Caller(Arc<str>);

impl Caller {
    /// A caller of that name.
    #[must_use]
    pub fn new(name: &str) -> Self {
        Self(Arc::from(name))
    }

    /// Whoever needs no name: one who is on this machine already.
    #[must_use]
    pub fn anonymous() -> Self {
        Self::new("anonymous")
    }

    /// The name, for records of who changed what.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Caller {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}

impl fmt::Debug for Caller {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Caller({:?})", self.as_str())
    }
}

/// Decides who is calling, from what arrived before the body.
pub trait Authenticate: Send + Sync + 'static {
    /// Names the caller.
    ///
    /// # Errors
    /// `UNAUTHENTICATED` or `PERMISSION_DENIED`, with what to do.
    fn authenticate(&self, peer: SocketAddr, headers: &HeaderMap) -> Result<Caller, Failure>;
}

/// Serves callers of this machine, all under the name `anonymous`, and nobody else: the default.
#[derive(Debug, Clone)]
pub struct LoopbackOnly(Caller);

impl Default for LoopbackOnly {
    fn default() -> Self {
        Self(Caller::anonymous())
    }
}

impl Authenticate for LoopbackOnly {
    fn authenticate(&self, peer: SocketAddr, _headers: &HeaderMap) -> Result<Caller, Failure> {
        if peer.ip().to_canonical().is_loopback() {
            return Ok(self.0.clone());
        }
        Err(Failure::new(
            Reason::Unauthenticated,
            format!(
                "{} is not this machine, and the server takes no others: start it with --insecure to serve anyone",
                peer.ip()
            ),
        ))
    }
}

/// Serves anyone who can connect: `--insecure`.
#[derive(Debug, Clone)]
pub struct Anyone(Caller);

impl Default for Anyone {
    fn default() -> Self {
        Self(Caller::anonymous())
    }
}

impl Authenticate for Anyone {
    fn authenticate(&self, _peer: SocketAddr, _headers: &HeaderMap) -> Result<Caller, Failure> {
        Ok(self.0.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn peer(text: &str) -> SocketAddr {
        text.parse().unwrap()
    }

    #[test]
    fn only_this_machine_is_served_unless_anyone_is() {
        let headers = HeaderMap::new();
        for here in ["127.0.0.1:1", "[::1]:1", "127.9.9.9:1", "[::ffff:127.0.0.1]:1"] {
            assert_eq!(LoopbackOnly::default().authenticate(peer(here), &headers), Ok(Caller::anonymous()));
        }
        let refused = LoopbackOnly::default().authenticate(peer("192.0.2.1:1"), &headers).unwrap_err();
        assert_eq!(refused.reason, Reason::Unauthenticated);
        assert!(Anyone::default().authenticate(peer("192.0.2.1:1"), &headers).is_ok());
    }
}
