//! Snapshots of the cluster, with the parts whose changes are events, and the events between two
//! snapshots. [`between`] is pure.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use millrace_cluster_state::{NodeStatus, PolicyRecord, SchedulingState, SliceRecord};
use millrace_proto::worker::GpuHealth;
use millrace_types::policy::DispatchName;
use millrace_types::{FunctionKey, NodeName, PolicySpec};

use super::event::{Event, Severity};
use crate::fleet::WorkerFleet;
use crate::fleet::readiness::{self, RevisionReadiness};
use crate::leadership::{LeaderStatus, MissingSlices, Shortages};
use crate::raft::Replica;

/// A snapshot of the cluster.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct ObservedCluster {
    /// The leader's id and term.
    pub(super) leader: Option<(u64, u64)>,
    pub(super) voters: BTreeSet<u64>,
    pub(super) nodes: BTreeMap<NodeName, ObservedNode>,
    pub(super) gpus: BTreeMap<(NodeName, u32), ObservedGpu>,
    pub(super) functions: BTreeMap<FunctionKey, ObservedFunction>,
    /// The latest changes of the policy, oldest first.
    pub(super) policies: Vec<Arc<PolicyRecord>>,
    /// The versions of the state and of the fleet from which `functions` was computed.
    /// The shortages from which `functions` was computed.
    seen: (u64, u64),
    short: Shortages,
    missing: MissingSlices,
}

#[derive(Debug, Clone, PartialEq)]
pub(super) struct ObservedNode {
    pub(super) epoch: u64,
    pub(super) status: NodeStatus,
    pub(super) scheduling: SchedulingState,
    /// Whether the node's worker has a stream to this controller.
    pub(super) attached: bool,
    /// The reason why the node's streams break repeatedly; `None` while the streams hold.
    pub(super) stream_break: Option<String>,
}

#[derive(Debug, Clone, PartialEq)]
pub(super) struct ObservedGpu {
    pub(super) health: GpuHealth,
    pub(super) restarts: u64,
}

#[derive(Debug, Clone, PartialEq)]
pub(super) struct ObservedFunction {
    pub(super) revision: u64,
    pub(super) by: String,
    pub(super) readiness: RevisionReadiness,
    /// The GPUs of the function's slices, as "node/gpu".
    pub(super) slices: Vec<String>,
    /// The slices without a GPU, and the reason.
    pub(super) missing: Option<(u32, String)>,
}

impl ObservedCluster {
    /// Takes a snapshot. If nothing changed for functions since `before`, the functions are copied from
    /// `before`.
    pub(super) fn of(
        replica: &Replica,
        fleet: &WorkerFleet,
        outlook: &LeaderStatus,
        before: Option<&Self>,
    ) -> Self {
        let state = replica.state();
        let workers = fleet.workers();
        let seen = (state.version(), fleet.version());
        let short = outlook.shortages();
        let missing = outlook.missing_slices();
        let unchanged =
            before.filter(|before| before.seen == seen && before.short == short && before.missing == missing);
        let nodes = state.nodes().map(|node| {
            let worker = workers.get(&node.name);
            let seen = ObservedNode {
                epoch: node.epoch.0,
                status: node.status,
                scheduling: node.scheduling,
                attached: worker.is_some(),
                stream_break: match worker {
                    Some(worker) => worker.stream_break(fleet.now()).map(|it| it.why.clone()),
                    // The gap between two streams that break is no news, so keep the known reason.
                    None => {
                        let known = before.and_then(|before| before.nodes.get(&node.name));
                        known.and_then(|known| known.stream_break.clone())
                    }
                },
            };
            (node.name.clone(), seen)
        });
        let gpus = workers.values().flat_map(|worker| {
            let telemetry = worker.telemetry();
            let gpus = telemetry.iter().flat_map(|report| &report.gpus);
            let gpu = |it: &millrace_proto::worker::GpuTelemetry| {
                ((worker.name.clone(), it.index), ObservedGpu { health: it.health(), restarts: it.restarts })
            };
            gpus.map(gpu).collect::<Vec<_>>()
        });
        let functions = || {
            let function = |it: &std::sync::Arc<millrace_cluster_state::FunctionRecord>| {
                let latest = it.latest();
                let readiness = readiness::of_revision(&state, it, latest, &workers, &short);
                let revision = latest.number.get();
                let by = latest.created_by.to_string();
                let slices = state.placements_of(&it.key).flat_map(|placement| {
                    let place = |slice: &SliceRecord| format!("{}/{}", placement.node, slice.gpu.0);
                    placement.slices.iter().map(place).collect::<Vec<_>>()
                });
                let slices = slices.collect();
                let missing = missing.get(&it.key).map(|missing| (missing.count, missing.why.to_string()));
                (it.key.clone(), ObservedFunction { revision, by, readiness, slices, missing })
            };
            state.functions().map(function).collect()
        };
        let nodes: BTreeMap<_, _> = nodes.collect();
        let mut gpus: BTreeMap<_, _> = gpus.collect();
        // Keep the last known GPUs of live nodes whose workers are detached for a moment.
        for (at, gpu) in before.iter().flat_map(|before| &before.gpus) {
            if nodes.get(&at.0).is_some_and(|node| node.status == NodeStatus::Live) {
                gpus.entry(at.clone()).or_insert_with(|| gpu.clone());
            }
        }
        let functions = unchanged.map_or_else(functions, |before| before.functions.clone());
        let voters = replica.membership().voter_ids().collect();
        let policies = state.policies().cloned().collect();
        Self { leader: replica.leading(), voters, nodes, gpus, functions, policies, seen, short, missing }
    }
}

impl ObservedCluster {
    fn retired_dispatch(&self) -> Option<DispatchName> {
        self.policies.last()?.spec.dispatch.filter(|dispatch| dispatch.is_retired())
    }

    /// Returns the warning about a stored policy that nodes cannot carry out, if any.
    pub(super) fn policy_warning(&self) -> Option<Event> {
        let dispatch = self.retired_dispatch()?;
        let message = format!(
            "nodes use the default preset, because dispatch {dispatch} is available in the simulator only: choose another with 'millrace policy set --preset NAME --unset dispatch'"
        );
        Some(warning("PolicyRetired", "policy/cluster", message))
    }
}

/// Returns the events between two snapshots.
pub(super) fn between(before: &ObservedCluster, after: &ObservedCluster) -> Vec<Event> {
    let mut events = Vec::new();
    group(before, after, &mut events);
    each(&before.nodes, &after.nodes, |name, was, is| node(name, was, is, &mut events));
    each(&before.gpus, &after.gpus, |(node, index), was, is| {
        if let (Some(was), Some(is)) = (was, is) {
            gpu(&format!("gpu/{node}/{index}"), was, is, &mut events);
        }
    });
    policy(before, after, &mut events);
    if before.retired_dispatch() != after.retired_dispatch() {
        events.extend(after.policy_warning());
    }
    each(&before.functions, &after.functions, |key, was, is| function(key, was, is, &mut events));
    events
}

/// Calls `tell` for each key of either map.
fn each<K: Ord, V>(
    before: &BTreeMap<K, V>,
    after: &BTreeMap<K, V>,
    mut tell: impl FnMut(&K, Option<&V>, Option<&V>),
) {
    for key in before.keys().chain(after.keys().filter(|key| !before.contains_key(key))) {
        tell(key, before.get(key), after.get(key));
    }
}

fn normal(reason: &'static str, object: &str, message: String) -> Event {
    Event { severity: Severity::Normal, reason, object: object.to_owned(), message }
}

fn warning(reason: &'static str, object: &str, message: String) -> Event {
    Event { severity: Severity::Warning, reason, object: object.to_owned(), message }
}

fn group(before: &ObservedCluster, after: &ObservedCluster, events: &mut Vec<Event>) {
    match after.leader {
        leader if leader == before.leader => {}
        Some((id, term)) => {
            events.push(normal("LeaderElected", "cluster", format!("controller {id} leads in term {term}")));
        }
        None => {
            let message = "this controller knows no leader: writes wait; requests are still served";
            events.push(warning("NoLeader", "cluster", message.to_owned()));
        }
    }
    for id in after.voters.difference(&before.voters) {
        events.push(normal(
            "VoterAdded",
            &format!("controller/{id}"),
            "the controller is now a voter".to_owned(),
        ));
    }
    for id in before.voters.difference(&after.voters) {
        events.push(normal(
            "VoterRemoved",
            &format!("controller/{id}"),
            "the controller is no longer a voter".to_owned(),
        ));
    }
}

fn node(name: &NodeName, was: Option<&ObservedNode>, is: Option<&ObservedNode>, events: &mut Vec<Event>) {
    let object = format!("node/{name}");
    let Some(is) = is else {
        return events.push(normal(
            "NodeRemoved",
            &object,
            "the node was removed from the cluster".to_owned(),
        ));
    };
    let lost = |node: &ObservedNode| node.status == NodeStatus::Lost;
    if was.is_none_or(|was| was.epoch < is.epoch) && !lost(is) {
        let again = if was.is_some() { "again, " } else { "" };
        let message = format!("the node registered {again}with epoch {}", is.epoch);
        events.push(normal("NodeRegistered", &object, message));
    } else if lost(is) && was.is_some_and(|was| !lost(was)) {
        let message = "the node stopped, or its lease expired: its functions move to other nodes".to_owned();
        events.push(warning("NodeLost", &object, message));
    }
    match (was.and_then(|was| was.stream_break.as_ref()), &is.stream_break) {
        (None, Some(why)) => {
            let message = format!("the node's stream breaks repeatedly: {why}");
            events.push(warning("StreamBreaks", &object, message));
        }
        (Some(_), None) => {
            events.push(normal("StreamHolds", &object, "the node's stream is stable again".to_owned()))
        }
        (None, None) | (Some(_), Some(_)) => {}
    }
    let Some(was) = was else { return };
    if was.attached && !is.attached && !lost(is) {
        let message = "the node's stream to this controller ended: requests go to other nodes".to_owned();
        events.push(warning("WorkerDetached", &object, message));
    } else if !was.attached && is.attached && was.epoch == is.epoch {
        events.push(normal(
            "WorkerAttached",
            &object,
            "the node has a stream to this controller again".to_owned(),
        ));
    }
    if was.scheduling != is.scheduling {
        let (reason, message) = match is.scheduling {
            SchedulingState::Schedulable => ("NodeUncordoned", "the node gets functions again"),
            SchedulingState::Cordoned => {
                ("NodeCordoned", "the node keeps its functions and gets no new ones")
            }
            SchedulingState::Draining => ("NodeDraining", "the node's functions move to other nodes"),
        };
        events.push(normal(reason, &object, message.to_owned()));
    }
}

/// Adds an event for each policy change since `before`, with the difference from the previous policy.
/// Several changes may lie between two snapshots. If the state no longer stores the policy before a
/// change, the event names the new policy only.
fn policy(before: &ObservedCluster, after: &ObservedCluster, events: &mut Vec<Event>) {
    let seen = before.policies.last().map_or(0, |last| last.generation);
    let was = before.policies.last().map_or(PolicySpec::NONE, |last| last.spec);
    let mut last = (seen, was);
    for change in after.policies.iter().filter(|change| change.generation > seen) {
        let said = match last {
            (generation, was) if generation + 1 == change.generation => difference(&was, &change.spec),
            _ => format!("now {}", change.spec),
        };
        let message = format!("{said}, by {} (change {})", change.changed_by, change.generation);
        events.push(normal("PolicyChanged", "policy/cluster", message));
        last = (change.generation, change.spec);
    }
}

/// Describes the difference, such as "preset fifo -> torpor, batching off -> the preset's".
fn difference(was: &PolicySpec, is: &PolicySpec) -> String {
    let said = |spec: &PolicySpec| spec.settings().into_iter().collect::<BTreeMap<_, _>>();
    let was = said(was);
    let is = said(is);
    let names: BTreeSet<_> = was.keys().chain(is.keys()).copied().collect();
    let shown = |value: Option<&String>| value.map_or("the preset's", String::as_str).to_owned();
    let other = names.into_iter().filter(|name| was.get(name) != is.get(name));
    let told = other.map(|name| format!("{name} {} -> {}", shown(was.get(name)), shown(is.get(name))));
    told.collect::<Vec<_>>().join(", ")
}

fn gpu(object: &str, was: &ObservedGpu, is: &ObservedGpu, events: &mut Vec<Event>) {
    if is.restarts > was.restarts {
        let times = match is.restarts - was.restarts {
            1 => "the GPU's executor died and was restarted".to_owned(),
            times => format!("the GPU's executors died and were restarted {times} times"),
        };
        events.push(warning("ExecutorRestarted", object, format!("{times} ({} so far)", is.restarts)));
    }
    if is.health == GpuHealth::Unhealthy && was.health != is.health {
        let message =
            "the device failed: its executor is being replaced, and other GPUs serve meanwhile".to_owned();
        events.push(warning("GpuUnhealthy", object, message));
    } else if was.health == GpuHealth::Unhealthy && is.health == GpuHealth::Up {
        events.push(normal("GpuRecovered", object, "the GPU serves again".to_owned()));
    }
}

fn function(
    key: &FunctionKey,
    was: Option<&ObservedFunction>,
    is: Option<&ObservedFunction>,
    events: &mut Vec<Event>,
) {
    let object = format!("function/{}/{}", key.tenant, key.name);
    let Some(is) = is else {
        return events.push(normal(
            "FunctionDeleted",
            &object,
            "the function and its revisions were deleted".to_owned(),
        ));
    };
    if was.is_none_or(|was| was.revision != is.revision) {
        let message = format!("revision {} by {}", is.revision, is.by);
        events.push(normal("FunctionApplied", &object, message));
    }
    slices(&object, was, is, events);
    let stands = |it: &ObservedFunction| (it.revision, it.readiness.reason());
    if was.map(stands) == Some(stands(is)) {
        return;
    }
    let was_ready = was.is_some_and(|was| matches!(was.readiness, RevisionReadiness::Prepared(_)));
    let message = is.readiness.message();
    match &is.readiness {
        RevisionReadiness::Prepared(_) => events.push(normal("FunctionReady", &object, message)),
        RevisionReadiness::Preparing if !was_ready => {}
        RevisionReadiness::Disabled => events.push(normal("FunctionUnloaded", &object, message)),
        RevisionReadiness::Preparing
        | RevisionReadiness::PrepareFailed(_)
        | RevisionReadiness::Unplaced(_)
        | RevisionReadiness::Away(_)
        | RevisionReadiness::NoWorker => events.push(warning("FunctionNotReady", &object, message)),
    }
}

/// Reports changes of a function's slices.
fn slices(object: &str, was: Option<&ObservedFunction>, is: &ObservedFunction, events: &mut Vec<Event>) {
    let had = was.map_or(&[][..], |was| &was.slices);
    if had != is.slices {
        let message = match is.slices.len() {
            0 => "the function has no slices any longer".to_owned(),
            1 => format!("one slice, on {}", is.slices[0]),
            count => format!("{count} slices, on {}", is.slices.join(", ")),
        };
        events.push(normal("SlicesChanged", object, message));
    }
    if let Some((count, why)) = &is.missing
        && was.and_then(|was| was.missing.as_ref()) != is.missing.as_ref()
    {
        let slices = if *count == 1 { "one slice has".to_owned() } else { format!("{count} slices have") };
        events.push(warning("SlicesWithoutGpu", object, format!("{slices} no GPU: {why}")));
    }
}

#[cfg(test)]
mod tests {
    use millrace_types::FunctionName;

    use super::*;

    fn name() -> NodeName {
        NodeName::new("w1").unwrap()
    }

    fn with_node(epoch: u64, status: NodeStatus, attached: bool) -> ObservedCluster {
        let scheduling = SchedulingState::Schedulable;
        let node = ObservedNode { epoch, status, scheduling, attached, stream_break: None };
        ObservedCluster { nodes: [(name(), node)].into(), ..ObservedCluster::default() }
    }

    fn with_function(revision: u64, readiness: RevisionReadiness) -> ObservedCluster {
        let key = FunctionKey {
            tenant: millrace_types::TenantName::default(),
            name: FunctionName::new("f").unwrap(),
        };
        let by = "ann".into();
        let function = ObservedFunction { revision, by, readiness, slices: Vec::new(), missing: None };
        ObservedCluster { functions: [(key, function)].into(), ..ObservedCluster::default() }
    }

    fn with_gpu(health: GpuHealth, restarts: u64) -> ObservedCluster {
        ObservedCluster {
            gpus: [((name(), 0), ObservedGpu { health, restarts })].into(),
            ..ObservedCluster::default()
        }
    }

    fn told(before: &ObservedCluster, after: &ObservedCluster) -> Vec<String> {
        between(before, after).iter().map(|event| format!("{} {}", event.reason, event.object)).collect()
    }

    #[test]
    fn a_node_registers_is_lost_and_registers_again() {
        let none = ObservedCluster::default();
        let live = NodeStatus::Live;
        let lost = NodeStatus::Lost;
        let is = with_node(1, live, true);
        assert_eq!(told(&none, &is), ["NodeRegistered node/w1"]);
        assert_eq!(told(&is, &with_node(1, live, false)), ["WorkerDetached node/w1"]);
        assert_eq!(told(&with_node(1, live, false), &is), ["WorkerAttached node/w1"]);
        assert_eq!(told(&with_node(1, live, false), &with_node(1, lost, false)), ["NodeLost node/w1"]);
        assert_eq!(told(&with_node(1, lost, false), &with_node(2, live, true)), ["NodeRegistered node/w1"]);
        // The node was lost and registered again between two snapshots.
        assert_eq!(told(&is, &with_node(3, live, true)), ["NodeRegistered node/w1"]);
        assert_eq!(told(&with_node(3, lost, false), &none), ["NodeRemoved node/w1"]);
        assert_eq!(told(&is, &is), [""; 0]);
    }

    #[test]
    fn repeated_breaks_of_a_stream_yield_one_event() {
        let broken = |why: Option<&str>, attached| {
            let mut picture = with_node(1, NodeStatus::Live, attached);
            picture.nodes.get_mut(&name()).unwrap().stream_break = why.map(str::to_owned);
            picture
        };
        assert_eq!(told(&broken(None, true), &broken(Some("a"), true)), ["StreamBreaks node/w1"]);
        let both = ["NodeRegistered node/w1", "StreamBreaks node/w1"];
        assert_eq!(told(&ObservedCluster::default(), &broken(Some("a"), true)), both);
        assert_eq!(told(&broken(Some("a"), true), &broken(Some("b"), true)), [""; 0]);
        assert_eq!(told(&broken(Some("b"), true), &broken(None, true)), ["StreamHolds node/w1"]);
    }

    #[test]
    fn executor_deaths_between_two_snapshots_are_counted() {
        let up = |restarts| with_gpu(GpuHealth::Up, restarts);
        let events = between(&up(1), &up(4));
        assert_eq!((events[0].reason, events[0].severity), ("ExecutorRestarted", Severity::Warning));
        assert!(events[0].message.contains("3 times (4 so far)"), "{}", events[0].message);
        assert_eq!(told(&up(1), &with_gpu(GpuHealth::Unhealthy, 1)), ["GpuUnhealthy gpu/w1/0"]);
        assert_eq!(told(&with_gpu(GpuHealth::Unhealthy, 1), &up(1)), ["GpuRecovered gpu/w1/0"]);
        // A restarted worker counts from zero.
        assert_eq!(told(&up(4), &up(0)), [""; 0]);
    }

    #[test]
    fn a_function_is_applied_becomes_ready_and_loses_its_workers() {
        let none = ObservedCluster::default();
        let preparing = with_function(1, RevisionReadiness::Preparing);
        let ready = with_function(1, RevisionReadiness::Prepared(2));
        assert_eq!(told(&none, &preparing), ["FunctionApplied function/default/f"]);
        assert_eq!(told(&preparing, &ready), ["FunctionReady function/default/f"]);
        assert_eq!(told(&ready, &with_function(1, RevisionReadiness::Prepared(1))), [""; 0]);
        let away = with_function(1, RevisionReadiness::Away("w1".into()));
        assert_eq!(told(&ready, &away), ["FunctionNotReady function/default/f"]);
        let both = ["FunctionApplied function/default/f", "FunctionReady function/default/f"];
        assert_eq!(told(&preparing, &with_function(2, RevisionReadiness::Prepared(1))), both);
        assert_eq!(told(&ready, &with_function(2, RevisionReadiness::Prepared(2))), both);
        assert_eq!(told(&ready, &preparing), ["FunctionNotReady function/default/f"]);
        assert_eq!(told(&ready, &none), ["FunctionDeleted function/default/f"]);
    }

    #[test]
    fn each_policy_change_yields_an_event_with_its_difference() {
        use millrace_types::policy::Batches;
        let change = |generation, dispatch, batching| {
            Arc::new(PolicyRecord {
                spec: PolicySpec { dispatch, batching, ..PolicySpec::NONE },
                generation,
                resource_version: generation,
                changed_at: millrace_cluster_state::UnixMillis(0),
                changed_by: millrace_cluster_state::CallerName("ann".into()),
            })
        };
        let lalb = change(1, Some(DispatchName::Lalb), None);
        let torpor = change(2, Some(DispatchName::Torpor), Some(Batches::Off));
        let none = change(3, None, Some(Batches::Off));
        let with = |policies: &[&Arc<PolicyRecord>]| ObservedCluster {
            policies: policies.iter().map(|&it| it.clone()).collect(),
            ..ObservedCluster::default()
        };
        let events = between(&with(&[&lalb]), &with(&[&lalb, &torpor, &none]));
        let told: Vec<_> = events.iter().map(|it| (it.reason, it.message.as_str())).collect();
        let expected = [
            ("PolicyChanged", "batching the preset's -> off, dispatch lalb -> torpor, by ann (change 2)"),
            ("PolicyChanged", "dispatch torpor -> the preset's, by ann (change 3)"),
        ];
        assert_eq!(told, expected);
        assert_eq!(between(&with(&[&lalb]), &with(&[&lalb])), []);
        // The state no longer stores the change in between.
        let events = between(&with(&[&lalb]), &with(&[&none]));
        assert_eq!(events[0].message, "now batching off, by ann (change 3)");
        let lb = change(1, Some(DispatchName::Lb), None);
        let warned = with(&[&lb]).policy_warning().unwrap();
        assert_eq!(warned.reason, "PolicyRetired");
        assert!(between(&with(&[]), &with(&[&lb])).contains(&warned));
        assert_eq!(between(&with(&[&lb]), &with(&[&lb])), [], "one warning is enough");
    }

    #[test]
    fn changes_of_leaders_and_voters_yield_events() {
        let led = |leader, voters: &[u64]| ObservedCluster {
            leader,
            voters: voters.iter().copied().collect(),
            ..ObservedCluster::default()
        };
        let one = led(Some((1, 3)), &[1, 2]);
        let two = led(Some((2, 4)), &[2, 3]);
        let all = ["LeaderElected cluster", "VoterAdded controller/3", "VoterRemoved controller/1"];
        assert_eq!(told(&one, &two), all);
        assert_eq!(told(&one, &led(None, &[1, 2])), ["NoLeader cluster"]);
    }
}
