//! The errors of a call, divided by the action that a caller takes next.

use std::error::Error as StdError;
use std::path::PathBuf;
use std::time::Duration;

use millrace_proto::status::from_status;
use millrace_types::{Failure, Reason};
use tonic::Status;

use crate::address::Address;
use crate::tensor::TensorError;

/// The reason why a call failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The client was created without endpoints.
    #[error("no endpoint was given: name at least one, such as 127.0.0.1:8080")]
    NoEndpoints,
    /// The client connected to no endpoint. No server received the call.
    #[error("cannot reach {}: {cause}", names(addresses))]
    Unreachable {
        /// The addresses of all endpoints tried, in order.
        addresses: Vec<Address>,
        /// The connection error of the last endpoint.
        cause: String,
    },
    /// The connection broke after the call was sent. The server may have carried out the call.
    #[error("lost the connection to {address}: {cause}")]
    ConnectionLost {
        /// The address of the endpoint.
        address: Address,
        /// The error that broke the connection.
        cause: String,
    },
    /// No response arrived within the timeout. The server may have carried out the call.
    #[error("no answer from {address} within {}", seconds(*timeout))]
    TimedOut {
        /// The address of the endpoint.
        address: Address,
        /// The timeout that the caller set.
        timeout: Duration,
    },
    /// The server answered with an error.
    #[error("{}", .0.message)]
    Refused(Failure),
    /// The server's response breaks the protocol.
    #[error("the server's response is malformed: {0}")]
    BadAnswer(String),
    /// A local file cannot be read.
    #[error("cannot read {}: {cause}", path.display())]
    File {
        /// The path of the file.
        path: PathBuf,
        /// The error of the operating system.
        cause: std::io::Error,
    },
    /// The file changed after its digest was computed, while it was being sent.
    #[error("{} changed while it was being sent: {sent} bytes instead of {expected}", path.display())]
    FileChanged {
        /// The path of the file.
        path: PathBuf,
        /// The size when the digest was computed, in bytes.
        expected: u64,
        /// The bytes that were read during the upload.
        sent: u64,
    },
    /// The system has no random numbers for request ids.
    #[error("cannot generate request ids: {0}")]
    NoRandomness(getrandom::Error),
    /// A tensor's bytes do not match its declaration.
    #[error(transparent)]
    Tensor(#[from] TensorError),
}

impl Error {
    /// Returns the server's stable reason, if the server gave a reason.
    #[must_use]
    pub fn reason(&self) -> Option<Reason> {
        match self {
            Self::Refused(failure) => Some(failure.reason),
            _ => None,
        }
    }

    /// Returns whether the same call may succeed when repeated unchanged.
    #[must_use]
    pub fn retryable(&self) -> bool {
        match self {
            Self::Refused(failure) => failure.retryable,
            Self::Unreachable { .. } | Self::ConnectionLost { .. } | Self::TimedOut { .. } => true,
            _ => false,
        }
    }

    /// Returns whether the server may have carried out the call despite the error.
    #[must_use]
    pub fn may_have_executed(&self) -> bool {
        match self {
            Self::Refused(failure) => failure.may_have_executed,
            Self::ConnectionLost { .. } | Self::TimedOut { .. } | Self::BadAnswer(_) => true,
            _ => false,
        }
    }
}

/// The failure of a call at an endpoint.
#[derive(Debug)]
pub(crate) enum CallFailure {
    /// The client could not connect, so the call was not sent.
    NotSent(String),
    /// The connection broke after the call was sent.
    Broken(String),
    /// The client's timeout expired.
    TimedOut,
    /// The server answered with an error.
    Answer(Failure),
}

impl CallFailure {
    /// Classifies a status. A status created by the client carries its source error. A status that
    /// came over the network does not.
    pub(crate) fn of(status: &Status) -> Self {
        let Some(source) = status.source() else { return Self::Answer(from_status(status)) };
        let mut cause: &(dyn StdError + 'static) = source;
        loop {
            if cause.is::<tonic::ConnectError>() {
                return Self::NotSent(innermost(cause));
            }
            if cause.is::<tonic::TimeoutExpired>() {
                return Self::TimedOut;
            }
            match cause.source() {
                Some(next) => cause = next,
                None => return Self::Broken(cause.to_string()),
            }
        }
    }
}

fn innermost(error: &(dyn StdError + 'static)) -> String {
    let mut error = error;
    if let Some(tonic::ConnectError(inner)) = error.downcast_ref() {
        error = inner.as_ref();
    }
    while let Some(source) = error.source() {
        error = source;
    }
    error.to_string()
}

fn names(addresses: &[Address]) -> String {
    addresses.iter().map(Address::to_string).collect::<Vec<_>>().join(", ")
}

fn seconds(span: Duration) -> String {
    format!("{}s", span.as_secs_f64())
}
