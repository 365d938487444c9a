//! Which tenants have caps on this node, and under which number the queue's gate knows each
//! (`policy::tenancy`). The gate is told of those alone: a node whose tenants have no caps tells it
//! nothing.

use std::collections::BTreeMap;
use std::sync::Arc;

use millrace_policy::ids::{FunctionIndex, TenantIndex};
use millrace_policy::tenancy::Event;
use millrace_types::{Quota, TenantName};

use crate::control::desired::Quotas;

/// The tenants with caps. Outlives the Node actor.
#[derive(Debug, Default)]
pub(crate) struct Tenants {
    /// Of each that ever had caps here: a number is not given twice.
    numbers: BTreeMap<TenantName, TenantIndex>,
    quotas: Arc<Quotas>,
}

impl Tenants {
    /// The number of a tenant that has caps.
    pub(crate) fn capped(&self, tenant: &TenantName) -> Option<TenantIndex> {
        self.quotas.contains_key(tenant).then(|| self.numbers.get(tenant).copied()).flatten()
    }

    /// Other caps hold: what the gate is told, of the functions that are here.
    pub(crate) fn change<'a>(
        &mut self,
        quotas: Arc<Quotas>,
        functions: impl Iterator<Item = (FunctionIndex, &'a TenantName)> + Clone,
    ) -> Vec<Event> {
        let before = std::mem::replace(&mut self.quotas, quotas);
        let mut events = Vec::new();
        let own = |events: &mut Vec<Event>, of: &TenantName, tenant| {
            let own = functions.clone().filter(|&(_, owner)| owner == of);
            events.extend(own.map(|(function, _)| Event::Owner { function, tenant }));
        };
        // Gone caps first: what waited for them goes on.
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

    /// What a gate is told that knows nothing.
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

    fn quotas(of: &[(&str, u32)]) -> Arc<Quotas> {
        let quota = |&(name, gpus): &(&str, u32)| {
            (tenant(name), Quota { gpus_max: NonZeroU32::new(gpus), ..Quota::NONE })
        };
        Arc::new(of.iter().map(quota).collect())
    }

    #[test]
    fn the_gate_is_told_what_changed_of_those_with_caps_alone() {
        let (a, b) = (tenant("a"), tenant("b"));
        let functions = [(FunctionIndex(0), &a), (FunctionIndex(1), &b), (FunctionIndex(2), &a)];
        let mut tenants = Tenants::default();
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
