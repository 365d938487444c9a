//! Sets the caps on a tenant's functions (L20), or removes every cap. A tenant without functions
//! can have caps, and keeps them when its last function is deleted.

use std::sync::Arc;

use millrace_types::{Quota, TenantName};

use crate::outcome::{Applied, Outcome, Refusal};
use crate::record::Tenant;
use crate::state::{Context, State, TENANTS_MAX};

pub(crate) fn set_quota(state: &mut State, context: Context<'_>, name: &TenantName, quota: Quota) -> Outcome {
    let known = state.tenants.get(name).map_or(Quota::NONE, |tenant| tenant.quota);
    if known == quota {
        return Ok(Applied::Unchanged);
    }
    if known.is_none() && state.tenants.len() >= TENANTS_MAX {
        return Err(Refusal::Full { what: "tenants with caps".into(), limit: TENANTS_MAX as u64 });
    }
    let version = state.next_version();
    if quota.is_none() {
        state.tenants.remove(name);
        return Ok(Applied::Deleted { version });
    }
    let tenant = Tenant {
        name: name.clone(),
        quota,
        resource_version: version,
        changed_at: context.now,
        changed_by: context.caller.clone(),
    };
    state.tenants.insert(name.clone(), Arc::new(tenant));
    if known.is_none() { Ok(Applied::Created { version }) } else { Ok(Applied::Changed { version }) }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU32;

    use millrace_types::Share;

    use super::*;
    use crate::Command;
    use crate::commands::testing::Log;

    fn set(quota: Quota) -> Command {
        Command::SetQuota { tenant: TenantName::default(), quota }
    }

    #[test]
    fn caps_are_stored_changed_and_removed() {
        let mut log = Log::new();
        let version = log.state.version();
        let two = Quota { gpus_max: NonZeroU32::new(2), ..Quota::NONE };
        assert_eq!(log.apply(set(Quota::NONE)), Ok(Applied::Unchanged), "it had none");
        assert_eq!(log.apply(set(two)), Ok(Applied::Created { version: version + 1 }));
        assert_eq!(log.apply(set(two)), Ok(Applied::Unchanged));
        let half = Quota { memory_share: Share::from_ppm(500_000).ok(), ..Quota::NONE };
        assert_eq!(
            log.apply(set(half)),
            Ok(Applied::Changed { version: version + 2 }),
            "all of them at once"
        );
        assert_eq!(log.state.quota(&TenantName::default()), half);
        assert_eq!(State::decode(&log.state.encode()).unwrap(), log.state);
        assert_eq!(log.apply(set(Quota::NONE)), Ok(Applied::Deleted { version: version + 3 }));
        assert_eq!((log.state.quota(&TenantName::default()), log.state.tenants().count()), (Quota::NONE, 0));
    }

    #[test]
    fn tenants_with_caps_are_bounded() {
        let mut log = Log::new();
        let tenant = |number: usize| TenantName::new(&format!("t{number}")).unwrap();
        let quota = Quota { gpus_max: NonZeroU32::new(1), ..Quota::NONE };
        let record = Tenant {
            name: tenant(0),
            quota,
            resource_version: 1,
            changed_at: crate::UnixMillis(0),
            changed_by: crate::Caller("alice".into()),
        };
        log.state.version += TENANTS_MAX as u64;
        for number in 0..TENANTS_MAX {
            let name = tenant(number);
            let resource_version = number as u64 + 1;
            log.state
                .tenants
                .insert(name.clone(), Arc::new(Tenant { name, resource_version, ..record.clone() }));
        }
        let more = Command::SetQuota { tenant: tenant(TENANTS_MAX), quota };
        assert!(matches!(log.refused(more), Refusal::Full { .. }));
        let known = Command::SetQuota { tenant: tenant(1), quota: Quota::NONE };
        assert!(log.apply(known).is_ok());
    }
}
