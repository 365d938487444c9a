//! The wait until applied items can serve.

use std::time::Duration;

use millrace_client::messages as wire;

use crate::clock;
use crate::failure::CommandFailure;
use crate::manifests::resource::AppliedResource;
use crate::output::documents::status_word;
use crate::progress;
use crate::session::ClusterSession;

/// The first pause between two looks. Each later pause is twice as long, up to `LONGEST_PAUSE`.
const FIRST_PAUSE: Duration = Duration::from_millis(20);
const LONGEST_PAUSE: Duration = Duration::from_millis(500);

/// The readiness of an applied item.
#[derive(Debug, PartialEq, Eq)]
enum Readiness {
    Ready,
    /// The item cannot become ready without a change. Has the reason.
    Hopeless(String),
    /// The item is not ready yet. Has the awaited condition.
    NotYet(String),
}

/// Waits until everything is ready, and returns the current resources.
pub(super) async fn wait(
    resources: Vec<AppliedResource>,
    session: &ClusterSession,
    timeout: Duration,
) -> Result<Vec<AppliedResource>, CommandFailure> {
    let deadline = clock::now() + timeout;
    let mut ready = Vec::with_capacity(resources.len());
    for mut resource in resources {
        let name = resource.title();
        let line = progress::waiting(format!("waiting for {name}"));
        // The answer to the apply is old by now: the item may have become ready during the wait for others.
        if !matches!(Readiness::of(&resource), Readiness::Ready) {
            resource = resource.again(&session.admin).await?;
        }
        let mut pause = FIRST_PAUSE;
        loop {
            let waits_for = match Readiness::of(&resource) {
                Readiness::Ready => break,
                Readiness::Hopeless(why) => {
                    return Err(CommandFailure::failed(format!(
                        "{name} was applied but cannot serve: {why}"
                    )));
                }
                Readiness::NotYet(what) => what,
            };
            line.set_message(format!("waiting for {name}: {waits_for}"));
            if clock::now() >= deadline {
                let waited = humantime::format_duration(timeout);
                return Err(CommandFailure::timed_out(format!(
                    "{name} is not ready after {waited}: {waits_for}"
                ))
                .hint(format!(
                    "the preparation continues: see '{}', or allow more time with --wait=TIME",
                    resource.look()
                )));
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(LONGEST_PAUSE);
            resource = resource.again(&session.admin).await?;
        }
        line.finish_and_clear();
        ready.push(resource);
    }
    Ok(ready)
}

impl Readiness {
    fn of(resource: &AppliedResource) -> Self {
        match resource {
            AppliedResource::Function(it) => readiness(&it.conditions),
            AppliedResource::Workflow(it) => readiness(&it.conditions),
            // Nodes receive caps together with their placements, and do not acknowledge caps.
            AppliedResource::Tenant(_) => Self::Ready,
            AppliedResource::Policy(policy) => policy_received(policy),
        }
    }
}

/// Returns whether every node has received the policy.
fn policy_received(policy: &wire::Policy) -> Readiness {
    let waits = policy.nodes.iter().find(|node| node.generation < policy.generation);
    waits.map_or(Readiness::Ready, |node| {
        Readiness::NotYet(format!("node {} has not received the policy", node.node))
    })
}

fn readiness(conditions: &[wire::Condition]) -> Readiness {
    let Some(condition) = conditions.iter().find(|condition| condition.r#type == "Ready") else {
        return Readiness::NotYet("no node has reported yet".to_owned());
    };
    let why = match condition.message.as_str() {
        "" => condition.reason.clone(),
        message => format!("{}: {message}", condition.reason),
    };
    match (status_word(condition), condition.reason.as_str()) {
        ("True", _) => Readiness::Ready,
        (_, "PrepareFailed" | "Disabled") => Readiness::Hopeless(why),
        _ => Readiness::NotYet(why),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(status: wire::ConditionStatus, reason: &str, message: &str) -> Readiness {
        let condition = wire::Condition {
            r#type: "Ready".into(),
            status: status.into(),
            reason: reason.into(),
            message: message.into(),
        };
        readiness(&[condition])
    }

    #[test]
    fn readiness_distinguishes_hopeless_from_pending_conditions() {
        use wire::ConditionStatus::{False, True};
        assert_eq!(check(True, "Prepared", ""), Readiness::Ready);
        assert_eq!(check(False, "Preparing", ""), Readiness::NotYet("Preparing".into()));
        assert_eq!(check(False, "NoWorker", "none"), Readiness::NotYet("NoWorker: none".into()));
        assert_eq!(check(False, "PrepareFailed", "x"), Readiness::Hopeless("PrepareFailed: x".into()));
        assert_eq!(check(False, "Disabled", ""), Readiness::Hopeless("Disabled".into()));
        assert!(matches!(readiness(&[]), Readiness::NotYet(_)));
    }

    #[test]
    fn a_policy_is_ready_when_every_node_has_received_it() {
        let node =
            |node: &str, generation| wire::NodePolicy { node: node.into(), generation, ..Default::default() };
        let policy =
            |nodes| AppliedResource::Policy(wire::Policy { generation: 3, nodes, ..Default::default() });
        assert_eq!(Readiness::of(&policy(vec![node("a", 3), node("b", 4)])), Readiness::Ready);
        let deaf = Readiness::of(&policy(vec![node("a", 3), node("b", 2)]));
        assert_eq!(deaf, Readiness::NotYet("node b has not received the policy".into()));
        assert_eq!(Readiness::of(&AppliedResource::Tenant(wire::Tenant::default())), Readiness::Ready);
    }
}
