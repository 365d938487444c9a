//! What an experiment tells, as text for people and as a section of `docs/experiments.md`.

use std::fmt::Write as _;

use crate::figures::{Figure, Order, Verdict};
use crate::versus::Versus;

/// What came of an experiment.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Report {
    /// What was assumed that the paper does not say.
    pub assumed: Vec<String>,
    /// Tables of everything measured: a title, a header, rows.
    pub tables: Vec<(String, Vec<String>, Vec<Vec<String>>)>,
    /// The paper's figures beside ours.
    pub figures: Vec<Figure>,
    /// Orders that the paper found.
    pub orders: Vec<Order>,
    /// What `unified` is compared with the other policies by.
    pub versus: Versus,
}

impl Report {
    /// Whether everything agrees or has a cause.
    #[must_use]
    pub fn holds(&self) -> bool {
        let figures = self.figures.iter().map(Figure::verdict);
        figures.chain(self.orders.iter().map(Order::verdict)).all(|verdict| verdict != Verdict::Outside)
    }

    /// As Markdown.
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
        if let Some((sentence, behind)) = self.versus.told() {
            text += &format!("\n{sentence}\n");
            if !behind.is_empty() {
                let header = ["behind in", "", "`unified`", "policy", "its"].map(String::from);
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

fn said(verdict: Verdict, cause: Option<&str>, judged: bool) -> String {
    match (judged, verdict) {
        (false, _) => "not judged".to_owned(),
        (true, Verdict::Inside) => "agrees".to_owned(),
        (true, Verdict::Explained) => format!("differs: {}", cause.unwrap_or_default()),
        (true, Verdict::Outside) => "**differs, and nobody knows why**".to_owned(),
    }
}

fn figure_row(figure: &Figure, judged: bool) -> Vec<String> {
    let mut ours = figure.unit.show(figure.ours.mean());
    if figure.ours.0.len() > 1 {
        // A string takes what is written to it.
        write!(ours, " ± {}", figure.unit.show(figure.ours.half())).unwrap_or_default();
    }
    let band =
        format!("{} to {}", figure.unit.show(*figure.band.start()), figure.unit.show(*figure.band.end()));
    let verdict = said(figure.verdict(), figure.cause, judged);
    vec![figure.what.clone(), figure.paper.clone(), ours, band, verdict]
}

fn order_row(order: &Order, judged: bool) -> Vec<String> {
    let agree = order.by.0.iter().filter(|by| **by >= 0.0).count();
    let mut seeds = format!("{agree} of {}", order.by.0.len());
    if order.by.mean() < 0.0 && order.verdict() == Verdict::Inside {
        seeds += ", a tie at 95%";
    }
    vec![order.what.clone(), seeds, said(order.verdict(), order.cause, judged)]
}
