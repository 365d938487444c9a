//! A page of what has a key of tenant and name: functions, or workflows.

use std::ops::Bound;

use millrace_cluster_state::first_key;
use millrace_proto::convert;
use millrace_types::{Failure, FunctionKey, TenantName};

use super::{invalid_name, page_size, unknown_token};

/// Which of them, and how many.
#[derive(Debug)]
pub(super) struct Listing {
    tenant: Option<TenantName>,
    after: Option<FunctionKey>,
    size: usize,
}

impl Listing {
    /// Reads what a request says: an empty tenant is every one, and a token is the key of the last of
    /// the page before.
    pub(super) fn read(tenant: &str, size: u32, token: &str) -> Result<Self, Failure> {
        let tenant = match tenant {
            "" => None,
            tenant => Some(TenantName::new(tenant).map_err(invalid_name)?),
        };
        Ok(Self { tenant, after: page_token(token)?, size: page_size(size) })
    }

    /// From where on to look.
    pub(super) fn start(&self) -> Bound<FunctionKey> {
        match (&self.after, &self.tenant) {
            (Some(after), _) => Bound::Excluded(after.clone()),
            (None, Some(tenant)) => Bound::Included(first_key(tenant)),
            (None, None) => Bound::Unbounded,
        }
    }

    /// A page of what is found from there on, as `view` shows it, and the token of the next: empty on
    /// the last.
    pub(super) fn page<T, V>(
        &self,
        found: impl Iterator<Item = T>,
        key: impl Fn(&T) -> &FunctionKey,
        view: impl Fn(&T) -> V,
    ) -> (Vec<V>, String) {
        let wanted = |item: &T| self.tenant.as_ref().is_none_or(|tenant| key(item).tenant == *tenant);
        let mut found = found.take_while(wanted).peekable();
        let (mut page, mut last) = (Vec::new(), None);
        while let Some(item) = found.next_if(|_| page.len() < self.size) {
            page.push(view(&item));
            last = Some(item);
        }
        let next = last.filter(|_| found.peek().is_some());
        (page, next.map(|item| key(&item).to_string()).unwrap_or_default())
    }
}

fn page_token(token: &str) -> Result<Option<FunctionKey>, Failure> {
    if token.is_empty() {
        return Ok(None);
    }
    let bad = || Failure::malformed(unknown_token(token));
    let (tenant, name) = token.split_once('/').ok_or_else(bad)?;
    convert::function_key(tenant, name).map(Some).map_err(|_| bad())
}
