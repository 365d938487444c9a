//! The properties of a call that are known before the body: caller, arrival, deadline, tenant, and
//! the shares of the byte budget that its bytes are charged to.

use std::time::Duration;

use http::HeaderMap;
use millrace_types::{Failure, Reason, RequestId, TenantName};
use tokio::time::Instant;

use crate::authentication::Caller;
use crate::budget::BudgetShare;
use crate::framing::CallCharges;

/// Header and metadata key of the tenant; without it, the tenant is `default`.
pub(crate) const TENANT: &str = "millrace-tenant";
const GRPC_TIMEOUT: &str = "grpc-timeout";

/// A call that the middleware accepted. The extensions of every request contain it.
#[derive(Debug, Clone)]
pub(crate) struct CallContext {
    pub(crate) request_id: RequestId,
    pub(crate) caller: Caller,
    pub(crate) tenant: TenantName,
    pub(crate) arrived: Instant,
    /// Time at which the client stops waiting, if gRPC has a timeout.
    pub(crate) deadline: Option<Instant>,
    pub(crate) shares: ConnectionShares,
    /// Charges of the call's messages and responses.
    pub(crate) ledger: CallCharges,
}

/// The budget shares of a connection.
#[derive(Debug, Clone)]
pub(crate) struct ConnectionShares {
    /// Share of the budget for inference requests and responses.
    pub(crate) inference: BudgetShare,
    /// Share of the separate budget for all other calls: the admin API, the repository, health and metrics.
    pub(crate) admin: BudgetShare,
}

/// Reads the tenant.
pub(crate) fn tenant(headers: &HeaderMap) -> Result<TenantName, Failure> {
    let Some(name) = headers.get(TENANT) else { return Ok(TenantName::default()) };
    let name = String::from_utf8_lossy(name.as_bytes());
    TenantName::new(&name).map_err(|error| Failure::new(Reason::InvalidSpec, error.to_string()))
}

/// Reads gRPC's timeout: up to eight digits and a unit. An invalid timeout counts as none, as in
/// gRPC's own servers.
pub(crate) fn grpc_timeout(headers: &HeaderMap) -> Option<Duration> {
    let text = headers.get(GRPC_TIMEOUT)?.to_str().ok()?;
    let (digits, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    if !(1..=8).contains(&digits.len()) || !digits.bytes().all(|c| c.is_ascii_digit()) {
        return None;
    }
    let n: u64 = digits.parse().ok()?;
    match unit {
        "H" => Some(Duration::from_secs(n * 3600)),
        "M" => Some(Duration::from_secs(n * 60)),
        "S" => Some(Duration::from_secs(n)),
        "m" => Some(Duration::from_millis(n)),
        "u" => Some(Duration::from_micros(n)),
        "n" => Some(Duration::from_nanos(n)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn grpc_timeouts_are_read_in_every_unit() {
        let read = |text: &str| {
            grpc_timeout(&HeaderMap::from_iter([(GRPC_TIMEOUT.parse().unwrap(), text.parse().unwrap())]))
        };
        for (text, expected) in [
            ("2H", Some(Duration::from_secs(7200))),
            ("3M", Some(Duration::from_secs(180))),
            ("4S", Some(Duration::from_secs(4))),
            ("99999999m", Some(Duration::from_millis(99_999_999))),
            ("5u", Some(Duration::from_micros(5))),
            ("6n", Some(Duration::from_nanos(6))),
            ("", None),
            ("S", None),
            ("123456789S", None),
            ("+1S", None),
            ("1x", None),
        ] {
            assert_eq!(read(text), expected, "{text}");
        }
    }

    #[test]
    fn an_invalid_tenant_is_refused_and_no_tenant_is_the_default() {
        let with = |text: &str| HeaderMap::from_iter([(TENANT.parse().unwrap(), text.parse().unwrap())]);
        assert_eq!(tenant(&HeaderMap::new()), Ok(TenantName::default()));
        assert_eq!(tenant(&with("acme")).unwrap().as_str(), "acme");
        assert_eq!(tenant(&with("Not A Tenant")).unwrap_err().reason, Reason::InvalidSpec);
    }
}
