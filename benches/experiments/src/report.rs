//! The report of an experiment, as a section of `docs/experiments.md`.

use std::fmt::Write as _;

use crate::figures::{PaperFigure, PolicyOrder, Verdict};
use crate::versus::PolicyComparison;

/// The result of an experiment.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ExperimentReport {
    /// The assumptions where the paper is silent.
    pub assumed: Vec<String>,
    /// The tables of all measurements, each as title, header and rows.
    pub tables: Vec<(String, Vec<String>, Vec<Vec<String>>)>,
    /// The paper's figures beside ours.
    pub figures: Vec<PaperFigure>,
    /// The orders of the paper.
    pub orders: Vec<PolicyOrder>,
    /// The measurements for the comparison of `unified` with the other policies.
    pub versus: PolicyComparison,
}

impl ExperimentReport {
    /// Returns whether every figure and order agrees with the paper or has a known cause.
    #[must_use]
    pub fn holds(&self) -> bool {
        let figures = self.figures.iter().map(PaperFigure::verdict);
        figures.chain(self.orders.iter().map(PolicyOrder::verdict)).all(|verdict| verdict != Verdict::Outside)
    }

    /// Returns the report as a Markdown section. `judged` is whether the section states verdicts.
    #[must_use]
    pub fn markdown(&self, id: &str, title: &str, judged: bool) -> String {
        let mut text = format!("## {id}: {title}\n\n");
        for assumed in &self.assumed {
            text += &format!("- {assumed}\n");
        }
        for (title, header, rows) in &self.tables {
            text += &format!("\n{title}\n\n");
            table(&mut text, header, rows);
        }
        if !self.figures.is_empty() {
            let header = ["figure", "paper", "ours (95% of the mean)", "band", ""].map(String::from);
            let rows: Vec<_> = self.figures.iter().map(|figure| figure_row(figure, judged)).collect();
            text.push('\n');
            table(&mut text, &header, &rows);
        }
        if !self.orders.is_empty() {
            let header = ["order", "seeds that agree", ""].map(String::from);
            let rows: Vec<_> = self.orders.iter().map(|order| order_row(order, judged)).collect();
            text.push('\n');
            table(&mut text, &header, &rows);
        }
        if let Some((sentence, behind)) = self.versus.summary() {
            text += &format!("\n{sentence}\n");
            if !behind.is_empty() {
                let header =
                    ["setup", "`unified` is behind in", "`unified`", "policy", "other"].map(String::from);
                text.push('\n');
                table(&mut text, &header, &behind);
            }
        }
        text.push('\n');
        text
    }
}

fn table(text: &mut String, header: &[String], rows: &[Vec<String>]) {
    let line = |cells: &[String]| format!("| {} |\n", cells.join(" | "));
    *text += &line(header);
    *text += &format!("|{}\n", "---|".repeat(header.len()));
    for row in rows {
        *text += &line(row);
    }
}

fn verdict_text(verdict: Verdict, cause: Option<&str>, judged: bool) -> String {
    match (judged, verdict) {
        (false, _) => "not judged".to_owned(),
        (true, Verdict::Inside) => "agrees".to_owned(),
        (true, Verdict::Explained) => format!("differs: {}", cause.unwrap_or_default()),
        (true, Verdict::Outside) => "**differs without a known cause**".to_owned(),
    }
}

fn figure_row(figure: &PaperFigure, judged: bool) -> Vec<String> {
    let mut ours = figure.unit.show(figure.ours.mean());
    if figure.ours.0.len() > 1 {
        // Writing to a string cannot fail.
        write!(ours, " ± {}", figure.unit.show(figure.ours.half_interval())).unwrap_or_default();
    }
    let band =
        format!("{} to {}", figure.unit.show(*figure.band.start()), figure.unit.show(*figure.band.end()));
    let verdict = verdict_text(figure.verdict(), figure.cause, judged);
    vec![figure.what.clone(), figure.paper.clone(), ours, band, verdict]
}

fn order_row(order: &PolicyOrder, judged: bool) -> Vec<String> {
    let agree = order.by.0.iter().filter(|by| **by >= 0.0).count();
    let mut seeds = format!("{agree} of {}", order.by.0.len());
    if order.by.mean() < 0.0 && order.verdict() == Verdict::Inside {
        seeds += ", a tie at 95%";
    }
    vec![order.what.clone(), seeds, verdict_text(order.verdict(), order.cause, judged)]
}
