//! What can go wrong with a call, told apart by what the caller does next.

use std::error::Error as StdError;
use std::path::PathBuf;
use std::time::Duration;

use millrace_proto::status::from_status;
use millrace_types::{Failure, Reason};
use tonic::Status;

use crate::address::Address;
use crate::tensor::TensorError;

/// Why a call failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// No endpoint was given.
    #[error("no endpoint was given: name at least one, such as 127.0.0.1:8080")]
    NoEndpoints,
    /// No endpoint could be connected to: the call did not happen.
    #[error("cannot reach {}: {cause}", names(addresses))]
    Unreachable {
        /// Every endpoint tried, in order.
        addresses: Vec<Address>,
        /// What the last one's connection failed with.
        cause: String,
    },
    /// The connection broke after the call was sent: it may have been carried out.
    #[error("lost the connection to {address}: {cause}")]
    ConnectionLost {
        /// The endpoint.
        address: Address,
        /// What the connection failed with.
        cause: String,
    },
    /// No answer came in time: the call may have been carried out.
    #[error("no answer from {address} within {}", seconds(*timeout))]
    TimedOut {
        /// The endpoint.
        address: Address,
        /// How long the caller was ready to wait.
        timeout: Duration,
    },
    /// The server answered with an error.
    #[error("{}", .0.message)]
    Refused(Failure),
    /// The server answered something the protocol does not allow.
    #[error("the server's answer cannot be used: {0}")]
    BadAnswer(String),
    /// A local file could not be read.
    #[error("cannot read {}: {cause}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What the system said.
        cause: std::io::Error,
    },
    /// The file changed between being digested and being sent.
    #[error("{} changed while it was being sent: {sent} bytes instead of {expected}", path.display())]
    FileChanged {
        /// The file.
        path: PathBuf,
        /// Its size when it was opened.
        expected: u64,
        /// What could be read of it.
        sent: u64,
    },
    /// The system has no random numbers to make ids from.
    #[error("cannot make ids: {0}")]
    NoRandomness(getrandom::Error),
    /// A tensor does not hold what it declares.
    #[error(transparent)]
    Tensor(#[from] TensorError),
}

impl Error {
    /// The server's reason, where it gave one.
    #[must_use]
    pub fn reason(&self) -> Option<Reason> {
        match self {
            Self::Refused(failure) => Some(failure.reason),
            _ => None,
        }
    }

    /// Whether the same call may succeed when made again unchanged.
    #[must_use]
    pub fn retryable(&self) -> bool {
        match self {
            Self::Refused(failure) => failure.retryable,
            Self::Unreachable { .. } | Self::ConnectionLost { .. } | Self::TimedOut { .. } => true,
            _ => false,
        }
    }

    /// Whether the call may have been carried out all the same.
    #[must_use]
    pub fn may_have_executed(&self) -> bool {
        match self {
            Self::Refused(failure) => failure.may_have_executed,
            Self::ConnectionLost { .. } | Self::TimedOut { .. } | Self::BadAnswer(_) => true,
            _ => false,
        }
    }
}

/// How a call to one endpoint failed.
#[derive(Debug)]
pub(crate) enum Cause {
    /// Never connected.
    NotSent(String),
    /// Connected, then broken.
    Broken(String),
    /// The client's own clock ran out.
    TimedOut,
    /// The server's answer.
    Answer(Failure),
}

impl Cause {
    /// Sorts a status. Those made on this side carry the error they came from; those that travelled
    /// do not.
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
