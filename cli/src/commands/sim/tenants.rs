//! The tenants of a simulation, parsed from options.

use std::num::NonZeroU32;
use std::str::FromStr;

use millrace_sim::scenario::SimulatedFunction;
use millrace_types::{Quota, ResourceShare, TenantName};

use crate::failure::CommandFailure;

/// A tenant's functions, the factor of their requests, and its caps.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct SimulatedTenant {
    pub(super) name: TenantName,
    functions: NonZeroU32,
    /// The factor of the tenant's requests.
    times: NonZeroU32,
    pub(super) quota: Quota,
}

impl FromStr for SimulatedTenant {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let mut words = text.split(',');
        let (name, functions) = words
            .next()
            .and_then(|first| first.split_once('='))
            .ok_or("write a tenant's name and its number of functions first, such as acme=40")?;
        let name = TenantName::new(name).map_err(|error| error.to_string())?;
        let count = |field: &str, value: &str| {
            value.parse::<NonZeroU32>().map_err(|_| format!("{field} is {value:?}: write a number from 1 on"))
        };
        let mut tenant = Self {
            name,
            functions: count("the number of functions", functions)?,
            times: NonZeroU32::MIN,
            quota: Quota::NONE,
        };
        for word in words {
            let (key, value) = word.split_once('=').unwrap_or((word, ""));
            let share = || value.parse::<ResourceShare>().map_err(|error| format!("{key}: {error}"));
            match key {
                "times" => tenant.times = count(key, value)?,
                "gpus-max" => tenant.quota.gpus_max = Some(count(key, value)?),
                "gpu-share" => tenant.quota.gpu_share = Some(share()?),
                "memory-share" => tenant.quota.memory_share = Some(share()?),
                _ => {
                    return Err(format!(
                        "{key:?} is not known: use times, gpus-max, gpu-share or memory-share"
                    ));
                }
            }
        }
        Ok(tenant)
    }
}

/// Assigns the first functions to the first tenant, the next ones to the next tenant, and the rest
/// to the default tenant.
pub(super) fn assign(
    tenants: &[SimulatedTenant],
    functions: &mut [SimulatedFunction],
) -> Result<(), CommandFailure> {
    let wanted: u64 = tenants.iter().map(|tenant| u64::from(tenant.functions.get())).sum();
    if wanted > functions.len() as u64 {
        let message = format!("the tenants have {wanted} functions, but there are only {}", functions.len());
        return Err(CommandFailure::usage(message).hint("increase --functions"));
    }
    let owners = tenants.iter().flat_map(|it| std::iter::repeat_n(&it.name, it.functions.get() as usize));
    functions.iter_mut().zip(owners).for_each(|(function, owner)| function.tenant = owner.clone());
    Ok(())
}

/// Returns the factor of each function's requests.
pub(super) fn times(tenants: &[SimulatedTenant], functions: usize) -> Vec<u32> {
    let of = |it: &SimulatedTenant| std::iter::repeat_n(it.times.get(), it.functions.get() as usize);
    tenants.iter().flat_map(of).chain(std::iter::repeat(1)).take(functions).collect()
}

#[cfg(test)]
mod tests {
    use millrace_sim::models;

    use super::*;

    fn tenant(text: &str) -> SimulatedTenant {
        text.parse().unwrap()
    }

    #[test]
    fn a_tenant_is_parsed_with_its_functions_factor_and_caps() {
        let bare = tenant("acme=40");
        assert_eq!((bare.functions.get(), bare.times.get(), bare.quota), (40, 1, Quota::NONE));
        let all = tenant("acme=2,times=10,gpus-max=1,gpu-share=0.25,memory-share=1").quota;
        let quarter = ResourceShare::from_fraction(0.25).ok();
        let expected = Quota {
            gpus_max: NonZeroU32::new(1),
            gpu_share: quarter,
            memory_share: Some(ResourceShare::ALL),
        };
        assert_eq!(all, expected);
    }

    #[test]
    fn a_malformed_tenant_is_refused_with_advice() {
        let refused = |text: &str| text.parse::<SimulatedTenant>().unwrap_err();
        assert!(refused("acme").contains("acme=40"));
        assert!(refused("acme=0").contains("from 1 on"));
        assert!(refused("acme=1,gpu-share=2").contains("at most 1"));
        assert!(refused("acme=1,executors=2").contains("gpus-max"));
    }

    #[test]
    fn functions_are_assigned_to_tenants_in_order_and_the_rest_to_the_default() {
        let mut functions = vec![SimulatedFunction::new(models::torpor()[0].clone(), None); 4];
        let tenants = [tenant("a=1,times=3"), tenant("b=2")];
        assign(&tenants, &mut functions).unwrap();
        let owners: Vec<_> = functions.iter().map(|function| function.tenant.to_string()).collect();
        assert_eq!(owners, ["a", "b", "b", "default"]);
        assert_eq!(times(&tenants, 4), [3, 1, 1, 1]);
        assert!(assign(&[tenant("a=5")], &mut functions).is_err());
    }
}
