use millrace_types::ComputeCurve;
use millrace_types::profile::{PROFILE_POINTS_MAX, PROFILE_WIDTHS};
use proptest::prelude::*;

use super::*;

const MS: Duration = Duration::from_millis(1);

fn quota(thousandths: u16) -> Permille {
    Permille::new(thousandths).unwrap()
}

/// Returns the time of a run of 10 ms on the whole GPU.
fn time_on(curve: ComputeCurve, units: u8) -> Duration {
    Duration::from_secs_f64(0.010 / curve.rate(Permille::new(u16::from(units) * 1000 / 16).unwrap()))
}

fn measured(curve: ComputeCurve, setting: TrialSetting) -> ProfilePoint {
    let p50 = time_on(curve, setting.units());
    ProfilePoint {
        runs: 200,
        p50,
        p99: p50,
        elapsed: p50 * 200,
        computed: p50 * 200,
        ..ProfilePoint::new(setting)
    }
}

/// Carries out all trials of a profile.
fn profile(curve: ComputeCurve, coverage: ProfileCoverage) -> Vec<ProfilePoint> {
    let mut points = Vec::new();
    while let Some(setting) = next_trial(&points, coverage) {
        assert!(points.len() < PROFILE_POINTS_MAX, "the profile never ends");
        points.push(measured(curve, setting));
    }
    points
}

#[test]
fn the_grid_has_every_width_with_every_quota_once() {
    let points = profile(ComputeCurve::FLAT, ProfileCoverage::Grid);
    let mut settings: Vec<_> = points.iter().map(|point| point.setting).collect();
    settings.sort_unstable();
    settings.dedup();
    assert_eq!(settings.len(), PROFILE_POINTS_MAX);
}

#[test]
fn a_straight_curve_needs_three_trials_and_a_bent_one_more() {
    let widths = |curve| {
        let points = profile(curve, ProfileCoverage::Curve);
        points.iter().map(|point| point.setting.units()).collect::<Vec<_>>()
    };
    assert_eq!(widths(ComputeCurve::PROPORTIONAL), [16, 1, 4]);
    assert_eq!(widths(ComputeCurve::FLAT), [16, 1, 4]);
    let bent = ComputeCurve::new(quota(250), 1.0).unwrap();
    assert_eq!(widths(bent), [16, 1, 4, 2, 8]);
}

#[test]
fn a_trial_goes_on_after_another_leader_took_over() {
    let curve = ComputeCurve::new(quota(250), 1.0).unwrap();
    let all = profile(curve, ProfileCoverage::Grid);
    for done in 0..all.len() {
        let next = next_trial(&all[..done], ProfileCoverage::Grid);
        assert_eq!(next, Some(all[done].setting));
    }
}

#[test]
fn no_width_is_slower_than_a_narrower_one_and_nothing_is_guessed_beyond_the_widths() {
    let point =
        |units, p50| ProfilePoint { p50, ..ProfilePoint::new(TrialSetting::whole_time(units).unwrap()) };
    let curve = MeasuredCurve::new(&[point(8, 11 * MS), point(2, 20 * MS), point(4, 10 * MS)]);
    assert_eq!(curve.time_on(4), Some(10 * MS));
    assert_eq!(curve.time_on(8), Some(10 * MS));
    assert_eq!((curve.time_on(1), curve.time_on(16)), (None, None));
    assert_eq!(MeasuredCurve::new(&[]).time_on(4), None);
    assert_eq!(MeasuredCurve::new(&[]).error(), 0.0);
}

proptest! {
    #[test]
    fn at_most_five_trials_predict_every_width_within_a_tenth(saturation in 1..=1000_u16, exponent in 0.0..=1.0) {
        let curve = ComputeCurve::new(quota(saturation), exponent).unwrap();
        let points = profile(curve, ProfileCoverage::Curve);
        prop_assert!(points.len() <= 5);
        let fitted = MeasuredCurve::new(&points);
        for units in PROFILE_WIDTHS {
            let (predicted, actual) = (fitted.time_on(units).unwrap(), time_on(curve, units));
            let error = (predicted.as_secs_f64() / actual.as_secs_f64() - 1.0).abs();
            prop_assert!(error <= 0.1, "{units} units: {predicted:?}, not {actual:?}");
        }
    }
}

/// Answers the requests of a trial until the trial ends.
fn answered(
    setting: TrialSetting,
    mut answer: impl FnMut(Timestamp, u32) -> TrialAnswer,
) -> (TrialStep, u32, Timestamp) {
    let mut now = Timestamp::ZERO;
    let mut trial = Trial::new(now, setting);
    for number in 0.. {
        let answer = answer(now, number);
        now = now + answer.took;
        match trial.on_answer(now, answer) {
            TrialStep::Send { after } => now = now + after,
            end => return (end, number + 1, now),
        }
    }
    unreachable!()
}

fn alone(took: Duration, units: u8) -> TrialAnswer {
    TrialAnswer { took, computed: took, held: Duration::ZERO, units: Some(units), alone: true }
}

#[test]
fn a_trial_ends_after_200_requests_or_five_seconds() {
    let setting = TrialSetting::whole_time(4).unwrap();
    let (end, sent, _) = answered(setting, |_, _| alone(2 * MS, 4));
    let TrialStep::Done(point) = end else { panic!("{end:?}") };
    assert_eq!((sent, point.runs, point.p50, point.p99), (203, 200, 2 * MS, 2 * MS));
    assert_eq!((point.throughput(), point.utilisation()), (500.0, 1.0));
    let (end, sent, now) = answered(setting, |_, _| alone(500 * MS, 4));
    let TrialStep::Done(point) = end else { panic!("{end:?}") };
    assert_eq!((sent, point.runs, now), (13, 10, Timestamp::ZERO + 6500 * MS));
}

#[test]
fn requests_that_met_others_do_not_count_and_are_followed_by_a_pause() {
    let setting = TrialSetting::whole_time(4).unwrap();
    let mut last = None;
    let (end, ..) = answered(setting, |now, number| {
        if let Some(ended) = last.take() {
            assert!(now.since(ended) >= 180 * MS, "the trial takes at most a tenth of the time");
        }
        match number % 10 {
            9 => {
                last = Some(now + 20 * MS);
                TrialAnswer { alone: false, ..alone(20 * MS, 4) }
            }
            _ => alone(2 * MS, 4),
        }
    });
    let TrialStep::Done(point) = end else { panic!("{end:?}") };
    assert_eq!((point.runs, point.p99), (200, 2 * MS));
}

#[test]
fn a_trial_on_a_busy_gpu_is_given_up_after_a_minute() {
    let setting = TrialSetting::whole_time(4).unwrap();
    let (end, sent, now) = answered(setting, |_, _| TrialAnswer { alone: false, ..alone(20 * MS, 4) });
    assert_eq!(end, TrialStep::GiveUp(TrialFault::Busy { alone: 0, all: sent }));
    assert!(now.since(Timestamp::ZERO) < 61_000 * MS);
    let TrialStep::GiveUp(fault) = end else { panic!("{end:?}") };
    assert!(fault.to_string().contains("profile when fewer requests come"));
}

#[test]
fn a_trial_ends_at_once_if_the_gpu_is_not_shared() {
    let setting = TrialSetting::whole_time(4).unwrap();
    let (end, sent, _) = answered(setting, |_, _| TrialAnswer { units: None, ..alone(2 * MS, 4) });
    assert_eq!((end, sent), (TrialStep::GiveUp(TrialFault::NotShared), 1));
}

#[test]
fn answers_on_another_width_do_not_count() {
    let setting = TrialSetting::whole_time(4).unwrap();
    let (end, ..) = answered(setting, |_, number| alone(2 * MS, if number < 10 { 16 } else { 4 }));
    let TrialStep::Done(point) = end else { panic!("{end:?}") };
    assert_eq!(point.runs, 200);
}

#[test]
fn a_limited_trial_counts_only_requests_under_the_limit() {
    let setting = TrialSetting::new(4, quota(200)).unwrap();
    // The account holds 200 ms at first; then a request waits four times as long as it computes.
    let (end, _, now) = answered(setting, |now, _| {
        let full = now.since(Timestamp::ZERO) < 200 * MS;
        let held = if full { Duration::ZERO } else { 8 * MS };
        TrialAnswer { took: 2 * MS + held, computed: 2 * MS, held, units: Some(4), alone: true }
    });
    let TrialStep::Done(point) = end else { panic!("{end:?}") };
    assert_eq!((point.p50, point.throughput(), point.utilisation()), (10 * MS, 100.0, 0.2));
    assert!(now.since(Timestamp::ZERO) >= 3_000 * MS);
}

/// A curve is compared at the widths of tokens.
fn worst_error(of: ComputeCurve, fitted: ComputeCurve) -> f64 {
    let share = |units: &u8| Permille::new(u16::from(*units) * 1000 / 16).unwrap();
    let error = |units: &u8| (fitted.rate(share(units)) / of.rate(share(units)) - 1.0).abs();
    PROFILE_WIDTHS.iter().map(error).fold(0.0, f64::max)
}

#[test]
fn a_curve_is_fitted_from_three_widths_with_the_whole_gpu_on() {
    let widths = |units: &[u8]| {
        let points = units.iter().map(|&units| TrialSetting::whole_time(units).unwrap());
        let points: Vec<_> = points.map(|setting| measured(ComputeCurve::PROPORTIONAL, setting)).collect();
        MeasuredCurve::new(&points).fitted()
    };
    for too_few in [&[][..], &[4], &[16], &[16, 1], &[1, 2, 4, 8]] {
        assert_eq!(widths(too_few), None, "{too_few:?}");
    }
    assert!(widths(&[16, 1, 4]).is_some());
    for curve in [ComputeCurve::FLAT, ComputeCurve::PROPORTIONAL] {
        let fitted = MeasuredCurve::new(&profile(curve, ProfileCoverage::Curve)).fitted().unwrap();
        assert_eq!(worst_error(curve, fitted), 0.0, "{curve:?} became {fitted:?}");
    }
}

proptest! {
    #[test]
    fn the_fitted_curve_is_near_the_curve_that_was_measured(
        saturation in 63u16..=1000,
        exponent in 0.0f64..=1.0,
    ) {
        let curve = ComputeCurve::new(quota(saturation), exponent).unwrap();
        let fitted = MeasuredCurve::new(&profile(curve, ProfileCoverage::Grid)).fitted().unwrap();
        let error = worst_error(curve, fitted);
        prop_assert!(error < 0.06, "{curve:?} became {fitted:?}, {error}");
    }
}
