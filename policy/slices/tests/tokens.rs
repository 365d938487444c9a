//! Properties of the token core under random runs. The executor model checks each token: units are disjoint, a
//! run holds one token and at most one ahead.
#![allow(clippy::unwrap_used)]

mod support;

use std::time::Duration;

use millrace_slices::dry_run;
use millrace_slices::tokens::{Action, Config, Event, QuotaCap, TokenHolder, TokenId, TokenOrder};
use millrace_slices::units::Grid;
use millrace_types::{Permille, SliceId, Terms, Timestamp};
use proptest::prelude::*;
use support::{Executor, millis, share, terms};

const TOKEN: Duration = Duration::from_millis(5);
const SECOND: Duration = Duration::from_secs(1);
/// An age that no run reaches in a test.
const NEVER: Duration = Duration::from_secs(3600);

/// A step of a random run.
#[derive(Debug, Clone, Copy)]
enum Step {
    Ask(usize),
    GiveBack(usize, bool),
    Leave(usize),
    Advance(u16),
}

fn steps(length: usize) -> impl Strategy<Value = Vec<Step>> {
    let seat = any::<usize>();
    let step = prop_oneof![
        4 => seat.prop_map(Step::Ask),
        1 => (seat, any::<bool>()).prop_map(|(seat, more)| Step::GiveBack(seat, more)),
        1 => seat.prop_map(Step::Leave),
        4 => (0_u16..20_000).prop_map(Step::Advance),
    ];
    prop::collection::vec(step, 1..length)
}

fn partitions(limit: impl Strategy<Value = u16>) -> impl Strategy<Value = Terms> {
    let sms = prop::sample::select(vec![60, 120, 240, 500, 600, 1000]);
    (sms, 0_u16..=1000, limit).prop_map(|(sms, request, limit)| terms(sms, request.min(limit), limit))
}

fn grids() -> impl Strategy<Value = Grid> {
    prop::sample::select(vec![Grid::Blocks16, Grid::Caps100])
}

fn caps() -> impl Strategy<Value = QuotaCap> {
    prop::sample::select(vec![QuotaCap::Window(SECOND), QuotaCap::Bucket(SECOND)])
}

fn orders() -> impl Strategy<Value = TokenOrder> {
    prop::sample::select(vec![
        TokenOrder::Head,
        TokenOrder::Skip { age: millis(40) },
        TokenOrder::Skip { age: NEVER },
        TokenOrder::Turns,
    ])
}

/// Carries out the steps. `check` sees the executor after each.
fn carry_out(executor: &mut Executor, steps: &[Step], mut check: impl FnMut(&Executor)) {
    let seats = executor.seats.len();
    for step in steps {
        match *step {
            Step::Ask(seat) => executor.ask(seat % seats),
            Step::GiveBack(seat, more) => executor.give_back(seat % seats, more),
            Step::Leave(seat) => executor.leave(seat % seats),
            Step::Advance(micros) => executor.advance(Duration::from_micros(u64::from(micros))),
        }
        check(executor);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    /// I1, I5 and I6: the executor model checks each token; a run on the whole GPU fits after all others left.
    #[test]
    fn units_are_disjoint_and_come_back_once(
        slices in prop::collection::vec(partitions(1_u16..=1000), 1..7),
        grid in grids(), order in orders(), cap in caps(), steps in steps(80),
    ) {
        let config = Config::new(grid, TOKEN, order, cap).unwrap();
        let mut executor = Executor::new(config, &slices);
        executor.add_seat(0);
        carry_out(&mut executor, &steps, |_| {});
        (0..executor.seats.len()).for_each(|seat| executor.leave(seat));
        let whole = SliceId(99);
        executor.send(vec![Event::Terms { slice: whole, terms: terms(1000, 0, 1000) }]);
        executor.seats[0].slice = whole;
        executor.ask(0);
        prop_assert!(executor.seats[0].present.is_some_and(|held| held.on.units() == grid.total()));
    }

    /// I2, the limit: under a window no slice computes longer than its limit and one token in any window.
    #[test]
    fn no_slice_exceeds_its_limit_by_more_than_a_token(
        slices in prop::collection::vec(partitions(1_u16..=990), 1..6),
        grid in grids(), order in orders(), cap in caps(), steps in steps(160),
    ) {
        let config = Config::new(grid, TOKEN, order, cap).unwrap();
        let mut executor = Executor::new(config, &slices);
        carry_out(&mut executor, &steps, |_| {});
        executor.advance(SECOND);
        for (seat, terms) in slices.iter().enumerate() {
            let mut from = Timestamp::ZERO;
            while from < executor.now {
                let computed = executor.computed(seat, from, from + SECOND);
                let burst = match cap {
                    QuotaCap::Window(_) => Duration::ZERO,
                    QuotaCap::Bucket(burst) => terms.limit().of(burst),
                };
                let bound = terms.limit().of(SECOND) + burst + TOKEN;
                prop_assert!(computed <= bound, "{seat} computed {computed:?} from {from:?}, limit {}", terms.limit());
                from = from + SECOND;
            }
        }
    }

    /// I3: no run waits beside units on which it fits, unless the units are kept for a slice with a request
    /// that does not fit yet.
    #[test]
    fn no_run_waits_beside_free_units(
        slices in prop::collection::vec(partitions(Just(1000)), 1..7), grid in grids(), steps in steps(80),
    ) {
        let order = TokenOrder::Skip { age: NEVER };
        let config = Config::new(grid, TOKEN, order, QuotaCap::Bucket(SECOND)).unwrap();
        let mut executor = Executor::new(config, &slices);
        carry_out(&mut executor, &steps, |executor| {
            let fits = |terms: &Terms| executor.has_room(grid.units(terms.least()));
            let seats = executor.seats.iter().zip(&slices);
            let mut waiting = seats.filter(|(seat, _)| seat.run.is_some() && seat.present.is_none());
            let kept = waiting.clone().any(|(_, terms)| terms.request() > Permille::ZERO && !fits(terms));
            assert!(kept || !waiting.any(|(_, terms)| fits(terms)), "{:?}", executor.seats);
        });
    }

    /// I4: a run waits no longer than the age, and a token for each run that may be older.
    #[test]
    fn no_run_is_skipped_for_longer_than_the_age(
        slices in prop::collection::vec(partitions(Just(1000)), 1..7), grid in grids(), steps in steps(120),
    ) {
        let age = millis(40);
        let config = Config::new(grid, TOKEN, TokenOrder::Skip { age }, QuotaCap::Bucket(SECOND)).unwrap();
        let mut executor = Executor::new(config, &slices);
        let bound = age + TOKEN * (slices.len() as u32 + 1);
        carry_out(&mut executor, &steps, |executor| {
            for seat in &executor.seats {
                let waited = seat.waits_since.map_or(Duration::ZERO, |since| executor.now.since(since));
                assert!(waited <= bound, "{seat:?} waited {waited:?}");
            }
        });
    }
}

/// Slices that the dry run admits, each with a pattern of periods in which it wants to run.
fn admitted(config: Config, wanted: &[Terms]) -> Vec<Terms> {
    let mut admitted: Vec<Terms> = Vec::new();
    for terms in wanted {
        admitted.push(*terms);
        if dry_run::shortfall(config, &admitted) > Duration::ZERO {
            admitted.pop();
        }
    }
    admitted
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    /// I2, the request: a slice of an admitted set that wants to run for a whole window gets its request, but for
    /// two tokens, whatever the other slices do. One token is the wait for another run's token; the other is the
    /// rounding of a request that is no multiple of a token.
    #[test]
    fn an_admitted_slice_gets_its_request_while_neighbours_come_and_go(
        wanted in prop::collection::vec(partitions(Just(1000)), 2..10),
        toggles in prop::collection::vec((any::<usize>(), 1_u32..120), 1..60),
    ) {
        let config = Config::new(
            Grid::Blocks16, TOKEN, TokenOrder::Skip { age: Duration::from_secs(2) }, QuotaCap::Bucket(SECOND),
        ).unwrap();
        let slices = admitted(config, &wanted);
        let mut executor = Executor::new(config, &slices);
        // The first slice always wants to run.
        (0..slices.len()).for_each(|seat| executor.ask(seat));
        for (seat, tokens) in toggles {
            let seat = seat % slices.len();
            match (seat, executor.seats[seat].run) {
                (0, _) => {}
                (_, Some(_)) => executor.leave(seat),
                (_, None) => executor.ask(seat),
            }
            executor.advance(TOKEN * tokens);
        }
        executor.advance(SECOND);
        let mut from = Timestamp::ZERO;
        while from + SECOND <= executor.now {
            let computed = executor.computed(0, from, from + SECOND);
            let owed = slices[0].request().of(SECOND);
            prop_assert!(computed + 2 * TOKEN >= owed, "computed {computed:?} of {owed:?} from {from:?}: {slices:?}");
            from = from + millis(100);
        }
    }
}

#[test]
fn a_message_about_an_unknown_token_or_slice_changes_nothing() {
    let mut executor = Executor::new(Config::SLICES, &[terms(500, 300, 1000)]);
    executor.ask(0);
    let before = executor.core.clone();
    let run = executor.seats[0].run.unwrap();
    executor.send(vec![
        Event::Spent { run, token: TokenId(77), busy: TOKEN, more: false },
        Event::Spent { run: TokenHolder(9), token: TokenId(0), busy: TOKEN, more: true },
        Event::Gone { slice: SliceId(9) },
        Event::Left { run: TokenHolder(9) },
    ]);
    assert_eq!(executor.core, before);
    assert_eq!(executor.actions, []);
}

#[test]
fn the_charge_of_a_token_ahead_does_not_take_the_token_away() {
    let window = QuotaCap::Window(Duration::from_secs(1));
    let config = Config::new(Grid::Caps100, TOKEN, TokenOrder::Head, window).unwrap();
    // The first slice is owed more than the second before the charge of a token ahead, and less after it.
    let mut executor = Executor::new(config, &[terms(600, 500, 1000), terms(600, 493, 1000)]);
    executor.ask(0);
    executor.ask(1);
    executor.ask(0);
    assert!(executor.seats[0].ahead.is_some(), "the first run continues");
    assert!(executor.seats[1].present.is_none(), "the second run waits for SMs");
    executor.send(vec![Event::Tick]);
    assert_eq!(executor.actions, [], "nothing changed, so no token is withdrawn");
}

#[test]
fn runs_of_a_slice_that_left_get_no_further_token() {
    let mut executor = Executor::new(Config::SLICES, &[terms(1000, 300, 1000), terms(1000, 300, 1000)]);
    executor.ask(0);
    executor.ask(1);
    executor.send(vec![Event::Gone { slice: SliceId(0) }]);
    executor.advance(TOKEN);
    assert!(executor.seats[0].present.is_none());
    assert!(executor.seats[1].present.is_some());
    executor.advance(SECOND);
    assert!(executor.seats[0].present.is_none());
}

#[test]
fn new_terms_take_effect_at_the_next_token() {
    let mut executor = Executor::new(Config::SLICES, &[terms(250, 300, 1000), terms(500, 300, 1000)]);
    executor.ask(0);
    executor.ask(1);
    let wide = Terms::new(share(500), share(500), share(300), share(1000)).unwrap();
    executor.send(vec![Event::Terms { slice: SliceId(0), terms: wide }]);
    assert_eq!(executor.seats[0].present.unwrap().on.units(), 4);
    executor.advance(TOKEN);
    assert_eq!(executor.seats[0].present.unwrap().on.units(), 8);
}

#[test]
fn a_slice_that_misses_its_request_is_reported_as_starved() {
    let config = Config::new(Grid::Caps100, TOKEN, TokenOrder::Head, QuotaCap::Window(SECOND));
    let mut executor = Executor::new(config.unwrap(), &[terms(1000, 800, 1000), terms(1000, 800, 1000)]);
    executor.ask(0);
    executor.ask(1);
    let mut starved = Vec::new();
    for _ in 0..200 {
        executor.advance(TOKEN);
        starved.extend(executor.actions.iter().filter(|it| matches!(it, Action::Starved { .. })).copied());
    }
    let missed = |slice| Action::Starved { slice: SliceId(slice), missed: millis(300) };
    assert_eq!(starved, [missed(0), missed(1)]);
}
