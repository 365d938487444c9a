//! Activity of functions and links, summed over the counters of all gateways and workers.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::Arc;
use std::time::Duration;

use millrace_gateway::activity;
use millrace_proto::activity::{Activity, FunctionActivity, LatencyBucket};
use millrace_proto::admin as api;
use millrace_proto::decoding::{WalkLimits, decode};
use millrace_proto::pages::PageBudget;
use millrace_proto::parts::bound_activity;
use millrace_proto::worker::GetActivityRequest;
use millrace_types::{Failure, FunctionKey, Reason};
use prost::Message;

use super::fanout::{ASK_TIMEOUT, PeerAnswer, PeerFanout};
use crate::fleet::AttachedWorker;
use crate::raft::PeerClient;

/// Functions in a response if the request gives no number, and the largest number that a request may
/// give.
const FUNCTIONS_DEFAULT: usize = 100;
const FUNCTIONS_MAX: usize = 1_000;

/// The sources of activity: this process and all peers. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Activities {
    pub(crate) own: GatewayActivity,
    pub(crate) everyone: PeerFanout,
}

/// The activity counters of this controller's gateway.
#[derive(Debug, Clone, Default)]
pub(crate) struct GatewayActivity {
    pub(crate) counts: activity::Activity,
    /// A unique name of the process; a later process of the same controller has another name.
    pub(crate) process: String,
}

impl Activities {
    /// Returns the summed activity of all processes.
    pub(crate) async fn gather(&self, request: &api::GetActivityRequest) -> api::GetActivityResponse {
        let tenant = request.tenant.as_str();
        let controller = |peer: PeerClient| async move {
            let told: Vec<u8> = peer
                .call(ASK_TIMEOUT, &tenant, async |mut it, message| it.get_activity(message).await)
                .await?;
            decode::<Activity>(told.into(), WalkLimits::PEER)
                .map_err(|error| Failure::new(Reason::Internal, format!("controller {}: {error}", peer.id())))
        };
        let worker = |worker: Arc<AttachedWorker>| async move {
            let request = GetActivityRequest { tenant: tenant.to_owned() };
            worker.calls.get_activity(tonic::Request::new(request)).await
        };
        let mut given = self.everyone.ask(controller, worker).await;
        given.push(Ok(self.own.told(tenant)));
        let max = match request.functions_max {
            0 => FUNCTIONS_DEFAULT,
            max => (max as usize).min(FUNCTIONS_MAX),
        };
        put_together(given, &request.tenant, max)
    }
}

impl GatewayActivity {
    /// Returns this process's counts for the functions of `tenant`, or of all tenants if `tenant` is
    /// empty.
    pub(super) fn told(&self, tenant: &str) -> Activity {
        let function = |(key, it): (FunctionKey, activity::FunctionActivity)| {
            let bucket = |(up_to_seconds, count)| LatencyBucket { up_to_seconds, count };
            FunctionActivity {
                tenant: key.tenant.to_string(),
                function: key.name.to_string(),
                answered: it.answered,
                failed: it.failed,
                latencies: it.latencies.into_iter().map(bucket).collect(),
                slo_requests: it.score.n,
                slo_in_time: it.score.m,
                ..FunctionActivity::default()
            }
        };
        let mut activity = Activity {
            functions: self.counts.functions().into_iter().map(function).collect(),
            processes: vec![self.process.clone()],
            ..Activity::default()
        };
        bound_activity(&mut activity, tenant);
        activity
    }
}

fn put_together(
    given: impl IntoIterator<Item = PeerAnswer<Activity>>,
    tenant: &str,
    max: usize,
) -> api::GetActivityResponse {
    let mut functions = BTreeMap::new();
    let mut links = Vec::new();
    let mut processes = Vec::new();
    let mut missing = Vec::new();
    // A lower bound on the functions that no process named: the left-out functions of two processes may
    // be the same.
    let mut unnamed = 0;
    for part in given {
        match part {
            Ok(part) => {
                unnamed = part.functions_left_out.max(unnamed);
                links.extend(part.links);
                processes.extend(part.processes);
                let wanted = part.functions.into_iter().filter(|it| tenant.is_empty() || it.tenant == tenant);
                for it in wanted {
                    match functions.entry((it.tenant.clone(), it.function.clone())) {
                        Entry::Vacant(entry) => {
                            entry.insert(it);
                        }
                        Entry::Occupied(mut entry) => add(entry.get_mut(), it),
                    }
                }
            }
            Err(why) => missing.push(why),
        }
    }
    processes.sort();
    links.sort_by(|a, b| (&a.node, a.link).cmp(&(&b.node, b.link)));
    let mut functions: Vec<_> = functions.into_values().collect();
    let left_out = keep_busiest(&mut functions, max);
    let links_fit = fitting(&links);
    if links_fit < links.len() {
        missing.push(format!("{} links: they do not fit into the response", links.len() - links_fit));
        links.truncate(links_fit);
    }
    api::GetActivityResponse {
        activity: Some(Activity { functions, links, processes, functions_left_out: 0 }),
        functions_left_out: left_out.saturating_add(unnamed),
        missing,
    }
}

/// Keeps the busiest functions, at most `max` and at most a page, in order. Returns the number of
/// dropped functions.
fn keep_busiest(functions: &mut Vec<FunctionActivity>, max: usize) -> u32 {
    let all = functions.len();
    if all <= max && fitting(functions) == all {
        return 0;
    }
    functions.sort_by_key(|it| Reverse((it.answered + it.failed, it.in_flight)));
    functions.truncate(max.min(fitting(functions)));
    functions.sort_by(|a, b| (&a.tenant, &a.function).cmp(&(&b.tenant, &b.function)));
    u32::try_from(all - functions.len()).unwrap_or(u32::MAX)
}

/// Returns how many of the first items fit into a page.
fn fitting<M: Message>(items: &[M]) -> usize {
    let mut room = PageBudget::default();
    items.iter().take_while(|item| room.take(*item)).count()
}

fn add(sum: &mut FunctionActivity, other: FunctionActivity) {
    sum.answered += other.answered;
    sum.failed += other.failed;
    sum.in_flight += other.in_flight;
    sum.slo_requests += other.slo_requests;
    sum.slo_in_time += other.slo_in_time;
    let time = |it: &FunctionActivity| -> Duration {
        it.gpu_time.and_then(|it| it.try_into().ok()).unwrap_or_default()
    };
    sum.gpu_time = (time(sum) + time(&other)).try_into().ok();
    for LatencyBucket { up_to_seconds, count } in other.latencies {
        match sum.latencies.binary_search_by(|it| it.up_to_seconds.total_cmp(&up_to_seconds)) {
            Ok(at) => sum.latencies[at].count += count,
            Err(at) => sum.latencies.insert(at, LatencyBucket { up_to_seconds, count }),
        }
    }
}

#[cfg(test)]
mod tests {
    use millrace_proto::activity::LinkActivity;
    use millrace_types::limits::ANSWER_BYTES_MAX;

    use super::*;

    fn function(name: &str, answered: u64, latencies: &[(f64, u64)]) -> FunctionActivity {
        let bucket = |&(up_to_seconds, count): &(f64, u64)| LatencyBucket { up_to_seconds, count };
        FunctionActivity {
            tenant: "t".into(),
            function: name.into(),
            answered,
            latencies: latencies.iter().map(bucket).collect(),
            ..FunctionActivity::default()
        }
    }

    fn told(functions: Vec<FunctionActivity>) -> PeerAnswer<Activity> {
        Ok(Activity { functions, ..Activity::default() })
    }

    #[test]
    fn activity_of_gateways_and_workers_is_added_up() {
        let ms = |ms| Duration::from_millis(ms).try_into().ok();
        let worker = |in_flight, gpu_ms| FunctionActivity {
            in_flight,
            slo_requests: 2,
            slo_in_time: 1,
            gpu_time: ms(gpu_ms),
            ..function("a", 0, &[])
        };
        let links = ["n1", "n0"].map(|node| LinkActivity { node: node.into(), ..LinkActivity::default() });
        let given = [
            told(vec![function("a", 3, &[(0.5, 1), (2.0, 2)])]),
            told(vec![function("a", 4, &[(0.5, 1), (1.0, 3)]), function("b", 1, &[])]),
            Err("worker-2: no answer within 1s".to_owned()),
            Ok(Activity {
                functions: vec![worker(1, 700)],
                links: links.into(),
                processes: vec!["w".into()],
                ..Activity::default()
            }),
            told(vec![worker(2, 600)]),
        ];
        let answer = put_together(given, "", 10);
        let activity = answer.activity.unwrap();
        let a = FunctionActivity {
            in_flight: 3,
            slo_requests: 4,
            slo_in_time: 2,
            gpu_time: ms(1300),
            ..function("a", 7, &[(0.5, 2), (1.0, 3), (2.0, 2)])
        };
        let b = FunctionActivity { gpu_time: None, ..function("b", 1, &[]) };
        assert_eq!(activity.functions, [a, b]);
        assert_eq!(activity.links.iter().map(|it| it.node.as_str()).collect::<Vec<_>>(), ["n0", "n1"]);
        assert_eq!((answer.missing.len(), answer.functions_left_out), (1, 0));
        assert_eq!(activity.processes, ["w"]);
    }

    #[test]
    fn the_busiest_functions_are_returned_when_there_are_too_many() {
        let given = [told((0..5).map(|i| function(&format!("f{i}"), (i * 7) % 5, &[])).collect())];
        let answer = put_together(given, "", 2);
        let names: Vec<_> = answer.activity.unwrap().functions.into_iter().map(|it| it.function).collect();
        assert_eq!(names, ["f2", "f4"], "of 0, 2, 4, 1, 3");
        assert_eq!(answer.functions_left_out, 3);
    }

    #[test]
    fn a_response_has_the_busiest_functions_and_the_links_that_fit() {
        let latencies: Vec<_> = (0..82).map(|n| (f64::from(n), 1 << 40)).collect();
        let functions = (0..5_000).map(|i| function(&format!("f{i:0>60}"), i, &latencies)).collect();
        let links = vec![LinkActivity { name: "x".repeat(1_000), ..LinkActivity::default() }; 2_000];
        let answer = put_together([Ok(Activity { functions, links, ..Activity::default() })], "", 10_000);
        assert!(answer.encoded_len() < ANSWER_BYTES_MAX, "{} bytes", answer.encoded_len());
        let Activity { functions, links, .. } = answer.activity.unwrap();
        assert!(functions.iter().all(|it| it.answered >= u64::from(answer.functions_left_out)));
        assert_eq!(functions.len() + answer.functions_left_out as usize, 5_000);
        assert_eq!(
            answer.missing,
            [format!("{} links: they do not fit into the response", 2_000 - links.len())]
        );
    }

    #[test]
    fn functions_of_another_tenant_are_left_out() {
        let answer = put_together([told(vec![function("a", 1, &[])])], "other", 2);
        assert!(answer.activity.unwrap().functions.is_empty());
    }
}
