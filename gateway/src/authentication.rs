//! Authentication: identifies the caller once for all protocols of the gateway.

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;

use http::HeaderMap;
use millrace_types::{Failure, Reason};

/// The caller of a request. The extensions of every request contain it, for every service.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Caller(Arc<str>);

impl Caller {
    /// Creates a caller with this name.
    #[must_use]
    pub fn new(name: &str) -> Self {
        Self(Arc::from(name))
    }

    /// Returns the caller that needs no name, because the caller is on this machine.
    #[must_use]
    pub fn anonymous() -> Self {
        Self::new("anonymous")
    }

    /// Returns the name, for audit records.
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

/// Identifies the caller from the data that arrives before a request's body.
pub trait Authenticate: Send + Sync + 'static {
    /// Returns the caller.
    ///
    /// # Errors
    /// `UNAUTHENTICATED` or `PERMISSION_DENIED`, with the next step.
    fn authenticate(&self, peer: SocketAddr, headers: &HeaderMap) -> Result<Caller, Failure>;
}

/// Accepts only callers of this machine, all under the name `anonymous`. This is the default.
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
                "{} is not this machine, and the server refuses other machines: start the server with --insecure to accept all callers",
                peer.ip()
            ),
        ))
    }
}

/// Accepts all callers that can connect: `--insecure`.
#[derive(Debug, Clone)]
pub struct AllowAll(Caller);

impl Default for AllowAll {
    fn default() -> Self {
        Self(Caller::anonymous())
    }
}

impl Authenticate for AllowAll {
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
    fn only_callers_of_this_machine_are_accepted_by_default() {
        let headers = HeaderMap::new();
        for here in ["127.0.0.1:1", "[::1]:1", "127.9.9.9:1", "[::ffff:127.0.0.1]:1"] {
            assert_eq!(LoopbackOnly::default().authenticate(peer(here), &headers), Ok(Caller::anonymous()));
        }
        let refused = LoopbackOnly::default().authenticate(peer("192.0.2.1:1"), &headers).unwrap_err();
        assert_eq!(refused.reason, Reason::Unauthenticated);
        assert!(AllowAll::default().authenticate(peer("192.0.2.1:1"), &headers).is_ok());
    }
}
