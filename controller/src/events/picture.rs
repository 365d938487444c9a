//! The cluster at one moment, as far as its changes are events, and what changed between two moments.
//! [`between`] is pure.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use millrace_cluster_state::{NodeStatus, Policy, Scheduling};
use millrace_proto::worker::GpuHealth;
use millrace_types::policy::DispatchName;
use millrace_types::{FunctionKey, NodeName, PolicySpec};

use super::{Event, Severity};
use crate::fleet::Fleet;
use crate::fleet::readiness::{self, Readiness};
use crate::leader::{Outlook, Shortages};
use crate::raft::Replica;

/// The cluster at one moment.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Picture {
    /// Who leads, and in which term.
    pub(super) leader: Option<(u64, u64)>,
    pub(super) voters: BTreeSet<u64>,
    pub(super) nodes: BTreeMap<NodeName, Node>,
    pub(super) gpus: BTreeMap<(NodeName, u32), Gpu>,
    pub(super) functions: BTreeMap<FunctionKey, Function>,
    /// The last changes of the policy, the oldest first.
    pub(super) policies: Vec<Arc<Policy>>,
    /// Which state and fleet the functions are from, and what was short then.
    seen: (u64, u64),
    short: Shortages,
}

#[derive(Debug, Clone, PartialEq)]
pub(super) struct Node {
    pub(super) epoch: u64,
    pub(super) status: NodeStatus,
    pub(super) scheduling: Scheduling,
    /// Whether this controller has its stream.
    pub(super) attached: bool,
    /// The reason for which streams of the node break again and again; `None`: they hold.
    pub(super) stream_break: Option<String>,
}

#[derive(Debug, Clone, PartialEq)]
pub(super) struct Gpu {
    pub(super) health: GpuHealth,
    pub(super) restarts: u64,
}

#[derive(Debug, Clone, PartialEq)]
pub(super) struct Function {
    pub(super) revision: u64,
    pub(super) by: String,
    pub(super) readiness: Readiness,
}

impl Picture {
    /// The cluster now; functions as they were before where nothing changed for them since.
    pub(super) fn of(replica: &Replica, fleet: &Fleet, outlook: &Outlook, before: Option<&Self>) -> Self {
        let (state, workers) = (replica.state(), fleet.workers());
        let (seen, short) = ((state.version(), fleet.version()), outlook.shortages());
        let unchanged = before.filter(|before| before.seen == seen && before.short == short);
        let nodes = state.nodes().map(|node| {
            let worker = workers.get(&node.name);
            let seen = Node {
                epoch: node.epoch.0,
                status: node.status,
                scheduling: node.scheduling,
                attached: worker.is_some(),
                stream_break: match worker {
                    Some(worker) => worker.stream_break(fleet.now()).map(|it| it.why.clone()),
                    // Between two streams that break nothing is news.
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
                ((worker.name.clone(), it.index), Gpu { health: it.health(), restarts: it.restarts })
            };
            gpus.map(gpu).collect::<Vec<_>>()
        });
        let functions = || {
            let function = |it: &std::sync::Arc<millrace_cluster_state::Function>| {
                let latest = it.latest();
                let readiness = readiness::of_revision(&state, it, latest, &workers, &short);
                let (revision, by) = (latest.number.get(), latest.created_by.to_string());
                (it.key.clone(), Function { revision, by, readiness })
            };
            state.functions().map(function).collect()
        };
        let nodes: BTreeMap<_, _> = nodes.collect();
        let mut gpus: BTreeMap<_, _> = gpus.collect();
        // What was last heard of the GPUs of those that are away for a moment.
        for (at, gpu) in before.iter().flat_map(|before| &before.gpus) {
            if nodes.get(&at.0).is_some_and(|node| node.status == NodeStatus::Live) {
                gpus.entry(at.clone()).or_insert_with(|| gpu.clone());
            }
        }
        let functions = unchanged.map_or_else(functions, |before| before.functions.clone());
        let voters = replica.membership().voter_ids().collect();
        let policies = state.policies().cloned().collect();
        Self { leader: replica.leading(), voters, nodes, gpus, functions, policies, seen, short }
    }
}

impl Picture {
    fn retired_dispatch(&self) -> Option<DispatchName> {
        self.policies.last()?.spec.dispatch.filter(|dispatch| dispatch.is_retired())
    }

    /// The warning about a stored policy that nodes cannot carry out, if there is one.
    pub(super) fn policy_warning(&self) -> Option<Event> {
        let dispatch = self.retired_dispatch()?;
        let message = format!(
            "nodes use the default preset, because dispatch {dispatch} is in the simulator only: choose another with 'millrace policy set --preset'"
        );
        Some(warning("PolicyRetired", "policy/cluster", message))
    }
}

/// What happened between two moments.
pub(super) fn between(before: &Picture, after: &Picture) -> Vec<Event> {
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

/// Tells of each that was or is there.
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

fn group(before: &Picture, after: &Picture, events: &mut Vec<Event>) {
    match after.leader {
        leader if leader == before.leader => {}
        Some((id, term)) => {
            events.push(normal("LeaderElected", "cluster", format!("controller {id} leads in term {term}")));
        }
        None => {
            let message = "nobody leads that this controller knows of: writes wait; serving goes on";
            events.push(warning("NoLeader", "cluster", message.to_owned()));
        }
    }
    for id in after.voters.difference(&before.voters) {
        events.push(normal("VoterAdded", &format!("controller/{id}"), "it votes from now on".to_owned()));
    }
    for id in before.voters.difference(&after.voters) {
        events.push(normal("VoterRemoved", &format!("controller/{id}"), "it votes no more".to_owned()));
    }
}

fn node(name: &NodeName, was: Option<&Node>, is: Option<&Node>, events: &mut Vec<Event>) {
    let object = format!("node/{name}");
    let Some(is) = is else {
        return events.push(normal("NodeRemoved", &object, "it was forgotten".to_owned()));
    };
    let lost = |node: &Node| node.status == NodeStatus::Lost;
    if was.is_none_or(|was| was.epoch < is.epoch) && !lost(is) {
        let again = if was.is_some() { "again, " } else { "" };
        let message = format!("it was taken in {again}with epoch {}", is.epoch);
        events.push(normal("NodeRegistered", &object, message));
    } else if lost(is) && was.is_some_and(|was| !lost(was)) {
        let message = "it was silent for its lease: its functions go elsewhere".to_owned();
        events.push(warning("NodeLost", &object, message));
    }
    match (was.and_then(|was| was.stream_break.as_ref()), &is.stream_break) {
        (None, Some(why)) => {
            let message = format!("its stream breaks again and again: {why}");
            events.push(warning("StreamBreaks", &object, message));
        }
        (Some(_), None) => events.push(normal("StreamHolds", &object, "its stream holds again".to_owned())),
        (None, None) | (Some(_), Some(_)) => {}
    }
    let Some(was) = was else { return };
    if was.attached && !is.attached && !lost(is) {
        let message = "its stream to this controller ended: requests go to others".to_owned();
        events.push(warning("WorkerDetached", &object, message));
    } else if !was.attached && is.attached && was.epoch == is.epoch {
        events.push(normal("WorkerAttached", &object, "this controller has its stream".to_owned()));
    }
    if was.scheduling != is.scheduling {
        let (reason, message) = match is.scheduling {
            Scheduling::Schedulable => ("NodeUncordoned", "it gets functions again"),
            Scheduling::Cordoned => ("NodeCordoned", "it keeps what it has and gets nothing new"),
            Scheduling::Draining => ("NodeDraining", "what it has moves elsewhere"),
        };
        events.push(normal(reason, &object, message.to_owned()));
    }
}

/// Each change since, with what it was before: several may lie between two looks, and so many that what
/// was before the first that is kept is not known.
fn policy(before: &Picture, after: &Picture, events: &mut Vec<Event>) {
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
    let (was, is) = (said(was), said(is));
    let names: BTreeSet<_> = was.keys().chain(is.keys()).copied().collect();
    let shown = |value: Option<&String>| value.map_or("the preset's", String::as_str).to_owned();
    let other = names.into_iter().filter(|name| was.get(name) != is.get(name));
    let told = other.map(|name| format!("{name} {} -> {}", shown(was.get(name)), shown(is.get(name))));
    told.collect::<Vec<_>>().join(", ")
}

fn gpu(object: &str, was: &Gpu, is: &Gpu, events: &mut Vec<Event>) {
    if is.restarts > was.restarts {
        let times = match is.restarts - was.restarts {
            1 => "its executor died and was started again".to_owned(),
            times => format!("its executors died and were started again, {times} times"),
        };
        events.push(warning("ExecutorRestarted", object, format!("{times} ({} so far)", is.restarts)));
    }
    if is.health == GpuHealth::Unhealthy && was.health != is.health {
        let message = "the device failed: its executor is replaced, and others serve meanwhile".to_owned();
        events.push(warning("GpuUnhealthy", object, message));
    } else if was.health == GpuHealth::Unhealthy && is.health == GpuHealth::Up {
        events.push(normal("GpuRecovered", object, "it serves again".to_owned()));
    }
}

fn function(key: &FunctionKey, was: Option<&Function>, is: Option<&Function>, events: &mut Vec<Event>) {
    let object = format!("function/{}/{}", key.tenant, key.name);
    let Some(is) = is else {
        return events.push(normal("FunctionDeleted", &object, "it and its revisions are gone".to_owned()));
    };
    if was.is_none_or(|was| was.revision != is.revision) {
        let message = format!("revision {} by {}", is.revision, is.by);
        events.push(normal("FunctionApplied", &object, message));
    }
    let stands = |it: &Function| (it.revision, it.readiness.reason());
    if was.map(stands) == Some(stands(is)) {
        return;
    }
    let was_ready = was.is_some_and(|was| matches!(was.readiness, Readiness::Prepared(_)));
    let message = is.readiness.message();
    match &is.readiness {
        Readiness::Prepared(_) => events.push(normal("FunctionReady", &object, message)),
        Readiness::Preparing if !was_ready => {}
        Readiness::Disabled => events.push(normal("FunctionUnloaded", &object, message)),
        Readiness::Preparing
        | Readiness::PrepareFailed(_)
        | Readiness::Unplaced(_)
        | Readiness::Away(_)
        | Readiness::NoWorker => events.push(warning("FunctionNotReady", &object, message)),
    }
}

#[cfg(test)]
mod tests {
    use millrace_types::FunctionName;

    use super::*;

    fn name() -> NodeName {
        NodeName::new("w1").unwrap()
    }

    fn with_node(epoch: u64, status: NodeStatus, attached: bool) -> Picture {
        let scheduling = Scheduling::Schedulable;
        let node = Node { epoch, status, scheduling, attached, stream_break: None };
        Picture { nodes: [(name(), node)].into(), ..Picture::default() }
    }

    fn with_function(revision: u64, readiness: Readiness) -> Picture {
        let key = FunctionKey {
            tenant: millrace_types::TenantName::default(),
            name: FunctionName::new("f").unwrap(),
        };
        let function = Function { revision, by: "ann".into(), readiness };
        Picture { functions: [(key, function)].into(), ..Picture::default() }
    }

    fn with_gpu(health: GpuHealth, restarts: u64) -> Picture {
        Picture { gpus: [((name(), 0), Gpu { health, restarts })].into(), ..Picture::default() }
    }

    fn told(before: &Picture, after: &Picture) -> Vec<String> {
        between(before, after).iter().map(|event| format!("{} {}", event.reason, event.object)).collect()
    }

    #[test]
    fn a_node_comes_is_lost_and_comes_back() {
        let none = Picture::default();
        let (live, lost) = (NodeStatus::Live, NodeStatus::Lost);
        let is = with_node(1, live, true);
        assert_eq!(told(&none, &is), ["NodeRegistered node/w1"]);
        assert_eq!(told(&is, &with_node(1, live, false)), ["WorkerDetached node/w1"]);
        assert_eq!(told(&with_node(1, live, false), &is), ["WorkerAttached node/w1"]);
        assert_eq!(told(&with_node(1, live, false), &with_node(1, lost, false)), ["NodeLost node/w1"]);
        assert_eq!(told(&with_node(1, lost, false), &with_node(2, live, true)), ["NodeRegistered node/w1"]);
        // Between two looks it was lost and taken in again.
        assert_eq!(told(&is, &with_node(3, live, true)), ["NodeRegistered node/w1"]);
        assert_eq!(told(&with_node(3, lost, false), &none), ["NodeRemoved node/w1"]);
        assert_eq!(told(&is, &is), [""; 0]);
    }

    #[test]
    fn a_stream_that_breaks_again_and_again_is_told_once() {
        let broken = |why: Option<&str>, attached| {
            let mut picture = with_node(1, NodeStatus::Live, attached);
            picture.nodes.get_mut(&name()).unwrap().stream_break = why.map(str::to_owned);
            picture
        };
        assert_eq!(told(&broken(None, true), &broken(Some("a"), true)), ["StreamBreaks node/w1"]);
        let both = ["NodeRegistered node/w1", "StreamBreaks node/w1"];
        assert_eq!(told(&Picture::default(), &broken(Some("a"), true)), both);
        assert_eq!(told(&broken(Some("a"), true), &broken(Some("b"), true)), [""; 0]);
        assert_eq!(told(&broken(Some("b"), true), &broken(None, true)), ["StreamHolds node/w1"]);
    }

    #[test]
    fn executors_that_died_between_two_looks_are_counted() {
        let up = |restarts| with_gpu(GpuHealth::Up, restarts);
        let events = between(&up(1), &up(4));
        assert_eq!((events[0].reason, events[0].severity), ("ExecutorRestarted", Severity::Warning));
        assert!(events[0].message.contains("3 times (4 so far)"), "{}", events[0].message);
        assert_eq!(told(&up(1), &with_gpu(GpuHealth::Unhealthy, 1)), ["GpuUnhealthy gpu/w1/0"]);
        assert_eq!(told(&with_gpu(GpuHealth::Unhealthy, 1), &up(1)), ["GpuRecovered gpu/w1/0"]);
        // A worker that began anew counts anew.
        assert_eq!(told(&up(4), &up(0)), [""; 0]);
    }

    #[test]
    fn a_function_is_applied_gets_ready_and_loses_its_workers() {
        let none = Picture::default();
        let preparing = with_function(1, Readiness::Preparing);
        let ready = with_function(1, Readiness::Prepared(2));
        assert_eq!(told(&none, &preparing), ["FunctionApplied function/default/f"]);
        assert_eq!(told(&preparing, &ready), ["FunctionReady function/default/f"]);
        assert_eq!(told(&ready, &with_function(1, Readiness::Prepared(1))), [""; 0]);
        let away = with_function(1, Readiness::Away("w1".into()));
        assert_eq!(told(&ready, &away), ["FunctionNotReady function/default/f"]);
        let both = ["FunctionApplied function/default/f", "FunctionReady function/default/f"];
        assert_eq!(told(&preparing, &with_function(2, Readiness::Prepared(1))), both);
        assert_eq!(told(&ready, &with_function(2, Readiness::Prepared(2))), both);
        assert_eq!(told(&ready, &preparing), ["FunctionNotReady function/default/f"]);
        assert_eq!(told(&ready, &none), ["FunctionDeleted function/default/f"]);
    }

    #[test]
    fn every_change_of_the_policy_is_told_with_what_was_before() {
        use millrace_types::policy::Batches;
        let change = |generation, dispatch, batching| {
            Arc::new(Policy {
                spec: PolicySpec { dispatch, batching, ..PolicySpec::NONE },
                generation,
                resource_version: generation,
                changed_at: millrace_cluster_state::UnixMillis(0),
                changed_by: millrace_cluster_state::Caller("ann".into()),
            })
        };
        let lalb = change(1, Some(DispatchName::Lalb), None);
        let torpor = change(2, Some(DispatchName::Torpor), Some(Batches::Off));
        let none = change(3, None, Some(Batches::Off));
        let with = |policies: &[&Arc<Policy>]| Picture {
            policies: policies.iter().map(|&it| it.clone()).collect(),
            ..Picture::default()
        };
        let events = between(&with(&[&lalb]), &with(&[&lalb, &torpor, &none]));
        let told: Vec<_> = events.iter().map(|it| (it.reason, it.message.as_str())).collect();
        let expected = [
            ("PolicyChanged", "batching the preset's -> off, dispatch lalb -> torpor, by ann (change 2)"),
            ("PolicyChanged", "dispatch torpor -> the preset's, by ann (change 3)"),
        ];
        assert_eq!(told, expected);
        assert_eq!(between(&with(&[&lalb]), &with(&[&lalb])), []);
        // What was between is not kept any more.
        let events = between(&with(&[&lalb]), &with(&[&none]));
        assert_eq!(events[0].message, "now batching off, by ann (change 3)");
        let lb = change(1, Some(DispatchName::Lb), None);
        let warned = with(&[&lb]).policy_warning().unwrap();
        assert_eq!(warned.reason, "PolicyRetired");
        assert!(between(&with(&[]), &with(&[&lb])).contains(&warned));
        assert_eq!(between(&with(&[&lb]), &with(&[&lb])), [], "one warning is enough");
    }

    #[test]
    fn leaders_and_voters_come_and_go() {
        let led = |leader, voters: &[u64]| Picture {
            leader,
            voters: voters.iter().copied().collect(),
            ..Picture::default()
        };
        let (one, two) = (led(Some((1, 3)), &[1, 2]), led(Some((2, 4)), &[2, 3]));
        let all = ["LeaderElected cluster", "VoterAdded controller/3", "VoterRemoved controller/1"];
        assert_eq!(told(&one, &two), all);
        assert_eq!(told(&one, &led(None, &[1, 2])), ["NoLeader cluster"]);
    }
}
