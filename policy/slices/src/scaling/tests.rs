use proptest::prelude::*;

use super::*;

const SECOND: Duration = Duration::from_secs(1);
const BOUNDS: SliceBounds = SliceBounds { min: 1, max: 8 };

fn quota(thousandths: u16) -> Permille {
    Permille::new(thousandths).unwrap()
}

fn millis(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

/// Returns the capacity of slices with runs of 10 ms, all of the time, and a deadline of 60 ms for 98%.
fn table() -> CapacityTable {
    let speed = SliceSpeed { run: millis(10), limit: Permille::ALL };
    CapacityTable::new(Capacity { speed, objective: Some((millis(60), 0.98)) }, BOUNDS.max)
}

/// A function under a load, looked at each second.
struct Looks {
    scaler: SliceScaler,
    capacity: CapacityTable,
    now: Timestamp,
    answered: f64,
    count: u32,
}

impl Looks {
    fn new(count: u32) -> Self {
        let now = Timestamp::ZERO;
        Self { scaler: SliceScaler::new(now, count), capacity: table(), now, answered: 0.0, count }
    }

    /// Lets requests arrive at a rate for a second. The slices answer at most their throughput.
    fn second(&mut self, rate: f64) -> u32 {
        let most = self.capacity.of().throughput(self.count);
        self.answered += rate.min(most);
        self.now = self.now + SECOND;
        let seen = Observed {
            answered: self.answered as u64,
            used: Some((rate / most).min(1.0)),
            slices: self.count,
        };
        self.count = self.scaler.look(self.now, seen, Permille::ALL, &mut self.capacity, BOUNDS);
        self.count
    }

    fn seconds(&mut self, seconds: u32, rate: f64) -> Vec<u32> {
        (0..seconds).map(|_| self.second(rate)).collect()
    }
}

/// The prototype of the design: ResNet with a deadline of 69 ms for 99%, and runs of 14 ms.
#[test]
fn the_capacity_of_a_slice_is_the_share_of_its_throughput_that_the_prototype_found() {
    for (limit, expected) in [(200, 0.88), (400, 0.96), (600, 0.91), (800, 0.69), (1000, 0.55)] {
        let speed = SliceSpeed { run: millis(14), limit: quota(limit) };
        let capacity = Capacity { speed, objective: Some((millis(69), 0.99)) };
        let share = capacity.rate(1) / capacity.throughput(1);
        assert!((share - expected).abs() <= 0.08, "limit {limit}: {share}, not {expected}");
    }
}

#[test]
fn slices_with_one_line_serve_more_than_so_many_slices_alone() {
    let mut table = table();
    let [none, one, four, eight, more] = [0, 1, 4, 8, 99].map(|slices| table.rate(slices));
    assert!(four > 4.2 * one, "{four} and {one}");
    assert!(four < table.of().throughput(4));
    assert_eq!((none, more), (0.0, eight));
    assert_eq!((table.slices_for(0.0), table.slices_for(1.0), table.slices_for(1e9)), (0, 1, 8));
}

#[test]
fn an_objective_that_a_run_alone_misses_counts_as_none() {
    let speed = SliceSpeed { run: millis(100), limit: Permille::ALL };
    let late = Capacity { speed, objective: Some((millis(60), 0.98)) };
    let none = Capacity { speed, objective: None };
    assert_eq!(late.rate(2), none.rate(2));
    assert_eq!(none.rate(2), 16.0);
}

#[test]
fn a_load_that_rises_at_once_has_its_slices_after_three_seconds() {
    let mut looks = Looks::new(1);
    assert!(looks.seconds(30, 40.0).iter().all(|&count| count == 1));
    let needed = looks.capacity.slices_for(200.0);
    let counts = looks.seconds(3, 200.0);
    assert!(counts[2] >= needed, "{counts:?}, {needed} are needed");
    assert!(looks.seconds(30, 200.0).iter().all(|&count| count >= needed));
}

#[test]
fn slices_are_taken_away_only_after_a_minute_with_less_load() {
    let mut looks = Looks::new(1);
    looks.seconds(60, 300.0);
    let high = looks.count;
    let counts = looks.seconds(59, 20.0);
    assert!(counts.iter().all(|&count| count == high), "{high}: {counts:?}");
    looks.seconds(30, 20.0);
    assert_eq!(looks.count, 1);
}

#[test]
fn a_new_leader_takes_no_slice_away_for_a_minute() {
    let mut looks = Looks::new(6);
    assert!(looks.seconds(59, 10.0).iter().all(|&count| count == 6));
    looks.seconds(3, 10.0);
    assert_eq!(looks.count, 1);
}

#[test]
fn a_load_at_the_edge_changes_nothing_back_and_forth() {
    let mut looks = Looks::new(1);
    let edge = looks.capacity.rate(2);
    let counts: Vec<_> =
        (0..600).map(|second| looks.second(edge * if second % 2 == 0 { 0.97 } else { 1.03 })).collect();
    let changes = counts.windows(2).filter(|pair| pair[0] != pair[1]).count();
    assert!(changes <= 2, "{counts:?}");
}

#[test]
fn a_forecast_follows_a_ramp_and_states_its_mean_miss() {
    let mut forecast = Forecast::new();
    let mut count = 0.0;
    for second in 0..60_u32 {
        count += f64::from(second) * 2.0;
        forecast.look(Timestamp::ZERO + SECOND * second, count as u64);
    }
    // After 59 s the rate is 118 a second, and rises by 2 each second.
    assert!((forecast.upper() - 122.0).abs() <= 8.0, "{}", forecast.upper());
    assert!(forecast.missed() <= 3.0, "{}", forecast.missed());
    let before = forecast.upper();
    forecast.look(Timestamp::ZERO + SECOND * 60, 0);
    assert_eq!(forecast.upper(), before, "a count that was restarted tells nothing");
}

proptest! {
    #[test]
    fn the_number_stays_within_its_bounds_and_suffices_for_a_steady_load(
        rates in prop::collection::vec(0.0..2_000.0_f64, 1..20),
        last in 1.0..700.0_f64,
    ) {
        let mut looks = Looks::new(1);
        for rate in rates {
            let count = looks.second(rate);
            prop_assert!((BOUNDS.min..=BOUNDS.max).contains(&count));
        }
        looks.seconds(200, last);
        let needed = looks.capacity.slices_for(last).max(1);
        prop_assert!(looks.count >= needed, "{} of {needed}", looks.count);
        let spared = looks.capacity.slices_for(last / 0.7).max(1);
        prop_assert!(looks.count <= spared.max(needed), "{} although {spared} suffice", looks.count);
    }
}
