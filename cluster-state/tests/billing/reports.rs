//! Usage reports of registrations, in any order.

use std::collections::BTreeMap;
use std::ops::Bound;
use std::time::Duration;

use millrace_cluster_state::{CommandEffect, State, StateCommand};
use millrace_types::usage::IDLE_MS_COSTS_NS;
use millrace_types::{Epoch, FunctionKey, NodeDelta, SyncBatch, SyncPart, SyncPortion, Usage};
use proptest::prelude::*;

use crate::group::{Group, NODES, named, node};

#[derive(Debug, Clone)]
struct Report {
    node: usize,
    epoch: u64,
    seq: u64,
    part: SyncPart,
    usage: Vec<(&'static str, Usage)>,
}

fn report() -> impl Strategy<Value = Report> {
    let part = prop_oneof![
        3 => Just(SyncPart::Delta),
        2 => Just(SyncPart::Full(SyncPortion::Only)),
        1 => Just(SyncPart::Full(SyncPortion::First)),
        1 => Just(SyncPart::Full(SyncPortion::Last)),
    ];
    let usage = (0u64..50, 0u64..9, 0u64..90).prop_map(|(ms, requests, idle_ms)| Usage {
        gpu_ns: ms * 1_000_000,
        requests,
        idle_ms,
    });
    let usage = prop::collection::vec((prop::sample::select(vec!["f", "g", "never"]), usage), 0..3);
    (0..NODES, 1u64..5, 1u64..9, part, usage).prop_map(|(node, epoch, seq, part, usage)| Report {
        node,
        epoch,
        seq,
        part,
        usage,
    })
}

#[derive(Debug, Clone)]
enum Turn {
    Report(Report),
    /// An earlier report arrives again.
    Again(prop::sample::Index),
    Register(usize),
    Lose(usize),
    Delete(&'static str),
    /// All controllers restart from a snapshot.
    Restart,
}

fn turn() -> impl Strategy<Value = Turn> {
    prop_oneof![
        12 => report().prop_map(Turn::Report),
        4 => any::<prop::sample::Index>().prop_map(Turn::Again),
        3 => (0..NODES).prop_map(Turn::Register),
        1 => (0..NODES).prop_map(Turn::Lose),
        1 => prop::sample::select(vec!["f", "g"]).prop_map(Turn::Delete),
        1 => Just(Turn::Restart),
    ]
}

proptest! {
    /// The bill is the sum, over all registrations, of the largest report that was accepted.
    /// Repeats, older batches and reports of ended registrations change nothing. A bill never
    /// shrinks. The bills of the functions add up to the whole, and so do their charges.
    #[test]
    fn the_bill_is_the_largest_report_of_each_registration(turns in prop::collection::vec(turn(), 0..80)) {
        let mut group = Group::new(&["f", "g"]);
        let mut largest = BTreeMap::<(usize, Epoch, FunctionKey), Usage>::new();
        let mut sent = Vec::<Report>::new();
        for turn in turns {
            let before: BTreeMap<_, _> = group.state.bills(Bound::Unbounded).collect();
            match turn {
                Turn::Register(at) => { group.register(at, Epoch(0)); }
                Turn::Lose(at) => group.lose(at),
                Turn::Delete(name) => {
                    group.propose(StateCommand::DeleteFunction { key: named(name), expected: None }).ok();
                }
                Turn::Restart => group.state = State::decode(&group.state.encode()).unwrap(),
                Turn::Again(_) if sent.is_empty() => {}
                Turn::Report(_) | Turn::Again(_) => {
                    let report = match turn {
                        Turn::Again(index) => index.get(&sent).clone(),
                        Turn::Report(report) => report,
                        _ => continue,
                    };
                    sent.push(report.clone());
                    let Report { node: at, epoch, seq, part, usage } = report;
                    let usage: Vec<_> = usage.into_iter().map(|(name, usage)| (named(name), usage)).collect();
                    let delta = NodeDelta { usage: usage.clone(), ..NodeDelta::default() };
                    let batch = SyncBatch { epoch: Epoch(epoch), seq, part, delta };
                    let taken = group.propose(StateCommand::SyncNode { node: node(at), batch });
                    if let Ok(CommandEffect::Synced { .. }) = taken {
                        for (function, usage) in usage.into_iter().filter(|(it, _)| *it != named("never")) {
                            let known = largest.entry((at, Epoch(epoch), function)).or_default();
                            *known = known.merge(usage);
                        }
                    }
                }
            }
            let bills: BTreeMap<_, _> = group.state.bills(Bound::Unbounded).collect();
            for (account, usage) in &before {
                prop_assert_eq!(bills[account].merge(*usage), bills[account], "a bill never shrinks");
            }
            let of = |name: &str| {
                let reports = largest.iter().filter(|((_, _, function), _)| *function == named(name));
                reports.fold(Usage::NONE, |sum, (_, usage)| sum.plus(*usage))
            };
            prop_assert_eq!(group.state.usage(&named("f")), of("f"));
            prop_assert_eq!(group.state.usage(&named("g")), of("g"));
            let whole = group.charged();
            prop_assert_eq!(bills.values().fold(Usage::NONE, |sum, usage| sum.plus(*usage)), whole);
            let charges: Duration = bills.values().map(|usage| usage.charge()).sum();
            prop_assert_eq!(charges, whole.charge());
            let invoice = whole.gpu_ns + whole.idle_ms * IDLE_MS_COSTS_NS;
            prop_assert_eq!(u128::from(invoice), whole.charge().as_nanos(), "1.0 * busy + 0.1 * idle");
        }
    }
}
