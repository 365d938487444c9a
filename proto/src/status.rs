//! The mapping between failures and their wire forms: gRPC status with `google.rpc.ErrorInfo`, and
//! HTTP status. Every server responds through [`to_status`] and every client parses with
//! [`from_status`], so that a reason survives any number of hops.

use std::collections::HashMap;

use http::StatusCode;
use millrace_types::reason::DOMAIN;
use millrace_types::{Failure, Reason};
use tonic::{Code, Status};
use tonic_types::{ErrorDetails, StatusExt as _};

const RETRYABLE: &str = "retryable";
const MAY_HAVE_EXECUTED: &str = "may_have_executed";

/// Returns the gRPC code of a reason.
#[must_use]
pub const fn code(reason: Reason) -> Code {
    match reason {
        Reason::FunctionNotFound
        | Reason::RevisionNotFound
        | Reason::WorkflowNotFound
        | Reason::ArtifactNotFound
        | Reason::NodeNotFound
        | Reason::TraceNotFound
        | Reason::SequenceNotFound
        | Reason::OperationNotFound => Code::NotFound,
        Reason::FunctionDisabled
        | Reason::FunctionNotReady
        | Reason::NoWorker
        | Reason::NoLeader
        | Reason::ShuttingDown
        | Reason::ExecutorLost
        | Reason::AttemptsExhausted
        | Reason::ArtifactNotHeld
        | Reason::StoreUnavailable => Code::Unavailable,
        Reason::InvalidInput
        | Reason::InvalidOutput
        | Reason::MalformedRequest
        | Reason::InvalidSpec
        | Reason::InvalidModel
        | Reason::UnsupportedOperator
        | Reason::ModelTooLarge => Code::InvalidArgument,
        Reason::DigestMismatch | Reason::DataLost => Code::DataLoss,
        Reason::Conflict => Code::Aborted,
        Reason::NodeNameTaken | Reason::NameTaken => Code::AlreadyExists,
        Reason::PeerMismatch
        | Reason::MembershipRefused
        | Reason::Quarantined
        | Reason::NodeState
        | Reason::OperationState
        | Reason::InUse
        | Reason::Fenced => Code::FailedPrecondition,
        Reason::QueueFull
        | Reason::StateFull
        | Reason::StorageFull
        | Reason::ByteBudgetExceeded
        | Reason::NoGpuMemory => Code::ResourceExhausted,
        Reason::TimedOut => Code::DeadlineExceeded,
        Reason::Cancelled => Code::Cancelled,
        Reason::Unauthenticated => Code::Unauthenticated,
        Reason::PermissionDenied => Code::PermissionDenied,
        Reason::Unimplemented => Code::Unimplemented,
        Reason::ModelFailed | Reason::Internal => Code::Internal,
    }
}

/// Returns the HTTP status of a reason.
#[must_use]
pub const fn http_status(reason: Reason) -> StatusCode {
    match code(reason) {
        Code::NotFound => StatusCode::NOT_FOUND,
        Code::Unavailable => StatusCode::SERVICE_UNAVAILABLE,
        Code::InvalidArgument => StatusCode::BAD_REQUEST,
        Code::Aborted | Code::AlreadyExists => StatusCode::CONFLICT,
        Code::FailedPrecondition => StatusCode::UNPROCESSABLE_ENTITY,
        Code::ResourceExhausted => StatusCode::TOO_MANY_REQUESTS,
        Code::DeadlineExceeded => StatusCode::GATEWAY_TIMEOUT,
        // The status that nginx and Triton's proxies log for a client that closed its request.
        Code::Cancelled => match StatusCode::from_u16(499) {
            Ok(status) => status,
            Err(_) => StatusCode::REQUEST_TIMEOUT,
        },
        Code::Unauthenticated => StatusCode::UNAUTHORIZED,
        Code::PermissionDenied => StatusCode::FORBIDDEN,
        Code::Unimplemented => StatusCode::NOT_IMPLEMENTED,
        _ => StatusCode::INTERNAL_SERVER_ERROR,
    }
}

/// Converts a failure to gRPC status, with its reason and flags in `ErrorInfo`.
#[must_use]
pub fn to_status(failure: &Failure) -> Status {
    let metadata = HashMap::from([
        (RETRYABLE.to_owned(), failure.retryable.to_string()),
        (MAY_HAVE_EXECUTED.to_owned(), failure.may_have_executed.to_string()),
    ]);
    let details = ErrorDetails::with_error_info(failure.reason.as_str(), DOMAIN, metadata);
    Status::with_error_details(code(failure.reason), &failure.message, details)
}

/// Creates the status of a request that was refused with a gRPC code alone, before the request
/// began to execute.
#[must_use]
pub fn of_code(code: Code, message: String) -> Status {
    to_status(&Failure::new(nearest(code), message))
}

/// Converts gRPC status back to a failure. A status without Millrace's `ErrorInfo` (a transport
/// error, another server, a newer reason) gets the reason nearest to its code. If the request may
/// have reached the server, the failure counts as executed.
#[must_use]
pub fn from_status(status: &Status) -> Failure {
    let info = status.get_details_error_info().filter(|info| info.domain == DOMAIN);
    let reason = info.as_ref().and_then(|info| info.reason.parse().ok());
    match (info, reason) {
        (Some(info), Some(reason)) => {
            let flag = |key| info.metadata.get(key).is_some_and(|value| value == "true");
            Failure {
                reason,
                message: status.message().to_owned(),
                retryable: flag(RETRYABLE),
                may_have_executed: flag(MAY_HAVE_EXECUTED),
            }
        }
        _ => {
            let reason = nearest(status.code());
            Failure {
                reason,
                message: status.message().to_owned(),
                retryable: reason.retryable(),
                may_have_executed: !matches!(reason, Reason::MalformedRequest | Reason::Unimplemented),
            }
        }
    }
}

const fn nearest(code: Code) -> Reason {
    match code {
        Code::Cancelled => Reason::Cancelled,
        Code::InvalidArgument | Code::OutOfRange => Reason::MalformedRequest,
        Code::DeadlineExceeded => Reason::TimedOut,
        Code::NotFound => Reason::FunctionNotFound,
        Code::AlreadyExists | Code::Aborted => Reason::Conflict,
        Code::PermissionDenied => Reason::PermissionDenied,
        Code::ResourceExhausted => Reason::QueueFull,
        Code::Unimplemented => Reason::Unimplemented,
        Code::Unavailable => Reason::NoWorker,
        Code::Unauthenticated => Reason::Unauthenticated,
        _ => Reason::Internal,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_of_errors_has_a_row_for_each_reason() {
        let page = include_str!("../../docs/guide/errors.md");
        for &reason in Reason::ALL {
            let retry = if reason.retryable() { "yes" } else { "no" };
            let code = format!("{:?}", code(reason)).chars().fold(String::new(), |mut text, letter| {
                if letter.is_uppercase() && !text.is_empty() {
                    text.push('_');
                }
                text.extend(letter.to_uppercase());
                text
            });
            let row = format!("| `{reason}` | `{code}` | {} | {retry} | ", http_status(reason).as_u16());
            assert!(page.contains(&row), "docs/guide/errors.md has no row that begins with:\n{row}");
        }
    }

    #[test]
    fn every_reason_survives_the_wire() {
        for &reason in Reason::ALL {
            for may_have_executed in [false, true] {
                let failure = Failure { may_have_executed, ..Failure::new(reason, "the fault") };
                assert_eq!(from_status(&to_status(&failure)), failure);
            }
        }
    }

    #[test]
    fn a_foreign_status_counts_as_executed_if_it_may_have_reached_the_server() {
        let lost = from_status(&Status::unavailable("connection reset"));
        assert_eq!((lost.reason, lost.retryable, lost.may_have_executed), (Reason::NoWorker, true, true));
        assert!(!from_status(&Status::unimplemented("no such method")).may_have_executed);
    }

    #[test]
    fn http_status_follows_the_grpc_code() {
        assert_eq!(http_status(Reason::FunctionNotFound), StatusCode::NOT_FOUND);
        assert_eq!(http_status(Reason::QueueFull), StatusCode::TOO_MANY_REQUESTS);
        assert_eq!(http_status(Reason::Cancelled).as_u16(), 499);
        assert_eq!(http_status(Reason::Internal), StatusCode::INTERNAL_SERVER_ERROR);
    }
}
