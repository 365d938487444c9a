//! The checks whether hostile clients harmed a cluster: its processes, its leader, its other
//! clients, the memory and descriptors of its servers, and the time until all is as before.
//! Pure: readings in, checks out.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::healthy::ALLOWANCE;
use crate::history::{RequestRecord, RequestResult};
use crate::hostile::{AttackSummary, SHARE, attack_names, share_of};
use crate::report::PromiseCheck;
use crate::timeline::seconds;

/// Maximum memory of a server in bytes: the default byte budget of its requests, and an allowance.
pub const MEMORY_MAX: u64 = BUDGET + BESIDE;
const BUDGET: u64 = 1 << 30;
const BESIDE: u64 = 512 * MIB;
/// Maximum memory that a server may keep after the attack, in bytes above the memory before.
const KEPT_MEMORY_MAX: u64 = 128 * MIB;
/// Maximum number of descriptors that a server may keep after the attack: connections of clients
/// come and go.
const KEPT_DESCRIPTORS_MAX: u64 = 64;
/// Descriptors of a server besides its clients' connections: files that are open for a moment.
const OWN_DESCRIPTORS: u64 = 64;
/// Maximum ratio of the latency under attack to the latency of the control run.
const SLOWER_MAX: u32 = 2;
/// The stated maximum time without an acknowledged write, and without an answer: a part of an
/// attack's turn.
const GOES_ON_WITHIN: Duration = Duration::from_secs(1);
/// The stated time until the cluster is as before the attack.
pub const NORMAL_WITHIN: Duration = Duration::from_secs(10);
/// The share of a processor by which attackers may exceed their own share.
const SHARE_SLACK: f64 = 0.05;
const MIB: u64 = 1 << 20;

/// The memory and descriptors of a server.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ServerUsage {
    /// Maximum resident bytes since the start of the run.
    pub peak: u64,
    /// Resident bytes of private memory.
    pub private: u64,
    /// Number of open descriptors.
    pub descriptors: u64,
}

/// The state of a cluster at a time.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ClusterReading {
    /// Time since the start of the timeline.
    pub at: Duration,
    /// Running controllers and workers, by name.
    pub servers: BTreeMap<String, ServerUsage>,
    /// Processes that ran at the start of the run and have ended, executors included.
    pub ended: BTreeSet<String>,
    /// The id and term of the leader, if the cluster reported them.
    pub leader: Option<(u64, u64)>,
}

/// Judges whether every process kept running.
#[must_use]
pub fn processes(run: &str, readings: &[ClusterReading]) -> PromiseCheck {
    let mut evidence = Vec::new();
    let mut known = BTreeSet::new();
    for reading in readings {
        for name in reading.ended.iter().filter(|&name| known.insert(name)) {
            evidence.push(format!("{name} had ended at {}", seconds(reading.at)));
        }
    }
    if readings.is_empty() {
        evidence.push("no reading was taken".to_owned());
    }
    PromiseCheck::of(format!("{run}: no process ends"), format!("{} looks", readings.len()), evidence)
}

/// Judges whether the same controller led in the same term throughout. A term never falls, so the
/// first and the last reading alone reveal any election between them.
#[must_use]
pub fn leaders(run: &str, readings: &[ClusterReading]) -> PromiseCheck {
    let told: Vec<_> = readings.iter().filter_map(|it| Some((it.at, it.leader?))).collect();
    let mut evidence = Vec::new();
    for (&(_, (was, old)), &(at, (is, new))) in told.iter().zip(told.iter().skip(1)) {
        if (was, old) != (is, new) {
            let at = seconds(at);
            evidence.push(format!("at {at} controller {is} leads in term {new}, {was} in term {old} before"));
        }
    }
    if readings.first().is_none_or(|it| it.leader.is_none()) {
        evidence.push("the leader before the attack is not known".to_owned());
    }
    if readings.last().is_none_or(|it| it.leader.is_none()) {
        evidence.push("the leader after the attack is not known".to_owned());
    }
    let detail = match told.first() {
        Some((_, (id, term))) => {
            format!("controller {id}, term {term}, in {} of {} looks", told.len(), readings.len())
        }
        None => "the cluster reported no leader".to_owned(),
    };
    PromiseCheck::of(format!("{run}: no leader changes"), detail, evidence)
}

/// Judges the memory of servers.
#[must_use]
pub fn memory(run: &str, readings: &[ClusterReading]) -> PromiseCheck {
    let peaks = most(readings, |server| server.peak);
    let over = |(name, &peak): (&String, &u64)| {
        (peak > MEMORY_MAX).then(|| format!("{name} took {} MiB", peak / MIB))
    };
    let evidence = peaks.iter().filter_map(over).collect();
    let each: Vec<_> = peaks.iter().map(|(name, peak)| format!("{name} {}", peak / MIB)).collect();
    let detail = format!("at most {} MiB each; MiB: {}", MEMORY_MAX / MIB, each.join(", "));
    PromiseCheck::of(format!("{run}: memory is within the budget + {} MiB", BESIDE / MIB), detail, evidence)
}

/// Judges the descriptors of servers. `connections` is the maximum number of connections that each
/// server accepts. The first reading is from before the attack.
#[must_use]
pub fn descriptors(
    run: &str,
    readings: &[ClusterReading],
    connections: &BTreeMap<String, u64>,
) -> PromiseCheck {
    let before = readings.first().map(|it| it.servers.clone()).unwrap_or_default();
    let most = most(readings, |server| server.descriptors);
    let mut evidence = Vec::new();
    let mut each = Vec::new();
    for (name, &most) in &most {
        let own = before.get(name).map_or(0, |server| server.descriptors);
        let bound = own + connections.get(name).copied().unwrap_or(0) + OWN_DESCRIPTORS;
        each.push(format!("{name} {most} of {bound}"));
        if most > bound {
            evidence.push(format!("{name} had {most} descriptors, {own} of them before the attack"));
        }
    }
    PromiseCheck::of(format!("{run}: descriptors are within the bound"), each.join(", "), evidence)
}

/// Returns the maximum of a figure over all readings, by server.
fn most(readings: &[ClusterReading], of: impl Fn(&ServerUsage) -> u64) -> BTreeMap<String, u64> {
    let mut most: BTreeMap<String, u64> = BTreeMap::new();
    for (name, server) in readings.iter().flat_map(|reading| &reading.servers) {
        let own = most.entry(name.clone()).or_default();
        *own = (*own).max(of(server));
    }
    most
}

/// Returns the first difference from the reading before the attack, beyond the allowed remainders.
#[must_use]
pub fn not_as_before(before: &ClusterReading, now: &ClusterReading) -> Option<String> {
    if let Some(name) = now.ended.first() {
        return Some(format!("{name} has ended"));
    }
    for (name, was) in &before.servers {
        let Some(is) = now.servers.get(name) else { return Some(format!("{name} has ended")) };
        if is.private > was.private + KEPT_MEMORY_MAX {
            let now_mib = is.private / MIB;
            let before_mib = was.private / MIB;
            return Some(format!("{name} has {now_mib} MiB of its own, {before_mib} before"));
        }
        if is.descriptors > was.descriptors + KEPT_DESCRIPTORS_MAX {
            return Some(format!("{name} has {} descriptors, {} before", is.descriptors, was.descriptors));
        }
    }
    now.leader.is_none().then(|| "no controller leads".to_owned())
}

/// Judges the time until all was as before, or fails with the reason for the difference.
#[must_use]
pub fn normal(run: &str, took: Result<Duration, String>) -> PromiseCheck {
    let limit = NORMAL_WITHIN * ALLOWANCE;
    let name = format!("{run}: all is as before soon after");
    let stated = format!("stated {}, fails beyond {}", seconds(NORMAL_WITHIN), seconds(limit));
    match took {
        Ok(took) => {
            let late = (took > limit).then(|| format!("it took {}", seconds(took)));
            PromiseCheck::of(name, format!("after {}; {stated}", seconds(took)), late.into_iter().collect())
        }
        Err(why) => PromiseCheck::fail(name, stated, vec![why]),
    }
}

/// Judges the requests of other clients: none may be lost, and none may need a retry.
#[must_use]
pub fn unharmed(run: &str, requests: &[RequestRecord]) -> PromiseCheck {
    let harm = |request: &RequestRecord| match &request.how {
        RequestResult::Right => request.retried.last().map(|why| request.line(&format!("retried: {why}"))),
        RequestResult::Wrong(why) => Some(request.line(&format!("answered wrong: {why}"))),
        RequestResult::Refused(why) | RequestResult::GivenUp(why) => {
            Some(request.line(&format!("lost: {why}")))
        }
    };
    let mut evidence: Vec<_> = requests.iter().filter_map(harm).collect();
    let detail = format!("{} of {} requests harmed", evidence.len(), requests.len());
    if requests.is_empty() {
        evidence.push("no request was made".to_owned());
    }
    PromiseCheck::of(format!("{run}: no other client's request is lost or fails"), detail, evidence)
}

/// Latencies of requests, by kind of client.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ClientLatencies {
    /// Latencies over connections that were open before.
    pub kept: Vec<Duration>,
    /// Latencies over a new connection for each request.
    pub new: Vec<Duration>,
}

impl ClientLatencies {
    fn p99(&self) -> Duration {
        let both: Vec<_> = self.kept.iter().chain(&self.new).copied().collect();
        p99(&both)
    }
}

/// Judges the latency of other clients against that of the control run.
#[must_use]
pub fn latency(run: &str, control: &ClientLatencies, attacked: &ClientLatencies) -> PromiseCheck {
    let usual = control.p99();
    let now = attacked.p99();
    let pair = |of: &dyn Fn(&ClientLatencies) -> Duration| {
        format!("{}, control {}", millis(of(attacked)), millis(of(control)))
    };
    let detail = format!(
        "p99 {} ({} requests; over kept connections {}; over new ones {})",
        pair(&ClientLatencies::p99),
        attacked.kept.len() + attacked.new.len(),
        pair(&|it| p99(&it.kept)),
        pair(&|it| p99(&it.new)),
    );
    let mut evidence = Vec::new();
    if usual.is_zero() {
        evidence.push("no request was answered in the control run".to_owned());
    }
    if now.is_zero() {
        evidence.push("no request was answered under attack".to_owned());
    }
    if now > usual * SLOWER_MAX {
        evidence.push(format!("{} is more than {SLOWER_MAX} times {}", millis(now), millis(usual)));
    }
    PromiseCheck::of(format!("{run}: the others' p99 is at most twice the control's"), detail, evidence)
}

/// Judges whether writes or requests went on: the latency of each, and the longest time without an
/// answer.
#[must_use]
pub fn goes_on(name: String, took: &[Duration], gap_max: Duration) -> PromiseCheck {
    let limit = GOES_ON_WITHIN * ALLOWANCE;
    let detail = format!(
        "{} answered, p99 {}; longest gap {}, stated {}, fails beyond {}",
        took.len(),
        millis(p99(took)),
        seconds(gap_max),
        seconds(GOES_ON_WITHIN),
        seconds(limit)
    );
    let mut evidence = Vec::new();
    if took.is_empty() {
        evidence.push("no call was answered".to_owned());
    }
    if gap_max > limit {
        evidence.push(format!("no call was answered for {}", seconds(gap_max)));
    }
    PromiseCheck::of(name, detail, evidence)
}

/// Judges the harness itself: attackers kept to their share, and every attack reached a server.
#[must_use]
pub fn attackers(run: &str, control: &AttackSummary, done: &AttackSummary) -> PromiseCheck {
    let share =
        |it: &AttackSummary| share_of(Duration::from_millis(it.used_ms), Duration::from_millis(it.passed_ms));
    let control = share(control);
    let own = share(done);
    let mut evidence = Vec::new();
    if own > SHARE + SHARE_SLACK {
        evidence.push(format!("attackers took {own:.2} of a processor"));
    }
    if own + SHARE_SLACK < control {
        evidence.push(format!("attackers took less than the control: {own:.2} of a processor"));
    }
    for name in attack_names() {
        if done.attacks.get(name).is_none_or(|counts| counts.connections == 0) {
            evidence.push(format!("{name}: no connection was made"));
        }
    }
    let sum = |of: fn(&crate::hostile::AttackCounts) -> u64| done.attacks.values().map(of).sum::<u64>();
    let detail = format!(
        "{own:.2} of a processor, the control {control:.2}; at most {} ms beyond it at once; {} connections, {} not accepted, {} requests and streams, {} MiB",
        done.overdraft_ms,
        sum(|it| it.connections),
        sum(|it| it.unconnected),
        sum(|it| it.sent),
        sum(|it| it.bytes) / MIB
    );
    PromiseCheck::of(format!("{run}: attackers keep to half a processor"), detail, evidence)
}

/// Returns the 99th percentile, or zero if there is no value.
pub(crate) fn p99(took: &[Duration]) -> Duration {
    let mut sorted = took.to_vec();
    sorted.sort_unstable();
    let index = (sorted.len() * 99).div_ceil(100).saturating_sub(1);
    sorted.get(index).copied().unwrap_or_default()
}

/// Formats a latency in milliseconds.
pub(crate) fn millis(span: Duration) -> String {
    format!("{:.1} ms", span.as_secs_f64() * 1e3)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::history::requests::request;
    use crate::hostile::AttackCounts;
    use crate::report::CheckVerdict;

    const RUN: &str = "attacked";

    fn reading(at: u64, change: impl FnOnce(&mut ClusterReading)) -> ClusterReading {
        let server = ServerUsage { peak: 100 * MIB, private: 50 * MIB, descriptors: 40 };
        let servers = ["controller 1", "worker-1"].map(|name| (name.to_owned(), server));
        let mut reading = ClusterReading {
            at: Duration::from_secs(at),
            servers: servers.into(),
            leader: Some((1, 3)),
            ..ClusterReading::default()
        };
        change(&mut reading);
        reading
    }

    fn readings(change: impl FnOnce(&mut ClusterReading)) -> Vec<ClusterReading> {
        vec![reading(1, |_| {}), reading(2, change), reading(3, |_| {})]
    }

    fn controller(reading: &mut ClusterReading) -> &mut ServerUsage {
        reading.servers.get_mut("controller 1").unwrap()
    }

    #[test]
    fn a_cluster_without_harm_passes() {
        let all = readings(|_| {});
        let bounds = BTreeMap::from([("controller 1".to_owned(), 2_048)]);
        let checks =
            [processes(RUN, &all), leaders(RUN, &all), memory(RUN, &all), descriptors(RUN, &all, &bounds)];
        for check in checks {
            assert_eq!(check.verdict, CheckVerdict::Pass, "{check:?}");
        }
    }

    #[test]
    fn a_process_that_ended_fails_and_is_named_once() {
        let mut all = readings(|it| it.ended = ["controller 2".to_owned()].into());
        all[2].ended.insert("controller 2".to_owned());
        let check = processes(RUN, &all);
        assert_eq!(
            (check.verdict, check.evidence),
            (CheckVerdict::Fail, vec!["controller 2 had ended at 2.00 s".to_owned()])
        );
        assert_eq!(processes(RUN, &[]).verdict, CheckVerdict::Fail);
    }

    #[test]
    fn a_change_of_term_or_leader_fails_and_a_reading_without_leader_passes() {
        assert_eq!(leaders(RUN, &readings(|it| it.leader = None)).verdict, CheckVerdict::Pass);
        for other in [(1, 4), (2, 4)] {
            assert_eq!(leaders(RUN, &readings(|it| it.leader = Some(other))).verdict, CheckVerdict::Fail);
        }
        let silent_after = [reading(1, |_| {}), reading(2, |it| it.leader = None)];
        assert_eq!(leaders(RUN, &silent_after).verdict, CheckVerdict::Fail);
    }

    #[test]
    fn memory_and_descriptors_beyond_the_bound_fail() {
        let peak = |bytes| memory(RUN, &readings(|it| controller(it).peak = bytes)).verdict;
        assert_eq!((peak(MEMORY_MAX), peak(MEMORY_MAX + 1)), (CheckVerdict::Pass, CheckVerdict::Fail));
        let bounds = BTreeMap::from([("controller 1".to_owned(), 2_048)]);
        let open =
            |count| descriptors(RUN, &readings(|it| controller(it).descriptors = count), &bounds).verdict;
        assert_eq!((open(2_152), open(2_153)), (CheckVerdict::Pass, CheckVerdict::Fail));
    }

    #[test]
    fn memory_and_descriptors_kept_after_an_attack_fail() {
        let before = reading(1, |_| {});
        let kept = |change: fn(&mut ClusterReading)| not_as_before(&before, &reading(9, change));
        assert_eq!(kept(|it| controller(it).private += KEPT_MEMORY_MAX), None);
        assert!(kept(|it| controller(it).private += KEPT_MEMORY_MAX + 1).unwrap().contains("MiB"));
        assert!(kept(|it| controller(it).descriptors += 65).unwrap().contains("descriptors"));
        assert!(kept(|it| it.servers.retain(|name, _| name != "worker-1")).unwrap().contains("worker-1"));
        assert!(kept(|it| it.leader = None).is_some());
        let verdict = |took| normal(RUN, took).verdict;
        assert_eq!(verdict(Ok(Duration::from_secs(50))), CheckVerdict::Pass);
        assert_eq!(verdict(Ok(Duration::from_secs(51))), CheckVerdict::Fail);
        assert_eq!(verdict(Err("no controller leads".to_owned())), CheckVerdict::Fail);
    }

    #[test]
    fn a_lost_or_retried_request_fails() {
        let verdict = |requests: &[RequestRecord]| unharmed(RUN, requests).verdict;
        assert_eq!(verdict(&[request(RequestResult::Right, &[])]), CheckVerdict::Pass);
        for how in [
            RequestResult::Refused("no".into()),
            RequestResult::GivenUp("late".into()),
            RequestResult::Wrong("other".into()),
        ] {
            assert_eq!(verdict(&[request(RequestResult::Right, &[]), request(how, &[])]), CheckVerdict::Fail);
        }
        assert_eq!(
            verdict(&[request(RequestResult::Right, &["CONNECTION_LOST: reset"])]),
            CheckVerdict::Fail
        );
        assert_eq!(verdict(&[]), CheckVerdict::Fail);
    }

    #[test]
    fn a_p99_of_more_than_twice_the_controls_fails() {
        let ms = Duration::from_millis;
        let of =
            |slow| ClientLatencies { kept: vec![ms(5); 97], new: [vec![ms(6)], vec![ms(slow); 2]].concat() };
        let verdict =
            |control: &ClientLatencies, attacked: &ClientLatencies| latency(RUN, control, attacked).verdict;
        assert_eq!(verdict(&of(20), &of(40)), CheckVerdict::Pass);
        assert_eq!(verdict(&of(20), &of(41)), CheckVerdict::Fail);
        assert_eq!(verdict(&of(20), &ClientLatencies::default()), CheckVerdict::Fail);
        assert_eq!(verdict(&ClientLatencies::default(), &of(1)), CheckVerdict::Fail);
        let said = latency(RUN, &of(20), &of(40)).detail;
        assert!(
            said.starts_with("p99 40.0 ms, control 20.0 ms (100 requests; over kept connections 5.0 ms"),
            "{said}"
        );
    }

    #[test]
    fn a_gap_beyond_the_allowance_fails() {
        let took = [Duration::from_millis(20)];
        let verdict =
            |took: &[Duration], gap| goes_on(RUN.to_owned(), took, Duration::from_secs(gap)).verdict;
        assert_eq!((verdict(&took, 5), verdict(&took, 6)), (CheckVerdict::Pass, CheckVerdict::Fail));
        assert_eq!(verdict(&[], 1), CheckVerdict::Fail);
    }

    #[test]
    fn attackers_off_their_share_or_without_connections_fail() {
        let control = AttackSummary { used_ms: 500, passed_ms: 1_000, ..AttackSummary::default() };
        let done = |used_ms, connections| {
            let counts = AttackCounts { connections, ..AttackCounts::default() };
            let attacks = attack_names().map(|name| (name.to_owned(), counts)).collect();
            AttackSummary { used_ms, passed_ms: 1_000, attacks, ..AttackSummary::default() }
        };
        let verdict = |done: &AttackSummary| attackers(RUN, &control, done).verdict;
        assert_eq!(verdict(&done(500, 1)), CheckVerdict::Pass);
        assert_eq!(verdict(&done(400, 1)), CheckVerdict::Fail);
        let mut one_missing = done(500, 1);
        one_missing.attacks.pop_first();
        assert_eq!(verdict(&one_missing), CheckVerdict::Fail);
        assert_eq!(verdict(&done(600, 1)), CheckVerdict::Fail);
        assert_eq!(verdict(&done(500, 0)), CheckVerdict::Fail);
        assert_eq!(verdict(&AttackSummary::default()), CheckVerdict::Fail);
    }
}
