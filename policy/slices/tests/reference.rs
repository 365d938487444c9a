//! Comparison with the cases of a reference model (`tests/data`).
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::time::Duration;

use millrace_slices::dry_run;
use millrace_slices::rectangles::{Rectangle, RectanglePacker, Restructure};
use millrace_slices::tokens::{Action, Config, Event, QuotaCap, TokenCore, TokenHolder, TokenId, TokenOrder};
use millrace_slices::units::Grid;
use millrace_types::{ComputeCurve, Permille, SliceId, Terms, Timestamp};
use serde::Deserialize;
use serde::de::DeserializeOwned;

fn cases<T: DeserializeOwned>(text: &str) -> Vec<T> {
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn percent(percent: u16) -> Permille {
    Permille::new(percent * 10).unwrap()
}

/// Returns the share of the SMs that is so many of `total` units, rounded down: up would be a unit more.
fn sms(units: u16, total: u8) -> Permille {
    let thousandths = u32::from(units) * 1000 / u32::from(total);
    Permille::new(thousandths as u16).unwrap()
}

fn grid(total: u8) -> Grid {
    if total == 16 { Grid::Blocks16 } else { Grid::Caps100 }
}

fn window_config(grid: Grid, order: TokenOrder, token_ms: u64, window_ms: u64) -> Config {
    let cap = QuotaCap::Window(Duration::from_millis(window_ms));
    Config::new(grid, Duration::from_millis(token_ms), order, cap).unwrap()
}

const SKIP: TokenOrder = TokenOrder::Skip { age: Duration::from_secs(2) };

/// Pods with tokens that all end together, at each multiple of the token's length.
struct Pods {
    core: TokenCore,
    token: Duration,
    held: BTreeMap<TokenHolder, (TokenId, Timestamp)>,
}

impl Pods {
    fn new(config: Config, terms: &[Terms]) -> Self {
        let mut core = TokenCore::new(config);
        let slices = terms.iter().enumerate();
        let events = slices.map(|(id, terms)| Event::Terms { slice: SliceId(id as u64), terms: *terms });
        core.on_events(Timestamp::ZERO, events, &mut Vec::new());
        Self { core, token: config.token(), held: BTreeMap::new() }
    }

    /// Gives back all tokens, lets the pods in `wants` ask, and returns the pods that hold a token now.
    fn period(&mut self, number: u32, wants: &[bool]) -> Vec<usize> {
        let now = Timestamp::ZERO + self.token * number;
        let mut events = Vec::new();
        for (run, (token, begun)) in std::mem::take(&mut self.held) {
            let more = wants[run.0 as usize];
            events.push(Event::Spent { run, token, busy: now.since(begun), more });
        }
        for (id, wants) in wants.iter().enumerate() {
            let slice = SliceId(id as u64);
            let run = TokenHolder(id as u64);
            events.push(match wants {
                true => Event::Ask { slice, run, deadline: None, curve: ComputeCurve::FLAT },
                false => Event::Left { run },
            });
        }
        let mut actions = Vec::new();
        self.core.on_events(now, events, &mut actions);
        let mut order = Vec::new();
        for action in actions {
            if let Action::Grant { run, token, .. } = action {
                self.held.insert(run, (token, now));
                order.push(run.0 as usize);
            }
        }
        order
    }
}

#[derive(Deserialize)]
struct TokenCase {
    rule: String,
    total: u8,
    token_ms: u64,
    window_ms: u64,
    pods: Vec<(u16, u16)>,
    held: Vec<Vec<usize>>,
    missed_ms: Vec<i64>,
}

#[test]
fn tokens_of_a_window_equal_the_reference_model() {
    for case in cases::<TokenCase>(include_str!("data/tokens.jsonl")) {
        let order = if case.rule == "head" { TokenOrder::Head } else { SKIP };
        let config = window_config(grid(case.total), order, case.token_ms, case.window_ms);
        // The reference model grants nothing beyond the request: here the request is the limit.
        let terms = case.pods.iter().map(|&(request, sm)| {
            let sms = sms(sm, case.total);
            Terms::new(sms, sms, percent(request), percent(request)).unwrap()
        });
        let terms: Vec<Terms> = terms.collect();
        let mut pods = Pods::new(config, &terms);
        let wants = vec![true; terms.len()];
        for (number, held) in case.held.iter().enumerate() {
            assert_eq!(pods.period(number as u32, &wants), *held, "{:?} token {number}", case.pods);
        }
        let missed = case.missed_ms.iter().max().copied().unwrap_or(0) as u64;
        assert_eq!(dry_run::shortfall(config, &terms), Duration::from_millis(missed), "{:?}", case.pods);
    }
}

#[derive(Deserialize)]
struct PaperCase {
    token_ms: u64,
    window_ms: u64,
    pods: Vec<(u16, u16, u16)>,
    away_by_100_ms: Vec<Vec<bool>>,
    held: Vec<Vec<usize>>,
}

#[test]
fn the_papers_rule_gives_the_tokens_of_the_reference_model() {
    for case in cases::<PaperCase>(include_str!("data/paper.jsonl")) {
        let config = window_config(Grid::Caps100, TokenOrder::Head, case.token_ms, case.window_ms);
        let terms = case.pods.iter().map(|&(request, limit, sm)| {
            Terms::new(percent(sm), percent(sm), percent(request), percent(limit)).unwrap()
        });
        let mut pods = Pods::new(config, &terms.collect::<Vec<_>>());
        for (number, held) in case.held.iter().enumerate() {
            let tenth = number * case.token_ms as usize / 100;
            let wants: Vec<bool> = case.away_by_100_ms.iter().map(|away| !away[tenth]).collect();
            assert_eq!(pods.period(number as u32, &wants), *held, "{:?} token {number}", case.pods);
        }
    }
}

#[derive(Deserialize)]
struct FitsCase {
    token_ms: u64,
    window_ms: u64,
    pods: Vec<(u16, u16)>,
    fits: bool,
}

#[test]
fn dry_runs_admit_the_sets_of_the_reference_model() {
    for case in cases::<FitsCase>(include_str!("data/fits.jsonl")) {
        let config = window_config(Grid::Caps100, SKIP, case.token_ms, case.window_ms);
        let terms = case.pods.iter().map(|&(request, sm)| {
            Terms::new(percent(sm), percent(sm), percent(request), Permille::ALL).unwrap()
        });
        let mut terms: Vec<Terms> = terms.collect();
        // The model sorts pods by request first, and breaks ties of gap and width by this order.
        terms.sort_unstable_by_key(|terms| (terms.request(), terms.least()));
        let missed = dry_run::shortfall(config, &terms);
        assert_eq!(missed.is_zero(), case.fits, "{:?}: {missed:?}", case.pods);
    }
}

#[derive(Deserialize)]
struct RectangleCase {
    steps: Vec<Step>,
}

#[derive(Deserialize)]
struct Step {
    place: Option<u64>,
    pod: Option<(u16, u16)>,
    release: Option<u64>,
    gpu: usize,
    rectangle: [u16; 4],
    free: Vec<[u16; 4]>,
}

fn rectangle([x, y, width, height]: [u16; 4]) -> Rectangle {
    Rectangle { x: 10 * x, y: 10 * y, width: 10 * width, height: 10 * height }
}

#[test]
fn rectangles_and_free_lists_equal_the_reference_model() {
    for case in cases::<RectangleCase>(include_str!("data/rectangles.jsonl")) {
        let mut packer = RectanglePacker::new(64, Restructure::Always);
        for step in case.steps {
            if let (Some(id), Some((request, sm))) = (step.place, step.pod) {
                let terms = Terms::new(percent(sm), percent(sm), percent(request), Permille::ALL).unwrap();
                let placed = packer.place(SliceId(id), terms, |_| true);
                assert_eq!(placed, Some((step.gpu, rectangle(step.rectangle))));
            }
            if let Some(id) = step.release {
                assert!(packer.remove(SliceId(id)));
            }
            let free: Vec<Rectangle> = step.free.into_iter().map(rectangle).collect();
            assert_eq!(packer.gpus()[step.gpu].free(), free);
        }
    }
}
