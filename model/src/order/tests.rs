use std::collections::HashSet;

use proptest::prelude::*;

use super::*;

const BLOCK: u64 = 16;

fn order(bytes: u64) -> ReadOrder {
    ReadOrder::unknown(bytes, NonZeroU64::new(BLOCK).unwrap())
}

/// The reads of each launch of a run.
type Reads = Vec<Vec<Range<u64>>>;

/// Performs a run. Returns the wait of each launch, and the new order.
fn run(order: &mut ReadOrder, reads: &Reads) -> (Vec<LaunchWait>, Option<Vec<Range<u64>>>) {
    let mut trace = order.begin();
    let waits = reads.iter().map(|reads| order.on_launch(&mut trace, reads)).collect();
    (waits, order.end(trace))
}

/// Simulates a swap and a run: blocks arrive in the copy order, as late as the launches' waits allow.
/// Returns a digest of all bytes that the launches read, with zeros for bytes that have not arrived.
fn swap(order: &mut ReadOrder, memory: &[u8], reads: &Reads) -> (u64, Vec<LaunchWait>) {
    let mut arrived = vec![0; memory.len()];
    let mut coming = order.copy_order().into_iter().flatten();
    let mut here = HashSet::new();
    let mut trace = order.begin();
    let mut digest = 0u64;
    let mut waits = Vec::new();
    for reads in reads {
        let wait = order.on_launch(&mut trace, reads);
        waits.push(wait);
        let wanted: Vec<u64> = match wait {
            LaunchWait::Everything => (0..memory.len() as u64).collect(),
            LaunchWait::Reads => reads.iter().cloned().flatten().collect(),
        };
        while !wanted.iter().all(|byte| here.contains(byte)) {
            let byte = coming.next().expect("the copy order covers all memory");
            arrived[byte as usize] = memory[byte as usize];
            here.insert(byte);
        }
        for byte in reads.iter().cloned().flatten() {
            digest = digest.wrapping_mul(31).wrapping_add(u64::from(arrived[byte as usize]));
        }
    }
    order.end(trace);
    (digest, waits)
}

fn computed(memory: &[u8], reads: &Reads) -> u64 {
    let bytes = reads.iter().flatten().cloned().flatten();
    bytes.fold(0u64, |digest, byte| digest.wrapping_mul(31).wrapping_add(u64::from(memory[byte as usize])))
}

#[test]
fn the_first_run_waits_for_all_memory_and_the_second_only_for_its_reads() {
    let mut order = order(100);
    let reads = vec![vec![64..80], vec![0..10, 70..75], vec![], vec![32..64]];
    assert_eq!(order.copy_order(), std::slice::from_ref(&(0..100)));
    let recorded = vec![64..80, 0..16, 32..64, 16..32, 80..100];
    assert_eq!(run(&mut order, &reads), (vec![LaunchWait::Everything; 4], Some(recorded.clone())));
    assert_eq!(run(&mut order, &reads), (vec![LaunchWait::Reads; 4], None));
    assert_eq!(order.copy_order(), recorded);
}

#[test]
fn reading_less_or_later_than_recorded_is_not_unexpected() {
    let mut order = order(64);
    run(&mut order, &vec![vec![0..16], vec![16..48]]);
    assert_eq!(run(&mut order, &vec![vec![], vec![0..16]]), (vec![LaunchWait::Reads; 2], None));
}

#[test]
fn a_read_earlier_than_recorded_waits_for_everything_and_moves_its_block_forward() {
    let mut order = order(64);
    run(&mut order, &vec![vec![0..16], vec![16..32], vec![48..64]]);
    let early = vec![vec![0..16], vec![48..64], vec![16..32]];
    let (waits, recorded) = run(&mut order, &early);
    assert_eq!(waits, [LaunchWait::Reads, LaunchWait::Everything, LaunchWait::Everything]);
    // The first behaviour read block 1 in launch 1, so the block stays there.
    assert_eq!(recorded, Some(vec![0..16, 48..64, 16..48]));
    assert_eq!(run(&mut order, &early), (vec![LaunchWait::Reads; 3], None));
    assert_eq!(run(&mut order, &vec![vec![0..16], vec![16..32], vec![48..64]]).0, [LaunchWait::Reads; 3]);
}

#[test]
fn a_run_that_is_not_ended_records_nothing() {
    let order = order(64);
    let mut trace = order.begin();
    order.on_launch(&mut trace, std::slice::from_ref(&(0..64)));
    assert!(!order.is_recorded());
}

const BYTES: u64 = 200;

fn reads() -> impl Strategy<Value = Reads> {
    let range = (0..BYTES, 0..64u64).prop_map(|(start, len)| start..(start + len).min(BYTES));
    prop::collection::vec(prop::collection::vec(range, 0..4), 1..8)
}

proptest! {
    #[test]
    fn all_memory_is_copied_exactly_once_under_any_record(runs in prop::collection::vec(reads(), 0..4)) {
        let mut order = order(BYTES);
        runs.iter().for_each(|reads| { run(&mut order, reads); });
        let mut bytes: Vec<u64> = order.copy_order().into_iter().flatten().collect();
        bytes.sort_unstable();
        prop_assert_eq!(bytes, (0..BYTES).collect::<Vec<_>>());
    }

    #[test]
    fn a_repeated_run_is_not_recorded_again(reads in reads()) {
        let mut order = order(BYTES);
        run(&mut order, &reads);
        let before = order.clone();
        let mut trace = order.begin();
        for reads in &reads {
            prop_assert_eq!(order.on_launch(&mut trace, reads), LaunchWait::Reads);
            prop_assert!(trace.recording.is_none());
        }
        prop_assert_eq!(order.end(trace), None);
        prop_assert_eq!(order, before);
    }

    /// In any order of the launches, before and after: no launch reads bytes that have not arrived.
    #[test]
    fn any_permutation_of_the_launches_reads_only_bytes_that_have_arrived(
        (first, later) in reads().prop_flat_map(|reads| (Just(reads.clone()), Just(reads).prop_shuffle())),
        memory in prop::collection::vec(any::<u8>(), BYTES as usize),
    ) {
        let mut order = order(BYTES);
        for reads in [&first, &later, &first, &later] {
            prop_assert_eq!(swap(&mut order, &memory, reads).0, computed(&memory, reads));
        }
        // Both orders are recorded by now.
        for reads in [&later, &first] {
            prop_assert!(swap(&mut order, &memory, reads).1.iter().all(|wait| *wait == LaunchWait::Reads));
        }
    }

    /// Launches wait for everything from the straying launch on, and not before. The same run is
    /// expected the next time.
    #[test]
    fn an_unexpected_read_waits_for_everything_computes_the_same_and_is_recorded(
        reads in reads(), stray in 0..BYTES, at in any::<prop::sample::Index>(),
        memory in prop::collection::vec(any::<u8>(), BYTES as usize),
    ) {
        let mut order = order(BYTES);
        run(&mut order, &reads);
        let at = at.index(reads.len());
        let mut other = reads.clone();
        other[at].push(stray..stray + 1);
        let block = (stray / BLOCK) as usize;
        let strays = order.record.as_ref().unwrap().first_use[block] > at as u32;
        let (digest, waits) = swap(&mut order, &memory, &other);
        prop_assert_eq!(digest, computed(&memory, &other));
        for (launch, wait) in waits.into_iter().enumerate() {
            let due = if strays && launch >= at { LaunchWait::Everything } else { LaunchWait::Reads };
            prop_assert_eq!(wait, due, "launch {}", launch);
        }
        prop_assert!(run(&mut order, &other).0.iter().all(|wait| *wait == LaunchWait::Reads));
    }

    /// A program that switches between several behaviours is recorded a bounded number of times.
    #[test]
    fn a_program_with_several_behaviours_settles(ways in prop::collection::vec(reads(), 1..4)) {
        let mut order = order(BYTES);
        for _ in 0..2 {
            ways.iter().for_each(|reads| { run(&mut order, reads); });
        }
        for reads in &ways {
            prop_assert_eq!(run(&mut order, reads).1, None);
        }
    }
}

#[test]
fn first_reads_restore_the_record_in_another_process() {
    let mut order = order(100);
    assert_eq!(order.first_reads(), Vec::<Vec<Range<u64>>>::new());
    run(&mut order, &vec![vec![], vec![64..80, 0..20], vec![0..40], vec![]]);
    let told = order.first_reads();
    let first: Reads = vec![vec![], vec![64..80, 0..32], vec![32..48]];
    assert_eq!(told, first);
    assert_eq!(ReadOrder::recorded(100, order.block, &told), Some(order.clone()));
    for outside in [0..101, Range { start: 20, end: 10 }] {
        assert_eq!(ReadOrder::recorded(100, order.block, &[vec![outside]]), None);
    }
}

proptest! {
    /// A process that records from scratch does not erase the older record.
    #[test]
    fn merged_records_of_two_processes_cover_the_runs_of_both(first in reads(), second in reads()) {
        let mut both = order(BYTES);
        let mut one = order(BYTES);
        let mut other = order(BYTES);
        for reads in [&first, &second] {
            run(&mut both, reads);
        }
        run(&mut one, &first);
        run(&mut other, &second);
        let merged = other.merge_older(&one);
        // Neither run is unexpected, just as if a single process had performed both.
        for order in [merged.clone(), both] {
            for reads in [&first, &second] {
                prop_assert_eq!(run(&mut order.clone(), reads).1, None);
            }
        }
        prop_assert_eq!(merged.clone().merge_older(&one).merge_older(&merged), merged.clone());
        prop_assert_eq!(one.clone().merge_older(&order(BYTES)), one.clone());
        prop_assert_eq!(order(BYTES).merge_older(&one), one);
    }
}
