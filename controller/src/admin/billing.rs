//! The bills of tenants, by function (T26). Bills come from the replicated state, so they reflect the
//! last committed checkpoints.

use std::ops::Bound;

use millrace_cluster_state::{BillAccount, State};
use millrace_proto::admin as api;
use millrace_proto::convert::duration_wire;
use millrace_types::{Failure, FunctionName, TenantName, Usage};

use super::listing::{fill, page_size};
use super::masks::ResponseMask;
use super::{AdminService, invalid_name, unknown_token};

impl AdminService {
    pub(super) async fn list_billing(
        &self,
        request: api::ListBillingRequest,
    ) -> Result<api::ListBillingResponse, Failure> {
        let filter = Filter::new(&request)?;
        let after = page_token(&request.page_token)?;
        let size = page_size(request.page_size);
        let consistency = request.consistency();
        let mask = ResponseMask::read(request.read_mask, "Bill")?;
        let state = self.read(consistency).await?;
        let first = filter.tenant.as_ref().map(BillAccount::of_tenant);
        let from = match (&after, &first) {
            (Some(after), _) => Bound::Excluded(after),
            (None, Some(first)) => Bound::Included(first),
            (None, None) => Bound::Unbounded,
        };
        let found = state
            .bills(from)
            .take_while(|(account, _)| filter.takes_tenant(account))
            .filter(|(account, _)| filter.takes_function(account));
        let (bills, last) = fill(found, size, |(account, usage)| mask.cut(bill(&state, account, *usage)));
        let next_page_token = last.map(|(account, _)| token(account)).unwrap_or_default();
        Ok(api::ListBillingResponse { next_page_token, bills })
    }
}

/// The filter of bills by tenant and function.
struct Filter {
    tenant: Option<TenantName>,
    function: Option<FunctionName>,
}

impl Filter {
    fn new(request: &api::ListBillingRequest) -> Result<Self, Failure> {
        let given = |text: &str| (!text.is_empty()).then(|| text.to_owned());
        let tenant = given(&request.tenant).map(|name| TenantName::new(&name)).transpose();
        let function = given(&request.function).map(|name| FunctionName::new(&name)).transpose();
        Ok(Self { tenant: tenant.map_err(invalid_name)?, function: function.map_err(invalid_name)? })
    }

    fn takes_tenant(&self, account: &BillAccount) -> bool {
        self.tenant.is_none() || self.tenant == account.tenant
    }

    fn takes_function(&self, account: &BillAccount) -> bool {
        self.function.is_none() || self.function == account.function
    }
}

fn bill(state: &State, account: &BillAccount, usage: Usage) -> api::Bill {
    api::Bill {
        tenant: account.tenant.as_ref().map(TenantName::to_string).unwrap_or_default(),
        function: account.function.as_ref().map(FunctionName::to_string).unwrap_or_default(),
        requests: usage.requests,
        busy: Some(duration_wire(usage.busy())),
        idle: Some(duration_wire(usage.idle())),
        charge: Some(duration_wire(usage.charge())),
        deleted: account.key().is_none_or(|key| state.function(&key).is_none()),
    }
}

/// Returns the page token: the account of the last bill on the page. Names have no slash.
fn token(BillAccount { tenant, function }: BillAccount) -> String {
    let tenant = tenant.map(String::from).unwrap_or_default();
    format!("{tenant}/{}", function.map(String::from).unwrap_or_default())
}

fn page_token(token: &str) -> Result<Option<BillAccount>, Failure> {
    if token.is_empty() {
        return Ok(None);
    }
    let read = |token: &str| {
        let (tenant, function) = token.split_once('/')?;
        let tenant = if tenant.is_empty() { None } else { Some(TenantName::new(tenant).ok()?) };
        let function = if function.is_empty() { None } else { Some(FunctionName::new(function).ok()?) };
        Some(BillAccount { tenant, function })
    };
    read(token).map(Some).ok_or_else(|| Failure::malformed(unknown_token(token)))
}

#[cfg(test)]
mod tests {
    use millrace_types::Reason;

    use super::*;

    #[test]
    fn a_page_continues_after_any_account() {
        for text in ["/", "acme/", "acme/f"] {
            assert_eq!(page_token(text).unwrap().map(token).as_deref(), Some(text));
        }
        assert_eq!(page_token("").unwrap(), None);
        for text in ["acme", "ACME/f", "acme/f/g"] {
            assert_eq!(page_token(text).unwrap_err().reason, Reason::MalformedRequest, "{text}");
        }
    }
}
