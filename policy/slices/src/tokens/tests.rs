use millrace_types::{SmPercent, UnitSet};

use super::*;
use crate::units::Grid;

const TOKEN: Duration = Duration::from_millis(5);
const SECOND: Duration = Duration::from_secs(1);
const SKIP: TokenOrder = TokenOrder::Skip { age: Duration::from_secs(2) };

fn share(percent: u16) -> Permille {
    Permille::new(percent * 10).unwrap()
}

fn at(millis: u64) -> Timestamp {
    Timestamp(millis * 1_000_000)
}

fn millis(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

/// A core with a slice for each (least, most, request, limit) in percent. Slices have one run each, of the same
/// number.
struct Gpu {
    core: TokenCore,
    actions: Vec<Action>,
}

impl Gpu {
    fn new(config: Config, slices: &[(u16, u16, u16, u16)]) -> Self {
        let mut core = TokenCore::new(config);
        for (id, (least, most, request, limit)) in slices.iter().enumerate() {
            let terms = Terms::new(share(*least), share(*most), share(*request), share(*limit)).unwrap();
            let slice = SliceId(id as u64);
            core.on_event(Timestamp::ZERO, Event::Terms { slice, terms }, &mut Vec::new());
        }
        Self { core, actions: Vec::new() }
    }

    fn caps(order: TokenOrder, cap: QuotaCap, slices: &[(u16, u16, u16, u16)]) -> Self {
        Self::new(Config::new(Grid::Caps100, TOKEN, order, cap).unwrap(), slices)
    }

    /// Sends events of a time, and returns the actions other than samples.
    fn send(&mut self, now: Timestamp, events: &[Event]) -> Vec<Action> {
        self.actions.clear();
        self.core.on_events(now, events.iter().copied(), &mut self.actions);
        self.actions.iter().filter(|action| !matches!(action, Action::Sample { .. })).copied().collect()
    }
}

fn ask(run: u64) -> Event {
    due(run, None)
}

fn due(run: u64, deadline: Option<Timestamp>) -> Event {
    Event::Ask { slice: SliceId(run), run: TokenHolder(run), deadline, curve: ComputeCurve::FLAT }
}

fn spent(run: u64, token: u64, busy: Duration) -> Event {
    Event::Spent { run: TokenHolder(run), token: TokenId(token), busy, more: true }
}

fn cap(percent: u8) -> SmShare {
    SmShare::Cap(SmPercent::new(percent).unwrap())
}

fn grant(run: u64, token: u64, on: SmShare, busy: Duration) -> Action {
    Action::Grant { run: TokenHolder(run), token: TokenId(token), on, busy: Some(busy) }
}

fn open(run: u64, token: u64, on: SmShare) -> Action {
    Action::Grant { run: TokenHolder(run), token: TokenId(token), on, busy: None }
}

#[test]
fn a_lone_run_without_a_limit_gets_an_open_token_that_the_next_run_shortens() {
    let mut gpu = Gpu::caps(SKIP, QuotaCap::Bucket(SECOND), &[(60, 60, 30, 100), (24, 24, 30, 100)]);
    assert_eq!(gpu.send(at(0), &[ask(0)]), [open(0, 0, cap(60))]);
    let shorten = Action::Shorten { run: TokenHolder(0), token: TokenId(0), busy: millis(15) };
    assert_eq!(gpu.send(at(12), &[ask(1)]), [shorten, grant(1, 1, cap(24), TOKEN)]);
}

#[test]
fn a_lone_run_may_compute_up_to_its_limit_and_again_in_the_next_window() {
    // The paper's example: a request of 300 ms and a limit of 800 ms of each second.
    let mut gpu = Gpu::caps(TokenOrder::Head, QuotaCap::Window(SECOND), &[(12, 12, 30, 80)]);
    assert_eq!(gpu.send(at(0), &[ask(0)]), [grant(0, 0, cap(12), millis(800))]);
    assert_eq!(gpu.send(at(800), &[spent(0, 0, millis(800))]), []);
    assert_eq!(gpu.core.next_wake(), Some(at(1000)));
    assert_eq!(gpu.send(at(999), &[Event::Tick]), []);
    assert_eq!(gpu.send(at(1000), &[Event::Tick]), [grant(0, 1, cap(12), millis(800))]);
}

#[test]
fn a_long_token_ends_with_its_window() {
    let mut gpu = Gpu::caps(TokenOrder::Head, QuotaCap::Window(SECOND), &[(12, 12, 30, 80)]);
    assert_eq!(gpu.send(at(600), &[ask(0)]), [grant(0, 0, cap(12), millis(400))]);
    assert_eq!(gpu.send(at(1000), &[spent(0, 0, millis(400))]), [grant(0, 1, cap(12), millis(800))]);
}

#[test]
fn a_bucket_lets_a_run_compute_again_as_soon_as_it_gains() {
    let mut gpu = Gpu::caps(SKIP, QuotaCap::Bucket(SECOND), &[(12, 12, 0, 50)]);
    // The full bucket of 500 ms gains 500 ms while it empties.
    assert_eq!(gpu.send(at(0), &[ask(0)]), [grant(0, 0, cap(12), SECOND)]);
    assert_eq!(gpu.send(at(1000), &[spent(0, 0, SECOND)]), []);
    let wake = gpu.core.next_wake().unwrap();
    assert!(wake > at(1000) && wake < at(1001), "{wake:?}");
    assert_eq!(gpu.send(wake, &[Event::Tick]), [grant(0, 1, cap(12), TOKEN)]);
}

#[test]
fn the_largest_gap_is_served_first_and_ties_go_to_wider_slices() {
    for order in [TokenOrder::Head, SKIP] {
        let slices = [(60, 60, 20, 100), (60, 60, 70, 100), (80, 80, 70, 100)];
        let mut gpu = Gpu::caps(order, QuotaCap::Window(SECOND), &slices);
        assert_eq!(gpu.send(at(0), &[ask(0), ask(1), ask(2)]), [grant(2, 0, cap(80), TOKEN)]);
        assert_eq!(gpu.send(at(5), &[spent(2, 0, TOKEN)]), [grant(1, 1, cap(60), TOKEN)]);
    }
}

#[test]
fn a_misfit_stops_the_papers_line_and_is_skipped_in_ours() {
    let slices = [(60, 60, 70, 100), (60, 60, 60, 100), (24, 24, 10, 100)];
    let asks = [ask(0), ask(1), ask(2)];
    let mut head = Gpu::caps(TokenOrder::Head, QuotaCap::Window(SECOND), &slices);
    assert_eq!(head.send(at(0), &asks), [grant(0, 0, cap(60), TOKEN)]);
    let mut skip = Gpu::caps(SKIP, QuotaCap::Window(SECOND), &slices);
    let both = [grant(0, 0, cap(60), TOKEN), grant(2, 1, cap(24), TOKEN)];
    assert_eq!(skip.send(at(0), &asks), both);
}

#[test]
fn runs_beyond_their_requests_are_served_by_deadline_and_then_least_served_first() {
    let slices = [(60, 60, 0, 100); 4];
    let mut gpu = Gpu::caps(SKIP, QuotaCap::Bucket(SECOND), &slices);
    let asks = [ask(0), ask(1), due(2, Some(at(90))), due(3, Some(at(50)))];
    assert_eq!(gpu.send(at(0), &asks), [grant(3, 0, cap(60), TOKEN)]);
    assert_eq!(gpu.send(at(5), &[spent(3, 0, TOKEN), ask(3)]), [grant(2, 1, cap(60), TOKEN)]);
    let left = [Event::Left { run: TokenHolder(2) }, Event::Left { run: TokenHolder(3) }];
    assert_eq!(gpu.send(at(10), &left), [grant(0, 2, cap(60), TOKEN)]);
    assert_eq!(gpu.send(at(15), &[spent(0, 2, TOKEN)]), [grant(1, 3, cap(60), TOKEN)]);
}

#[test]
fn a_run_that_was_skipped_for_the_age_is_no_longer_passed() {
    let order = TokenOrder::Skip { age: millis(7) };
    let slices = [(60, 60, 50, 100), (60, 60, 50, 100), (100, 100, 0, 100)];
    let mut gpu = Gpu::caps(order, QuotaCap::Window(SECOND), &slices);
    assert_eq!(gpu.send(at(0), &[ask(0), ask(1), ask(2)]).len(), 1);
    assert_eq!(gpu.send(at(5), &[spent(0, 0, TOKEN)]), [grant(1, 1, cap(60), TOKEN)]);
    assert_eq!(gpu.send(at(10), &[spent(1, 1, TOKEN)]), [grant(2, 2, cap(100), TOKEN)]);
}

#[test]
fn a_token_ahead_is_for_the_same_sms_and_is_withdrawn_for_a_run_that_comes_first() {
    let slices = [(60, 60, 10, 100), (40, 40, 10, 100), (60, 60, 90, 100)];
    let mut gpu = Gpu::caps(SKIP, QuotaCap::Window(SECOND), &slices);
    assert_eq!(gpu.send(at(0), &[ask(0), ask(1)]).len(), 2);
    assert_eq!(gpu.send(at(2), &[ask(0)]), [grant(0, 2, cap(60), TOKEN)]);
    assert_eq!(gpu.send(at(2), &[ask(0)]), [], "a run has at most one token ahead");
    let withdraw = Action::Withdraw { run: TokenHolder(0), token: TokenId(2) };
    assert_eq!(gpu.send(at(3), &[ask(2)]), [withdraw]);
    assert_eq!(gpu.send(at(3), &[spent(0, 2, Duration::ZERO)]), []);
    assert_eq!(gpu.send(at(5), &[spent(0, 0, TOKEN)]), [grant(2, 3, cap(60), TOKEN)]);
}

#[test]
fn a_run_continues_on_its_token_ahead() {
    let mut gpu = Gpu::caps(SKIP, QuotaCap::Window(SECOND), &[(60, 60, 10, 100), (40, 40, 10, 100)]);
    gpu.send(at(0), &[ask(0), ask(1)]);
    gpu.send(at(2), &[ask(0)]);
    assert_eq!(gpu.send(at(5), &[spent(0, 0, TOKEN)]), []);
    assert_eq!(gpu.send(at(10), &[spent(0, 2, TOKEN)]), [grant(0, 3, cap(60), TOKEN)]);
}

#[test]
fn free_units_widen_the_run_that_gains_most() {
    let gains = |saturation, exponent| ComputeCurve::new(share(saturation), exponent).unwrap();
    let mut gpu = Gpu::new(Config::SLICES, &[(12, 100, 50, 100), (12, 50, 40, 100), (25, 25, 10, 100)]);
    let ask = |run, curve| Event::Ask { slice: SliceId(run), run: TokenHolder(run), deadline: None, curve };
    let curves = [gains(25, 0.4), gains(100, 0.7), gains(100, 1.0)];
    let asks: Vec<Event> = (0..3).zip(curves).map(|(run, curve)| ask(run, curve)).collect();
    let mut widths: Vec<(TokenHolder, u8)> = gpu
        .send(at(0), &asks)
        .iter()
        .filter_map(|action| match action {
            Action::Grant { run, on, .. } => Some((*run, on.units())),
            _ => None,
        })
        .collect();
    widths.sort_unstable();
    // Run 0 saturates at 4 units, run 1 may have 8, and run 2 is a partition.
    assert_eq!(widths, [(TokenHolder(0), 4), (TokenHolder(1), 8), (TokenHolder(2), 4)]);
}

/// Two runs without a request hold half of the SMs each, and their tokens end at different times.
#[test]
fn runs_that_are_owed_nothing_leave_their_units_to_a_wide_slice_that_is_owed_time() {
    let mut gpu =
        Gpu::caps(SKIP, QuotaCap::Window(SECOND), &[(50, 50, 0, 100), (50, 50, 0, 100), (100, 100, 30, 100)]);
    gpu.send(at(0), &[ask(0), ask(1)]);
    assert_eq!(gpu.send(at(1), &[ask(2)]), [], "the tokens of the two are short already");
    assert_eq!(gpu.send(at(5), &[spent(0, 0, TOKEN)]), [], "half of the SMs stay free for the wide slice");
    assert_eq!(gpu.send(at(6), &[spent(1, 1, TOKEN)]), [grant(2, 2, cap(100), TOKEN)]);
}

/// Both slices want half of the time. The runs of the first are short, and the next comes a moment after the
/// last.
#[test]
fn a_slice_with_short_runs_gets_its_request_beside_a_slice_with_long_runs() {
    let mut gpu = Gpu::new(Config::SLICES, &[(100, 100, 50, 100), (100, 100, 50, 100)]);
    let half = |slice, run| Event::Ask {
        slice: SliceId(slice),
        run: TokenHolder(run),
        deadline: None,
        curve: ComputeCurve::FLAT,
    };
    let mut now = Timestamp::ZERO;
    let mut computed = [Duration::ZERO; 2];
    let mut short = 10;
    let mut left = millis(9);
    let mut tokens = gpu.send(now, &[half(0, short), half(1, 1)]);
    while now < at(4_000) {
        let held = tokens.iter().find_map(|action| match *action {
            Action::Grant { run, token, busy, .. } => Some((run, token, busy.unwrap_or(TOKEN))),
            _ => None,
        });
        let (run, token, busy) = held.expect("a run has a token at any time");
        let is_short = run.0 == short;
        let busy = if is_short { busy.min(left) } else { busy };
        now = now + busy;
        computed[usize::from(!is_short)] += busy;
        left -= if is_short { busy } else { Duration::ZERO };
        let ends = is_short && left.is_zero();
        tokens = gpu.send(now, &[Event::Spent { run, token, busy, more: !ends }]);
        if ends {
            short += 1;
            left = millis(9);
            tokens.extend(gpu.send(now, &[half(0, short)]));
        }
    }
    assert!(computed[0] + millis(20) >= millis(2_000), "{computed:?}");
}

#[test]
fn turns_serve_one_run_at_a_time() {
    let mut gpu = Gpu::caps(TokenOrder::Turns, QuotaCap::Window(SECOND), &[(24, 24, 0, 100); 3]);
    assert_eq!(gpu.send(at(0), &[ask(2), ask(0), ask(1)]), [grant(0, 0, cap(24), TOKEN)]);
    for (turn, run) in [1, 2, 0, 1].into_iter().enumerate() {
        let turn = turn as u64;
        let before = (run + 2) % 3;
        let now = at(5 * turn + 5);
        let next = grant(run, turn + 1, cap(24), TOKEN);
        assert_eq!(gpu.send(now, &[spent(before, turn, TOKEN)]), [next]);
    }
}

#[test]
fn racing_runs_all_get_the_whole_gpu() {
    let mut gpu = Gpu::caps(TokenOrder::All, QuotaCap::Window(SECOND), &[(100, 100, 0, 100); 3]);
    let all: Vec<Action> = (0..3).map(|run| grant(run, run, cap(100), TOKEN)).collect();
    assert_eq!(gpu.send(at(0), &[ask(0), ask(1), ask(2)]), all);
}

#[test]
fn samples_state_whether_the_run_was_alone() {
    let mut gpu = Gpu::caps(SKIP, QuotaCap::Window(SECOND), &[(24, 24, 0, 50), (24, 24, 0, 50)]);
    gpu.send(at(0), &[ask(0)]);
    gpu.send(at(4), &[spent(0, 0, millis(4))]);
    let sample = |run, busy, alone| Action::Sample { run: TokenHolder(run), on: cap(24), busy, alone };
    assert!(gpu.actions.contains(&sample(0, millis(4), true)));
    gpu.send(at(5), &[ask(1)]);
    gpu.send(at(9), &[spent(1, 2, millis(3))]);
    assert!(gpu.actions.contains(&sample(1, millis(3), false)));
}

#[test]
fn blocks_of_different_runs_are_disjoint_and_aligned() {
    let mut gpu = Gpu::new(Config::SLICES, &[(50, 50, 30, 100), (24, 24, 20, 100), (12, 12, 10, 100)]);
    let block = |first, width| SmShare::Block(UnitSet::block(first, width).unwrap());
    let granted = [block(0, 8), block(8, 4), block(12, 2)];
    let expected: Vec<Action> =
        granted.into_iter().zip(0..).map(|(on, run)| grant(run, run, on, TOKEN)).collect();
    assert_eq!(gpu.send(at(0), &[ask(0), ask(1), ask(2)]), expected);
}

#[test]
fn configurations_outside_their_bounds_are_refused_with_advice() {
    let refused = |grid, token, order, cap| Config::new(grid, token, order, cap).unwrap_err().to_string();
    let window = QuotaCap::Window(SECOND);
    assert!(refused(Grid::Caps100, millis(51), SKIP, window).contains("1ms to 50ms"));
    assert!(refused(Grid::Caps100, TOKEN, SKIP, QuotaCap::Bucket(millis(1))).contains("5ms"));
    assert!(refused(Grid::Blocks16, TOKEN, TokenOrder::All, window).contains("choose percentages"));
}
