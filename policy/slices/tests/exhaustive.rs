//! All orders of six events of small GPUs with four slices: first an idle GPU, then one on which all runs asked.
//! The executor model checks each token.
#![allow(clippy::unwrap_used)]

mod support;

use std::time::Duration;

use millrace_slices::tokens::{Config, QuotaCap, TokenOrder};
use millrace_slices::units::Grid;
use millrace_types::Terms;
use support::{Executor, millis, terms};

const TOKEN: Duration = Duration::from_millis(5);
const EVENTS_MAX: u32 = 6;

/// Tries each next event: an idle seat asks, a waiting run leaves, a token is used up or is the run's last.
fn explore(executor: &Executor, depth: u32, seen: &mut u64) {
    *seen += 1;
    wants_are_served(executor);
    if depth == EVENTS_MAX {
        return all_units_come_back(executor.clone());
    }
    for seat in 0..executor.seats.len() {
        let has_run = executor.seats[seat].run.is_some();
        let holds = executor.seats[seat].present.is_some();
        let branch = |act: fn(&mut Executor, usize)| {
            let mut next = executor.clone();
            next.now = next.now + Duration::from_millis(1);
            act(&mut next, seat);
            next
        };
        if !has_run {
            explore(&branch(|it, seat| it.ask(seat)), depth + 1, seen);
        } else if holds {
            explore(&branch(|it, seat| it.give_back(seat, true)), depth + 1, seen);
            explore(&branch(|it, seat| it.give_back(seat, false)), depth + 1, seen);
            if executor.seats[seat].ahead.is_none() {
                explore(&branch(|it, seat| it.ask(seat)), depth + 1, seen);
            }
        } else {
            explore(&branch(|it, seat| it.leave(seat)), depth + 1, seen);
        }
    }
}

/// Checks that some run computes while any run wants to: no order of events blocks the GPU.
fn wants_are_served(executor: &Executor) {
    let wants = executor.seats.iter().any(|seat| seat.run.is_some());
    let computes = executor.seats.iter().any(|seat| seat.present.is_some());
    assert_eq!(wants, computes, "{:?}", executor.seats);
}

fn all_units_come_back(mut executor: Executor) {
    (0..executor.seats.len()).for_each(|seat| executor.leave(seat));
    assert!(executor.has_room(executor.config.grid().total()));
    assert_eq!(executor.core.next_wake(), None);
}

fn check(order: TokenOrder, grid: Grid, slices: &[Terms]) {
    let config = Config::new(grid, TOKEN, order, QuotaCap::Window(millis(1000))).unwrap();
    let idle = Executor::new(config, slices);
    let mut busy = idle.clone();
    (0..slices.len()).for_each(|seat| busy.ask(seat));
    for start in [idle, busy] {
        let mut seen = 0;
        explore(&start, 0, &mut seen);
        assert!(seen > 1000, "{seen} states");
    }
}

const ORDERS: [TokenOrder; 3] =
    [TokenOrder::Head, TokenOrder::Skip { age: Duration::from_millis(3) }, TokenOrder::Turns];

#[test]
fn every_order_of_six_events_over_four_slices_is_safe_with_blocks() {
    let slices = [terms(1000, 300, 1000), terms(500, 400, 1000), terms(250, 0, 1000), terms(120, 900, 1000)];
    for order in ORDERS {
        check(order, Grid::Blocks16, &slices);
    }
}

#[test]
fn every_order_of_six_events_over_four_slices_is_safe_with_percentages() {
    let slices = [terms(600, 300, 1000), terms(500, 400, 1000), terms(240, 0, 1000), terms(600, 100, 1000)];
    for order in ORDERS {
        check(order, Grid::Caps100, &slices);
    }
}
