//! Sets the caps on a tenant's functions (L20), or removes every cap. A tenant without functions
//! can have caps, and keeps them when its last function is deleted.

use std::sync::Arc;

use millrace_types::{Quota, TenantName};

use crate::context::CommandContext;
use crate::outcome::{CommandEffect, CommandOutcome, CommandRefusal};
use crate::record::TenantRecord;
use crate::state::{State, TENANTS_MAX};

pub(crate) fn set_quota(
    state: &mut State,
    context: CommandContext<'_>,
    name: &TenantName,
    quota: Quota,
) -> CommandOutcome {
    let known = state.tenants.get(name).map_or(Quota::NONE, |tenant| tenant.quota);
    if known == quota {
        return Ok(CommandEffect::Unchanged);
    }
    if known.is_none() && state.tenants.len() >= TENANTS_MAX {
        return Err(CommandRefusal::Full { what: "tenants with caps".into(), limit: TENANTS_MAX as u64 });
    }
    let version = state.next_version();
    if quota.is_none() {
        state.tenants.remove(name);
        return Ok(CommandEffect::Deleted { version });
    }
    let tenant = TenantRecord {
        name: name.clone(),
        quota,
        resource_version: version,
        changed_at: context.now,
        changed_by: context.caller.clone(),
    };
    state.tenants.insert(name.clone(), Arc::new(tenant));
    if known.is_none() {
        Ok(CommandEffect::Created { version })
    } else {
        Ok(CommandEffect::Changed { version })
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU32;

    use millrace_types::ResourceShare;

    use super::*;
    use crate::StateCommand;
    use crate::commands::testing::TestLog;

    fn set(quota: Quota) -> StateCommand {
        StateCommand::SetQuota { tenant: TenantName::default(), quota }
    }

    #[test]
    fn caps_are_stored_changed_and_removed() {
        let mut log = TestLog::new();
        let version = log.state.version();
        let two = Quota { gpus_max: NonZeroU32::new(2), ..Quota::NONE };
        assert_eq!(log.apply(set(Quota::NONE)), Ok(CommandEffect::Unchanged), "it had none");
        assert_eq!(log.apply(set(two)), Ok(CommandEffect::Created { version: version + 1 }));
        assert_eq!(log.apply(set(two)), Ok(CommandEffect::Unchanged));
        let half = Quota { memory_share: ResourceShare::from_ppm(500_000).ok(), ..Quota::NONE };
        assert_eq!(
            log.apply(set(half)),
            Ok(CommandEffect::Changed { version: version + 2 }),
            "all of them at once"
        );
        assert_eq!(log.state.quota(&TenantName::default()), half);
        assert_eq!(State::decode(&log.state.encode()).unwrap(), log.state);
        assert_eq!(log.apply(set(Quota::NONE)), Ok(CommandEffect::Deleted { version: version + 3 }));
        assert_eq!((log.state.quota(&TenantName::default()), log.state.tenants().count()), (Quota::NONE, 0));
    }

    #[test]
    fn tenants_with_caps_are_bounded() {
        let mut log = TestLog::new();
        let tenant = |number: usize| TenantName::new(&format!("t{number}")).unwrap();
        let quota = Quota { gpus_max: NonZeroU32::new(1), ..Quota::NONE };
        let record = TenantRecord {
            name: tenant(0),
            quota,
            resource_version: 1,
            changed_at: crate::UnixMillis(0),
            changed_by: crate::CallerName("alice".into()),
        };
        log.state.version += TENANTS_MAX as u64;
        for number in 0..TENANTS_MAX {
            let name = tenant(number);
            let resource_version = number as u64 + 1;
            log.state
                .tenants
                .insert(name.clone(), Arc::new(TenantRecord { name, resource_version, ..record.clone() }));
        }
        let more = StateCommand::SetQuota { tenant: tenant(TENANTS_MAX), quota };
        assert!(matches!(log.refused(more), CommandRefusal::Full { .. }));
        let known = StateCommand::SetQuota { tenant: tenant(1), quota: Quota::NONE };
        assert!(log.apply(known).is_ok());
    }
}
