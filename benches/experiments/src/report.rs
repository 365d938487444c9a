//! The report of an experiment, as a page of `docs/experiments`.

use crate::figures::{Figure, PolicyOrder, Status};
use crate::versus::PolicyComparison;

/// The result of an experiment.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ExperimentReport {
    /// The assumptions where the paper is silent.
    pub assumed: Vec<String>,
    /// The tables of all measurements, each as title, header and rows.
    pub tables: Vec<(String, Vec<String>, Vec<Vec<String>>)>,
    /// The figures of the paper and the goals of our own, beside ours.
    pub figures: Vec<Figure>,
    /// The orders that the paper or we expect.
    pub orders: Vec<PolicyOrder>,
    /// The measurements for the comparison of `unified` with the other policies.
    pub versus: PolicyComparison,
}

impl ExperimentReport {
    /// Returns the report as a Markdown section. `judged` is whether the section states statuses.
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
            let header = ["figure", "claim", "ours (95% of the mean)", "band", "status"].map(String::from);
            let rows: Vec<_> = self.figures.iter().map(|figure| figure_row(figure, judged)).collect();
            text.push('\n');
            table(&mut text, &header, &rows);
        }
        if !self.orders.is_empty() {
            let header = ["order", "seeds that agree", "status"].map(String::from);
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

fn status_text(status: Status, cause: Option<&str>, judged: bool) -> String {
    let explained =
        matches!(status, Status::NotReproduced | Status::Missed | Status::NotShown | Status::Opposite);
    match (judged, cause.filter(|_| explained)) {
        (false, _) => "-".to_owned(),
        (true, None) => status.name().to_owned(),
        (true, Some(cause)) => format!("{}: {cause}", status.name()),
    }
}

fn figure_row(figure: &Figure, judged: bool) -> Vec<String> {
    let status = status_text(figure.status(), figure.cause, judged);
    vec![figure.what.clone(), figure.claim.text.clone(), figure.shown(), figure.band_text(), status]
}

fn order_row(order: &PolicyOrder, judged: bool) -> Vec<String> {
    let agree = order.by.0.iter().filter(|by| **by > 0.0).count();
    let seeds = format!("{agree} of {}", order.by.0.len());
    vec![order.what.clone(), seeds, status_text(order.status(), order.cause, judged)]
}
