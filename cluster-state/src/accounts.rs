//! Records that outlive the reporting node: the score of each function, and its usage.

use std::iter;
use std::ops::Bound;

use imbl::OrdMap;
pub use millrace_types::limits::FORGOTTEN_TENANTS_MAX;
use millrace_types::{FunctionKey, FunctionName, SloCounts, TenantName, Usage};
use serde::{Deserialize, Serialize};

use crate::placements::first_key;

/// A function's score, summed over every node and epoch.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FunctionScore {
    /// All counts so far.
    pub total: SloCounts,
    /// Counts of removed replicas, which the function's next placement takes over.
    pub unclaimed: SloCounts,
}

/// The key of a bill. Listings of bills are in the order of these keys.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct BillAccount {
    /// The billed tenant; `None` for the sum of the tenants beyond [`FORGOTTEN_TENANTS_MAX`].
    pub tenant: Option<TenantName>,
    /// The billed function; `None` for the sum of the tenant's forgotten functions.
    pub function: Option<FunctionName>,
}

impl BillAccount {
    /// Returns the account of a function.
    #[must_use]
    pub fn of(function: &FunctionKey) -> Self {
        Self { tenant: Some(function.tenant.clone()), function: Some(function.name.clone()) }
    }

    /// Returns the tenant's first account in the order: that of its forgotten functions.
    #[must_use]
    pub fn of_tenant(tenant: &TenantName) -> Self {
        Self { tenant: Some(tenant.clone()), function: None }
    }

    /// Returns the function's key, if this is the account of a function.
    #[must_use]
    pub fn key(&self) -> Option<FunctionKey> {
        Some(FunctionKey { tenant: self.tenant.clone()?, name: self.function.clone()? })
    }
}

/// Usage over every node and epoch, deleted functions included.
///
/// Nothing is ever subtracted. The usage of a deleted function stays under its name as long as the
/// name is remembered ([`RETIRED_MAX`](crate::RETIRED_MAX)), and grows if a function of that name
/// returns. Later the usage is part of the tenant's forgotten functions.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct BillTotals {
    #[serde(deserialize_with = "crate::packed::map")]
    by_function: OrdMap<FunctionKey, Usage>,
    /// Usage of forgotten functions, by tenant.
    #[serde(deserialize_with = "crate::packed::map")]
    forgotten: OrdMap<TenantName, Usage>,
    /// Usage of forgotten functions of the tenants beyond [`FORGOTTEN_TENANTS_MAX`].
    others: Usage,
}

impl BillTotals {
    pub(crate) fn charge(&mut self, function: &FunctionKey, usage: Usage) {
        let bill = self.by_function.get(function).copied().unwrap_or_default();
        self.by_function.insert(function.clone(), bill.plus(usage));
    }

    /// Moves the usage of a deleted function to its tenant's forgotten functions, because its name
    /// is no longer remembered.
    pub(crate) fn forget(&mut self, function: &FunctionKey) {
        let Some(usage) = self.by_function.remove(function) else { return };
        let known = self.forgotten.get(&function.tenant).copied();
        if known.is_none() && self.forgotten.len() >= FORGOTTEN_TENANTS_MAX {
            self.others = self.others.plus(usage);
        } else {
            self.forgotten.insert(function.tenant.clone(), known.unwrap_or_default().plus(usage));
        }
    }

    pub(crate) fn of(&self, function: &FunctionKey) -> Usage {
        self.by_function.get(function).copied().unwrap_or_default()
    }

    pub(crate) fn functions(&self) -> impl Iterator<Item = (&FunctionKey, &Usage)> {
        self.by_function.iter()
    }

    /// Returns every bill from an account on, in order.
    pub(crate) fn list(&self, from: Bound<&BillAccount>) -> impl Iterator<Item = (BillAccount, Usage)> {
        let (names, tenants) = starts(from);
        let mut functions = self.by_function.range((names, Bound::Unbounded)).peekable();
        let mut forgotten = self.forgotten.range((tenants, Bound::Unbounded)).peekable();
        let is_first = match from {
            Bound::Unbounded => true,
            Bound::Included(account) => *account == BillAccount::default(),
            Bound::Excluded(_) => false,
        };
        let others = Some(self.others).filter(|others| is_first && *others != Usage::NONE);
        let rest = iter::from_fn(move || {
            let function = functions.peek().map(|(key, _)| &key.tenant);
            let gone = forgotten.next_if(|(tenant, _)| function.is_none_or(|function| *tenant <= function));
            match gone {
                Some((tenant, usage)) => Some((BillAccount::of_tenant(tenant), *usage)),
                None => functions.next().map(|(key, usage)| (BillAccount::of(key), *usage)),
            }
        });
        others.map(|usage| (BillAccount::default(), usage)).into_iter().chain(rest)
    }

    pub(crate) fn len(&self) -> usize {
        self.by_function.len() + self.forgotten.len()
    }

    pub(crate) fn is_bounded(&self) -> bool {
        self.forgotten.len() <= FORGOTTEN_TENANTS_MAX
    }
}

/// Returns the bounds from which the functions and the forgotten tenants are listed.
fn starts(from: Bound<&BillAccount>) -> (Bound<FunctionKey>, Bound<TenantName>) {
    let (Bound::Included(account) | Bound::Excluded(account)) = from else {
        return (Bound::Unbounded, Bound::Unbounded);
    };
    let Some(tenant) = account.tenant.clone() else { return (Bound::Unbounded, Bound::Unbounded) };
    let functions = match account.key() {
        Some(key) => from.map(|_| key),
        None => Bound::Included(first_key(&tenant)),
    };
    let tenants = match (from, &account.function) {
        (Bound::Included(_), None) => Bound::Included(tenant),
        _ => Bound::Excluded(tenant),
    };
    (functions, tenants)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commands::testing::key;

    fn usage(gpu_ns: u64, requests: u64) -> Usage {
        Usage { gpu_ns, requests, idle_ms: 2 * gpu_ns }
    }

    #[test]
    fn bills_are_listed_in_order_from_any_account_on() {
        let name = |name: &str| FunctionName::new(name).unwrap();
        let tenant = |name: &str| TenantName::new(name).unwrap();
        let function = |of: &str, it: &str| FunctionKey { tenant: tenant(of), name: name(it) };
        let mut bills = BillTotals { others: usage(1, 1), ..BillTotals::default() };
        for (of, it) in [("a", "f"), ("b", "f"), ("b", "g"), ("d", "f")] {
            bills.charge(&function(of, it), usage(7, 1));
        }
        for (of, it) in [("b", "e"), ("c", "e"), ("d", "z")] {
            bills.charge(&function(of, it), usage(5, 1));
            bills.forget(&function(of, it));
        }
        let all: Vec<_> = bills.list(Bound::Unbounded).collect();
        let accounts: Vec<_> = all.iter().map(|(account, _)| account.clone()).collect();
        let gone = |of| BillAccount::of_tenant(&tenant(of));
        let expected = [
            BillAccount::default(),
            BillAccount::of(&function("a", "f")),
            gone("b"),
            BillAccount::of(&function("b", "f")),
            BillAccount::of(&function("b", "g")),
            gone("c"),
            gone("d"),
            BillAccount::of(&function("d", "f")),
        ];
        assert_eq!(accounts, expected);
        let sum = all.iter().fold(Usage::NONE, |sum, (_, usage)| sum.plus(*usage));
        assert_eq!(sum, usage(1 + 4 * 7 + 3 * 5, 8));
        for (at, account) in accounts.iter().enumerate() {
            assert_eq!(bills.list(Bound::Included(account)).collect::<Vec<_>>(), all[at..], "{account:?}");
            assert_eq!(
                bills.list(Bound::Excluded(account)).collect::<Vec<_>>(),
                all[at + 1..],
                "{account:?}"
            );
        }
    }

    #[test]
    fn usage_of_forgotten_functions_is_billed_to_their_tenant() {
        let mut bills = BillTotals::default();
        bills.charge(&key("f"), usage(5, 1));
        bills.charge(&key("g"), usage(7, 2));
        bills.forget(&key("f"));
        assert_eq!((bills.of(&key("f")), bills.of(&key("g")).requests), (Usage::NONE, 2));
        let forgotten = (BillAccount::of_tenant(&TenantName::default()), usage(5, 1));
        let owed: Vec<_> = bills.list(Bound::Unbounded).collect();
        assert_eq!(owed, [forgotten, (BillAccount::of(&key("g")), usage(7, 2))]);
    }
}
