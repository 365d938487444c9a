//! The tenants with caps on this node, and the numbers by which the queue's gate knows them
//! (`scheduling::tenancy`). The gate gets events of these tenants alone: without caps the gate gets no
//! events.

use std::collections::BTreeMap;
use std::sync::Arc;

use millrace_core::ids::{FunctionIndex, TenantIndex};
use millrace_scheduling::tenancy::Event;
use millrace_types::{Quota, TenantName};

use crate::desired_state::TenantQuotas;

/// The tenants with caps. This value outlives the Node actor.
#[derive(Debug, Default)]
pub(crate) struct TenantCaps {
    /// The number of every tenant that ever had caps here: numbers are never reused.
    numbers: BTreeMap<TenantName, TenantIndex>,
    quotas: Arc<TenantQuotas>,
}

impl TenantCaps {
    /// Returns the number of a tenant that has caps.
    pub(crate) fn capped(&self, tenant: &TenantName) -> Option<TenantIndex> {
        self.quotas.contains_key(tenant).then(|| self.numbers.get(tenant).copied()).flatten()
    }

    /// Replaces the caps. Returns the events that bring the gate up to date; `functions` are the
    /// installed functions.
    pub(crate) fn change<'a>(
        &mut self,
        quotas: Arc<TenantQuotas>,
        functions: impl Iterator<Item = (FunctionIndex, &'a TenantName)> + Clone,
    ) -> Vec<Event> {
        let before = std::mem::replace(&mut self.quotas, quotas);
        let mut events = Vec::new();
        let own = |events: &mut Vec<Event>, of: &TenantName, tenant| {
            let own = functions.clone().filter(|&(_, owner)| owner == of);
            events.extend(own.map(|(function, _)| Event::Owner { function, tenant }));
        };
        // Removed caps come first: the requests that waited for such caps can proceed.
        for name in before.keys().filter(|&name| !self.quotas.contains_key(name)) {
            let Some(&tenant) = self.numbers.get(name) else { continue };
            events.push(Event::Quota { tenant, quota: Quota::NONE });
            own(&mut events, name, None);
        }
        for (name, &quota) in self.quotas.iter() {
            let next = TenantIndex(u32::try_from(self.numbers.len()).unwrap_or(u32::MAX));
            let tenant = *self.numbers.entry(name.clone()).or_insert(next);
            if before.get(name) != Some(&quota) {
                events.push(Event::Quota { tenant, quota });
            }
            if !before.contains_key(name) {
                own(&mut events, name, Some(tenant));
            }
        }
        events
    }

    /// Returns the events that bring a newly started gate up to date.
    pub(crate) fn again<'a>(
        &self,
        functions: impl Iterator<Item = (FunctionIndex, &'a TenantName)>,
    ) -> Vec<Event> {
        let quotas = self.quotas.iter().filter_map(|(name, &quota)| {
            let tenant = self.capped(name)?;
            Some(Event::Quota { tenant, quota })
        });
        let owners = functions.filter_map(|(function, name)| {
            let tenant = Some(self.capped(name)?);
            Some(Event::Owner { function, tenant })
        });
        quotas.chain(owners).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU32;

    use super::*;

    fn tenant(name: &str) -> TenantName {
        TenantName::new(name).unwrap()
    }

    fn quotas(of: &[(&str, u32)]) -> Arc<TenantQuotas> {
        let quota = |&(name, gpus): &(&str, u32)| {
            (tenant(name), Quota { gpus_max: NonZeroU32::new(gpus), ..Quota::NONE })
        };
        Arc::new(of.iter().map(quota).collect())
    }

    #[test]
    fn the_gate_gets_only_the_changes_of_tenants_with_caps() {
        let a = tenant("a");
        let b = tenant("b");
        let functions = [(FunctionIndex(0), &a), (FunctionIndex(1), &b), (FunctionIndex(2), &a)];
        let mut tenants = TenantCaps::default();
        let mut told = |caps: &[(&str, u32)]| {
            let events = tenants.change(quotas(caps), functions.iter().copied());
            (events, tenants.again(functions.iter().copied()))
        };
        let quota = |tenant, gpus| Event::Quota {
            tenant: TenantIndex(tenant),
            quota: Quota { gpus_max: NonZeroU32::new(gpus), ..Quota::NONE },
        };
        let owner = |function, tenant: Option<u32>| Event::Owner {
            function: FunctionIndex(function),
            tenant: tenant.map(TenantIndex),
        };
        assert_eq!(told(&[]), (vec![], vec![]));
        let first = vec![quota(0, 2), owner(0, Some(0)), owner(2, Some(0))];
        assert_eq!(told(&[("a", 2)]), (first.clone(), first));
        assert_eq!(told(&[("a", 2)]).0, []);
        let second = vec![quota(0, 3), quota(1, 1), owner(1, Some(1))];
        assert_eq!(told(&[("a", 3), ("b", 1)]).0, second);
        let gone = vec![quota(0, 0), owner(0, None), owner(2, None)];
        assert_eq!(told(&[("b", 1)]), (gone, vec![quota(1, 1), owner(1, Some(1))]));
    }
}
