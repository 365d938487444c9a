//! Tables that can be sorted and filtered, whatever is in them.

use std::cmp::Ordering;

/// What a cell wants of who looks at it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum Tone {
    #[default]
    Plain,
    /// Nothing to see.
    Quiet,
    Good,
    Warning,
    Bad,
}

/// What is in one place of a table.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Cell {
    pub(super) text: String,
    /// What it is sorted by; `None`: by its text.
    by: Option<f64>,
    pub(super) tone: Tone,
}

impl Cell {
    pub(super) fn text(text: impl Into<String>) -> Self {
        Self { text: text.into(), by: None, tone: Tone::Plain }
    }

    /// A quantity, written as `text`.
    pub(super) fn number(by: f64, text: impl Into<String>) -> Self {
        Self { text: text.into(), by: Some(by), tone: Tone::Plain }
    }

    /// A quantity that is not known.
    pub(super) fn unknown() -> Self {
        Self { text: "-".to_owned(), by: Some(f64::NEG_INFINITY), tone: Tone::Quiet }
    }

    pub(super) fn tone(self, tone: Tone) -> Self {
        Self { tone, ..self }
    }
}

/// A line of a table.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Row {
    /// What tells it apart, now and later.
    pub(super) id: String,
    pub(super) cells: Vec<Cell>,
}

/// How wide a column is, and how it is read.
#[derive(Debug, Clone, Copy)]
pub(super) struct Column {
    pub(super) heading: &'static str,
    pub(super) width: Width,
}

/// How wide a column is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Width {
    /// As wide as this, its content to the left.
    Words(u16),
    /// As wide as this, its content to the right.
    Number(u16),
    /// What others leave, of which it has this part.
    Rest(u16),
}

/// A table.
#[derive(Debug, Clone)]
pub(super) struct Sheet {
    pub(super) columns: &'static [Column],
    pub(super) rows: Vec<Row>,
}

/// By what rows are ordered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Order {
    pub(super) column: usize,
    /// Against the usual direction, which is the largest quantity and the first word first.
    pub(super) reversed: bool,
}

impl Sheet {
    /// The rows that a filter lets through, in order. Rows that are alike keep the places they had.
    pub(super) fn arranged(&self, filter: &str, order: Option<Order>) -> Vec<&Row> {
        let filter = filter.to_lowercase();
        let contains = |cell: &Cell| cell.text.to_lowercase().contains(&filter);
        let passes = |row: &&Row| row.id.to_lowercase().contains(&filter) || row.cells.iter().any(contains);
        let mut rows: Vec<&Row> = self.rows.iter().filter(passes).collect();
        if let Some(Order { column, reversed }) = order {
            rows.sort_by(|a, b| {
                let usual = compare(&a.cells[column], &b.cells[column]);
                if reversed { usual.reverse() } else { usual }
            });
        }
        rows
    }
}

fn compare(a: &Cell, b: &Cell) -> Ordering {
    match (a.by, b.by) {
        (Some(a), Some(b)) => b.total_cmp(&a),
        _ => a.text.cmp(&b.text),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const COLUMNS: &[Column] = &[
        Column { heading: "NAME", width: Width::Rest(1) },
        Column { heading: "RATE", width: Width::Number(6) },
    ];

    fn sheet() -> Sheet {
        let row = |name: &str, rate| Row { id: format!("t/{name}"), cells: vec![Cell::text(name), rate] };
        let number = |by: f64| Cell::number(by, by.to_string());
        let rows = vec![row("b", number(9.0)), row("a", number(10.0)), row("c", Cell::unknown())];
        Sheet { columns: COLUMNS, rows }
    }

    fn names(filter: &str, order: Option<(usize, bool)>) -> String {
        let order = order.map(|(column, reversed)| Order { column, reversed });
        sheet().arranged(filter, order).iter().map(|row| row.cells[0].text.as_str()).collect()
    }

    #[test]
    fn quantities_begin_with_the_largest_and_words_with_the_first() {
        assert_eq!(names("", None), "bac");
        assert_eq!(names("", Some((0, false))), "abc");
        assert_eq!(names("", Some((1, false))), "abc", "10 is more than 9, and both than nothing");
        assert_eq!(names("", Some((1, true))), "cba");
    }

    #[test]
    fn a_filter_looks_at_names_and_cells_in_any_case() {
        assert_eq!(names("T/", None), "bac");
        assert_eq!(names("10", None), "a");
        assert_eq!(names("nobody", None), "");
    }
}
