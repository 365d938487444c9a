//! The eight pods of FaST-GShare, section 5.4, in each order of arrival: how often one GPU suffices.

use anyhow::Result;
use millrace_slices::pack::Packer;
use millrace_slices::rectangles::{RectanglePacker, Restructure};
use millrace_slices::tokens::{Config, QuotaCap, TokenOrder};
use millrace_types::{SliceId, Terms};

use super::setup::{MEMORY, SECOND, ours, percentages, slice, terms};
use crate::Effort;
use crate::figures::{Bound, Claim, Figure, SeedValues, Unit};
use crate::report::ExperimentReport;

/// Request in thousandths of the time, percent of the SMs, and number of pods: ResNet, RNNT and BERT.
const PODS: [(u16, u16, usize); 3] = [(400, 12, 4), (400, 24, 2), (600, 50, 2)];
/// A pod for which the GPU has area left, but no schedule.
const NINTH: (u16, u16) = (130, 12);

/// Returns every order of the pods, by the index of their kind.
fn orders(left: [usize; 3], begun: &mut Vec<usize>, all: &mut Vec<Vec<usize>>) {
    if left == [0; 3] {
        all.push(begun.clone());
        return;
    }
    for kind in (0..left.len()).filter(|kind| left[*kind] > 0) {
        let mut rest = left;
        rest[kind] -= 1;
        begun.push(kind);
        orders(rest, begun, all);
        begun.pop();
    }
}

/// Returns whether our packing places the pods on one GPU. The packer is empty before and after: the orders
/// share its remembered dry runs.
fn fits_one(packer: &mut Packer, pods: &[Terms]) -> bool {
    let placed = pods.iter().zip(0..).all(|(terms, id)| packer.place(slice(id, *terms)).is_ok());
    (0..pods.len() as u64).for_each(|id| {
        packer.remove(SliceId(id));
    });
    placed
}

/// Returns whether the paper's rectangles place the pods on one GPU.
fn rectangles_fit_one(pods: &[Terms]) -> bool {
    let mut packer = RectanglePacker::new(1, Restructure::Always);
    pods.iter().zip(0..).all(|(terms, id)| packer.place(SliceId(id), *terms, |_| true).is_some())
}

pub(super) fn pack(_: Effort) -> Result<ExperimentReport> {
    let kinds = PODS.iter().map(|&(request, sm, _)| terms(request, sm)).collect::<Result<Vec<_>>>()?;
    let mut all = Vec::new();
    orders(PODS.map(|(_, _, count)| count), &mut Vec::new(), &mut all);
    let all: Vec<Vec<Terms>> =
        all.iter().map(|order| order.iter().map(|kind| kinds[*kind]).collect()).collect();
    let token = Config::SLICES.token();
    let head = percentages(TokenOrder::Head, QuotaCap::Window(SECOND), token)?;
    let ways: [(&str, Config); 3] = [
        ("dry run, percentages", ours()?),
        ("dry run, blocks of 16 units", Config::SLICES),
        ("dry run of the paper's tokens", head),
    ];
    let mut report = ExperimentReport::default();
    report.assumed.push(format!(
        "Section 5.4's pods: four ResNet (40% of the time, 12% of the SMs), two RNNT (40%, 24%) and two BERT (60%, 50%), in all {} orders of arrival. Blocks of 16 units round 12% up to 2 units, 24% to 4 and 50% to 8.",
        all.len()
    ));
    report.assumed.push(
        "The ninth pod wants 13% of the time on 12% of the SMs. Its area is free (9,996 of 10,000 with the pod), but no schedule exists: in any schedule, a column of 12% would lack 13% of the time.".to_owned(),
    );
    let mut rows = Vec::new();
    for (way, config) in ways {
        let mut packer = Packer::new(config, MEMORY, 1);
        let one = all.iter().filter(|pods| fits_one(&mut packer, pods)).count();
        let ninth = [all[0].clone(), vec![terms(NINTH.0, NINTH.1)?]].concat();
        let refused = !fits_one(&mut packer, &ninth);
        rows.push(vec![
            way.to_owned(),
            one.to_string(),
            if refused { "refused" } else { "placed" }.to_owned(),
        ]);
        report.figures.push(exact(
            format!("{way}: orders on one GPU"),
            "all, as section 5.4 claims",
            one,
            all.len(),
        ));
        report.figures.push(exact(
            format!("{way}: ninth pods refused"),
            "none stated",
            usize::from(refused),
            1,
        ));
    }
    let one = all.iter().filter(|pods| rectangles_fit_one(pods)).count();
    rows.push(vec!["maximal rectangles (the paper)".to_owned(), one.to_string(), "-".to_owned()]);
    report.figures.push(exact(
        "maximal rectangles: orders on one GPU".to_owned(),
        "none stated; 138 in a reference model of the algorithm",
        one,
        138,
    ));
    let header = ["packing", "orders on one GPU", "ninth pod"].map(String::from).to_vec();
    report.tables.push((format!("Orders of {} that end on one GPU:", all.len()), header, rows));
    Ok(report)
}

/// Returns a count that must have a certain value.
fn exact(what: String, paper: &str, ours: usize, wanted: usize) -> Figure {
    Figure {
        what,
        claim: Claim::goal(paper, Bound::About(wanted as f64)),
        ours: SeedValues(vec![ours as f64]),
        unit: Unit::Count,
        cause: None,
    }
}
