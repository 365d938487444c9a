//! Changes of the controller group. Warnings about the group after a change are printed to stderr.

use std::num::NonZeroU64;

use millrace_client::messages as wire;

use crate::failure::CommandFailure;
use crate::output::print;
use crate::session::ClusterSession;

pub(super) async fn promote(id: NonZeroU64, session: &ClusterSession) -> Result<(), CommandFailure> {
    let group = session.admin.promote_controller(id.get()).await.map_err(|error| about(id, error))?;
    told(&format!("controller/{id} promoted"), &group)
}

pub(super) async fn remove(id: NonZeroU64, session: &ClusterSession) -> Result<(), CommandFailure> {
    let group = session.admin.remove_controller(id.get()).await.map_err(|error| about(id, error))?;
    told(&format!("controller/{id} removed"), &group)
}

pub(super) async fn begin_promotion(id: NonZeroU64, session: &ClusterSession) -> Result<(), CommandFailure> {
    let begun = session.admin.begin_promotion(id.get()).await.map_err(|error| about(id, error))?;
    begins(&format!("controller/{id}"), "promoted", &begun)
}

pub(super) async fn begin_removal(id: NonZeroU64, session: &ClusterSession) -> Result<(), CommandFailure> {
    let begun = session.admin.begin_removal(id.get()).await.map_err(|error| about(id, error))?;
    begins(&format!("controller/{id}"), "removed", &begun)
}

/// Prints the operation of a change. A change that was complete at once is printed as such.
fn begins(who: &str, done: &str, group: &wire::ChangeMembershipResponse) -> Result<(), CommandFailure> {
    match group.members.as_slice() {
        [] => print(&format!("{who} is being {done}: operation/{}", group.operation)),
        _ => told(&format!("{who} {done}"), group),
    }
}

pub(super) async fn transfer(to: Option<NonZeroU64>, session: &ClusterSession) -> Result<(), CommandFailure> {
    let led = session.admin.transfer_leadership(to.map(NonZeroU64::get)).await?;
    print(&format!("controller/{} leads in term {}", led.leader, led.term))
}

fn about(id: NonZeroU64, error: millrace_client::Error) -> CommandFailure {
    CommandFailure::from(error).about(format_args!("controller/{id}"))
}

fn told(what: &str, group: &wire::ChangeMembershipResponse) -> Result<(), CommandFailure> {
    print(&format!("{what}: {}", members(group)))?;
    for warning in &group.warnings {
        eprintln!("warning: {warning}");
    }
    Ok(())
}

/// Describes the members of the group.
fn members(group: &wire::ChangeMembershipResponse) -> String {
    let ids = |voter: bool| {
        let ids = group.members.iter().filter(|it| it.voter == voter).map(|it| it.id.to_string());
        ids.collect::<Vec<_>>().join(", ")
    };
    match ids(false).as_str() {
        "" => format!("the voters are {}", ids(true)),
        learners => format!("the voters are {}, the learners {learners}", ids(true)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn voters_and_learners_are_listed_separately() {
        let member = |id, voter| wire::Member { id, voter, ..Default::default() };
        let group = |members| wire::ChangeMembershipResponse { members, ..Default::default() };
        let voters = vec![member(1, true), member(3, true)];
        assert_eq!(members(&group(voters.clone())), "the voters are 1, 3");
        let mixed = [voters, vec![member(4, false)]].concat();
        assert_eq!(members(&group(mixed)), "the voters are 1, 3, the learners 4");
    }
}
