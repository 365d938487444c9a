//! The address of a controller, parsed from text.

use std::fmt;
use std::str::FromStr;

/// A host and a port where a server listens for clients.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Address {
    authority: String,
}

/// The error of parsing text that is not an [`Address`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AddressError {
    /// The text is not of the form `host:port`.
    #[error("{0:?} is not an endpoint: write host:port, such as 127.0.0.1:8080 or [::1]:8080")]
    Malformed(String),
    /// The text asks for TLS, which the client does not support.
    #[error("{0:?} asks for TLS, which this version does not speak: write http:// or only host:port")]
    Tls(String),
}

impl Address {
    /// Returns the address as an `http` URI.
    #[must_use]
    pub fn uri(&self) -> String {
        format!("http://{}", self.authority)
    }

    /// Returns the address as `host:port`.
    #[must_use]
    pub fn authority(&self) -> &str {
        &self.authority
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.authority)
    }
}

impl FromStr for Address {
    type Err = AddressError;
    fn from_str(text: &str) -> Result<Self, AddressError> {
        let malformed = || AddressError::Malformed(text.to_owned());
        let authority = match text.trim().split_once("://") {
            None => text.trim(),
            Some(("http" | "grpc", rest)) => rest.strip_suffix('/').unwrap_or(rest),
            Some(("https" | "grpcs", _)) => return Err(AddressError::Tls(text.to_owned())),
            Some(_) => return Err(malformed()),
        };
        let (host, port) = authority.rsplit_once(':').ok_or_else(malformed)?;
        let bracketed = host.starts_with('[') && host.ends_with(']');
        let plain = !host.contains(['/', '@', '?', '#', '[', ']', ' ']) && (bracketed || !host.contains(':'));
        if host.is_empty() || !(plain || bracketed) || port.parse::<u16>().is_err() {
            return Err(malformed());
        }
        Ok(Self { authority: authority.to_owned() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tonic::transport::Endpoint;

    #[test]
    fn addresses_are_parsed_in_every_usual_form() {
        for (text, expected) in [
            ("127.0.0.1:8080", "127.0.0.1:8080"),
            ("http://localhost:80/", "localhost:80"),
            ("grpc://node-1.example:7", "node-1.example:7"),
            ("[::1]:8080", "[::1]:8080"),
            (" a:1 ", "a:1"),
        ] {
            assert_eq!(text.parse::<Address>().unwrap().authority(), expected);
        }
    }

    #[test]
    fn malformed_endpoints_are_refused() {
        for text in
            ["", "localhost", ":80", "a:b", "a:70000", "ftp://a:1", "http://a:1/v2", "::1:80", "u@a:1"]
        {
            assert_eq!(text.parse::<Address>(), Err(AddressError::Malformed(text.to_owned())), "{text}");
        }
        assert!(matches!("https://a:1".parse::<Address>(), Err(AddressError::Tls(_))));
    }

    #[test]
    fn every_accepted_address_makes_a_uri() {
        for text in ["127.0.0.1:8080", "[::1]:8080", "a-b.c:1"] {
            assert!(Endpoint::from_shared(text.parse::<Address>().unwrap().uri()).is_ok());
        }
    }
}
