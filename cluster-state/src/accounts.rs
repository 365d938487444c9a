//! What outlives the node that reported it: how a function did, and what it used.

use imbl::OrdMap;
use millrace_types::{FunctionKey, SloCounts, TenantName, Usage};
use serde::{Deserialize, Serialize};

use crate::placements::first_name;

/// The most tenants whose forgotten functions are billed apart.
pub const FORGOTTEN_TENANTS_MAX: usize = 10_000;

/// A function's score over every node and epoch.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FunctionScore {
    /// All that was ever counted.
    pub total: SloCounts,
    /// The part that replicas which are gone left behind, until the next placement takes it over.
    pub unclaimed: SloCounts,
}

/// Usage over every node and epoch, of deleted functions too.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Bills {
    by_function: OrdMap<FunctionKey, Usage>,
    /// What the functions that are not remembered any more used.
    forgotten: OrdMap<TenantName, Usage>,
    /// The same of the tenants beyond [`FORGOTTEN_TENANTS_MAX`].
    others: Usage,
}

impl Bills {
    pub(crate) fn charge(&mut self, function: &FunctionKey, usage: Usage) {
        let bill = self.by_function.get(function).copied().unwrap_or_default();
        self.by_function.insert(function.clone(), bill.plus(usage));
    }

    /// A deleted function is not remembered any more: its tenant still owes what it used.
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

    pub(crate) fn of_tenant(&self, tenant: &TenantName) -> Usage {
        let first = FunctionKey { tenant: tenant.clone(), name: first_name() };
        let functions = self.by_function.range(first..).take_while(|(key, _)| key.tenant == *tenant);
        let forgotten = self.forgotten.get(tenant).copied().unwrap_or_default();
        functions.fold(forgotten, |sum, (_, usage)| sum.plus(*usage))
    }

    pub(crate) fn functions(&self) -> impl Iterator<Item = (&FunctionKey, &Usage)> {
        self.by_function.iter()
    }

    pub(crate) fn total(&self) -> Usage {
        let forgotten = self.forgotten.values().fold(self.others, |sum, usage| sum.plus(*usage));
        self.by_function.values().fold(forgotten, |sum, usage| sum.plus(*usage))
    }

    pub(crate) fn is_bounded(&self) -> bool {
        self.forgotten.len() <= FORGOTTEN_TENANTS_MAX
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commands::testing::key;

    #[test]
    fn a_tenant_owes_what_its_forgotten_functions_used() {
        let mut bills = Bills::default();
        bills.charge(&key("f"), Usage { gpu_ns: 5, requests: 1 });
        bills.charge(&key("g"), Usage { gpu_ns: 7, requests: 2 });
        bills.forget(&key("f"));
        let all = Usage { gpu_ns: 12, requests: 3 };
        assert_eq!((bills.of(&key("f")), bills.of(&key("g")).requests), (Usage::default(), 2));
        assert_eq!((bills.of_tenant(&TenantName::default()), bills.total()), (all, all));
    }
}
